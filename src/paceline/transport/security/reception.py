"""Server's half of the handshake, without I/O; `handshake` has the client's.

In order: :meth:`Reception.challenge`, :meth:`Reception.take` the answer, :meth:`Reception.welcome`,
:meth:`Reception.identify`.
"""

from __future__ import annotations

import secrets

import msgspec

from paceline.errors import AddressError, AuthenticationError
from paceline.transport.security.authentication import (
    NONCE_BYTES,
    Challenge,
    ConnectionIdentity,
    Hello,
    Proof,
    check_proof,
    decode,
    encode_hello,
    join_fields,
    prove,
    read_hello,
)
from paceline.transport.security.sealing import Seals, derive_seals


class Reception:
    """A server's half of one handshake."""

    def __init__(self, token: str, hello: Hello, listener: str) -> None:
        """``listener``: the id of this listener."""
        self.seals: Seals | None = None
        """Seals of later frames, available after the welcome; None if frames are not sealed."""
        self.is_relayed = False
        """Whether both ends have a binding, but different ones."""
        self._token = token
        self._hello = hello
        self._listener = listener
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._said: tuple[bytes, ...] = ()
        self._view = ConnectionIdentity()

    def challenge(self) -> bytes:
        """Return the meta of the CHALLENGE."""
        return msgspec.msgpack.encode(Challenge(self._nonce))

    def take(self, meta: bytes | memoryview) -> None:
        """Process the meta of the HELLO. Raises AuthenticationError if its proof is wrong."""
        given = decode(meta, Proof)
        if len(given.nonce) != NONCE_BYTES:
            raise AuthenticationError(f"the client's nonce has {len(given.nonce)} bytes, {NONCE_BYTES} were expected")
        said = (given.nonce, self._nonce, given.hello, given.view)
        check_proof(self._token, "client", given, *said)
        self._said, self._view = said, decode(given.view, ConnectionIdentity)

    def welcome(self, binding: bytes) -> bytes:
        """Return the meta of the WELCOME; ``binding`` is this end's. Sent before a rejection by :meth:`identify` too,
        so that the client can trust the reason.
        """
        mine = encode_hello(self._hello)
        view = msgspec.msgpack.encode(ConnectionIdentity(binding=binding, listener=self._listener))
        said = (*self._said, mine, view)
        if not (binding and binding == self._view.binding):
            nonces = self._said[0] + self._said[1]
            self.is_relayed = bool(binding and self._view.binding)
            self.seals = derive_seals(self._token, nonces, join_fields(*said), connecting=False)
        return msgspec.msgpack.encode(Proof(mine, view, self._nonce, prove(self._token, "server", *said)))

    def identify(self) -> Hello:
        """Return the client's Hello.

        Raises VersionError for another version, AddressError if the client expects another server.
        """
        theirs = read_hello("client", self._said[2])
        reason = mistaken(theirs, self._view, self._hello, ConnectionIdentity(listener=self._listener))
        if reason:
            raise AddressError(f"{theirs.role} {theirs.rank} ({theirs.name}) has the wrong server: {reason}")
        return theirs


def mistaken(
    asking: Hello, asking_view: ConnectionIdentity, answering: Hello, answering_view: ConnectionIdentity
) -> str:
    """Return the reason why this is not the client's expected server; empty if it is."""
    if asking_view.listener and asking_view.listener != answering_view.listener:
        return "another process listens there now: the previous one has ended"
    if asking.to and asking.to != answering.role:
        return f"a {answering.role} listens there, a {asking.to} was expected"
    if asking.cluster and answering.cluster and asking.cluster != answering.cluster:
        return f"the {answering.role} there belongs to another cluster"
    return ""

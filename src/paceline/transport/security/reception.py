"""The server's half of the handshake, without what carries its frames; the client's is in `handshake`.

In order: :meth:`Reception.challenge`, :meth:`Reception.take` what answers it, :meth:`Reception.welcome`,
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
    """One listening process's half of one handshake."""

    def __init__(self, token: str, hello: Hello, listener: str) -> None:
        """``listener``: the id of the listener that was connected to."""
        self.seals: Seals | None = None
        """What makes and checks the tags of later frames, from the welcome on; None: frames are not sealed."""
        self.is_relayed = False
        """Whether each end sees a connection that nobody is in between of, and not the same one."""
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
        """Take the meta of the HELLO; raise AuthenticationError if it does not prove that its sender has the token."""
        given = decode(meta, Proof)
        if len(given.nonce) != NONCE_BYTES:
            raise AuthenticationError(f"the client's nonce has {len(given.nonce)} bytes, {NONCE_BYTES} were expected")
        said = (given.nonce, self._nonce, given.hello, given.view)
        check_proof(self._token, "client", given, *said)
        self._said, self._view = said, decode(given.view, ConnectionIdentity)

    def welcome(self, binding: bytes) -> bytes:
        """Return the meta of the WELCOME; ``binding`` is this end's. Also for a client that :meth:`identify` refuses:
        so it learns from one that it can believe why.
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
        """Return what the client says of itself.

        Raises VersionError if it is of another version, AddressError if it wants somebody else.
        """
        theirs = read_hello("client", self._said[2])
        reason = mistaken(theirs, self._view, self._hello, ConnectionIdentity(listener=self._listener))
        if reason:
            raise AddressError(f"{theirs.role} {theirs.rank} ({theirs.name}) is mistaken: {reason}")
        return theirs


def mistaken(
    asking: Hello, asking_view: ConnectionIdentity, answering: Hello, answering_view: ConnectionIdentity
) -> str:
    """Return why the client wants somebody else than this server; empty if it does not."""
    if asking_view.listener and asking_view.listener != answering_view.listener:
        return "another process listens there now: the one that did has ended"
    if asking.to and asking.to != answering.role:
        return f"a {answering.role} listens there, a {asking.to} was expected"
    if asking.cluster and answering.cluster and asking.cluster != answering.cluster:
        return f"the {answering.role} there belongs to another cluster"
    return ""

"""The server's half of the handshake, without I/O. The module `client_handshake` has the client's half."""

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


class ServerHandshake:
    """A server's half of one handshake.

    The caller calls :meth:`challenge`, :meth:`receive_hello`, :meth:`welcome` and :meth:`identify`, in this order.
    """

    def __init__(self, token: str, hello: Hello, listener: str) -> None:
        self.seals: Seals | None = None
        """Create and check the tags of later frames. None before the WELCOME, or if frames have no tags."""
        self.is_relayed = False
        """Whether there is a relay between the ends: both ends have a channel binding, but the bindings differ."""
        self._token = token
        self._hello = hello
        self._listener = listener
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript: tuple[bytes, ...] = ()
        self._identity = ConnectionIdentity()

    def challenge(self) -> bytes:
        return msgspec.msgpack.encode(Challenge(self._nonce))

    def receive_hello(self, meta: bytes | memoryview) -> None:
        """Check the client's HELLO. Raises AuthenticationError if the client's proof is wrong."""
        proof = decode(meta, Proof)
        if len(proof.nonce) != NONCE_BYTES:
            raise AuthenticationError(f"the client's nonce has {len(proof.nonce)} bytes, expected {NONCE_BYTES}")
        transcript = (proof.nonce, self._nonce, proof.hello, proof.view)
        check_proof(self._token, "client", proof, *transcript)
        self._transcript, self._identity = transcript, decode(proof.view, ConnectionIdentity)

    def welcome(self, binding: bytes) -> bytes:
        """Return the content of the WELCOME frame. ``binding`` is the channel binding of this end (see `sealing`).

        The caller must send the WELCOME even if :meth:`identify` then rejects the client. The WELCOME proves to the
        client that the reason comes from the server.
        """
        own_hello = encode_hello(self._hello)
        view = msgspec.msgpack.encode(ConnectionIdentity(binding=binding, listener=self._listener))
        transcript = (*self._transcript, own_hello, view)
        if not (binding and binding == self._identity.binding):
            nonces = self._transcript[0] + self._transcript[1]
            self.is_relayed = bool(binding and self._identity.binding)
            self.seals = derive_seals(self._token, nonces, join_fields(*transcript), connecting=False)
        return msgspec.msgpack.encode(Proof(own_hello, view, self._nonce, prove(self._token, "server", *transcript)))

    def identify(self) -> Hello:
        """Return the client's Hello (identity).

        Raises VersionError if the client has another version, and AddressError if the client expects another server.
        """
        client_hello = read_hello("client", self._transcript[2])
        reason = wrong_server_reason(
            client_hello, self._identity, self._hello, ConnectionIdentity(listener=self._listener)
        )
        if reason:
            raise AddressError(
                f"{client_hello.role} {client_hello.rank} ({client_hello.name}) reached the wrong server: {reason}"
            )
        return client_hello


def wrong_server_reason(
    client: Hello, client_identity: ConnectionIdentity, server: Hello, server_identity: ConnectionIdentity
) -> str:
    """Return the reason for which this server is not the server that the client expects.

    The reason is empty if the client expects this server.
    """
    if client_identity.listener and client_identity.listener != server_identity.listener:
        return "another process listens there now, because the previous one has ended"
    if client.to and client.to != server.role:
        return f"a {server.role} listens there, but a {client.to} was expected"
    if client.cluster and server.cluster and client.cluster != server.cluster:
        return f"the {server.role} there belongs to another cluster"
    return ""

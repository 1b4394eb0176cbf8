"""The client's half of the handshake. The module `server_handshake` has the server's half.

:class:`ClientHandshake` does the handshake without I/O. :func:`authenticate` runs it on a blocking channel, and the
module `opening` runs it in an event loop.
"""

from __future__ import annotations

import secrets

import msgspec

from paceline.errors import (
    AddressError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    ProtocolError,
    VersionError,
)
from paceline.transport.addresses import Address
from paceline.transport.channel import StreamChannel
from paceline.transport.decoding import unauthenticated_error
from paceline.transport.frames import FrameKind, Header, Limits, frame_bytes, frame_parts, pack_header
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
from paceline.transport.security.server_handshake import wrong_server_reason


class ClientHandshake:
    """A client's half of one handshake, without I/O.

    The caller passes the server's CHALLENGE to :meth:`answer`, and then the server's WELCOME to :meth:`finish`. If the
    connection fails, :meth:`explain` returns the error to raise.
    """

    def __init__(self, address: Address, token: str, hello: Hello, *, listener: str = "") -> None:
        """``listener`` is the id of the expected listener. If it is empty, any listener at the address is accepted."""
        self.address = address
        self.expected_kind = FrameKind.CHALLENGE
        """The kind of the frame that the server must send next."""
        self.seals: Seals | None = None
        """Create and check the tags of later frames. None before the WELCOME, or if frames have no tags."""
        self._token = token
        self._hello = hello
        self._server = hello.to or "server"
        self._identity = ConnectionIdentity(address=str(address), listener=listener)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript: tuple[bytes, ...] = ()

    def check(self, header: Header) -> None:
        expected = header.kind in (self.expected_kind, FrameKind.REFUSED, FrameKind.ERROR)
        if not expected or frame_bytes(header) > Limits().max_handshake_bytes:
            raise ProtocolError(
                f"the server at {self.address} sent a frame of kind {header.kind} and {frame_bytes(header)} "
                f"bytes during the handshake, but {self.expected_kind.name} was expected"
            )

    def refusal_error(self, meta: bytes | memoryview) -> PacelineError:
        """Return the error for a REFUSED frame from a server that has not proven that it has the token.

        The result is one of two kinds of error. An attacker could cause these errors even without a REFUSED frame: by a
        wrong proof, or by closing the connection.
        """
        error, message = unauthenticated_error(meta)
        if self.expected_kind is FrameKind.WELCOME and error == AuthenticationError.__name__:
            return AuthenticationError(
                f"the {self._server} at {self.address} refused the token: pass the cluster's token "
                "(--token-file or PACELINE_TOKEN), and check the address"
            )
        return ConnectionLostError(
            f"the {self._server} at {self.address} closed the connection during the handshake; an unauthenticated peer "
            f"reported {error}: '{message}'"
        )

    def answer(self, meta: bytes | memoryview, binding: bytes) -> bytes:
        """Return the content of the HELLO frame that answers a CHALLENGE with the content ``meta``.

        ``binding`` is the channel binding of this end (see `sealing`).
        """
        server_nonce = decode(meta, Challenge).nonce
        if len(server_nonce) != NONCE_BYTES:
            raise ProtocolError(
                f"the server at {self.address} sent a nonce of {len(server_nonce)} bytes, expected {NONCE_BYTES}. "
                "The connection is closed"
            )
        self.expected_kind = FrameKind.WELCOME
        self._identity = msgspec.structs.replace(self._identity, binding=binding)
        own_hello, view = encode_hello(self._hello), msgspec.msgpack.encode(self._identity)
        self._transcript = (self._nonce, server_nonce, own_hello, view)
        return msgspec.msgpack.encode(
            Proof(own_hello, view, self._nonce, prove(self._token, "client", *self._transcript))
        )

    def finish(self, meta: bytes | memoryview) -> Hello:
        """Check the WELCOME frame, and return the server's Hello (identity).

        Raises AuthenticationError if the server's proof is wrong, and AddressError if another server replied.
        """
        welcome = decode(meta, Proof)
        transcript = (*self._transcript, welcome.hello, welcome.view)
        try:
            check_proof(self._token, "server", welcome, *transcript)
        except AuthenticationError:
            raise AuthenticationError(
                f"the {self._server} at {self.address} could not prove that it has the token of this cluster. "
                "Check the address, and that both were started with the same token (PACELINE_TOKEN)"
            ) from None
        hello, view = read_hello("server", welcome.hello), decode(welcome.view, ConnectionIdentity)
        reason = wrong_server_reason(self._hello, self._identity, hello, view)
        if reason:
            raise AddressError(f"wrong server at {self.address}: {reason}")
        if not (view.binding and view.binding == self._identity.binding):
            nonces = self._transcript[0] + self._transcript[1]
            self.seals = derive_seals(self._token, nonces, join_fields(*transcript), connecting=True)
        return hello

    def explain(self, error: PacelineError) -> PacelineError:
        """Return the error to raise if the connection fails with ``error`` at the current step of the handshake."""
        if self.expected_kind is FrameKind.CHALLENGE and isinstance(error, (ConnectionLostError, DeadlineError)):
            return type(error)(
                f"{error} before its first frame. Check whether the server uses TLS but this process does not"
            )
        return error


def authenticate(
    channel: StreamChannel,
    token: str,
    hello: Hello,
    timeout_s: float,
    *,
    listener: str = "",
    always_sealed: bool = False,
) -> None:
    """Do the client's half of the handshake on a channel. If it fails, close the channel and raise an error."""
    handshake = ClientHandshake(channel.address, token, hello, listener=listener)
    try:
        challenge = _receive(channel, handshake, timeout_s)
        binding = b"" if always_sealed else channel.binding()
        channel.send(*frame_parts(FrameKind.HELLO, meta=handshake.answer(challenge, binding)))
        channel.peer = handshake.finish(_receive(channel, handshake, timeout_s))
        if handshake.seals is not None:
            channel.seal(handshake.seals)
    except BaseException:
        channel.close()
        raise


def _receive(channel: StreamChannel, handshake: ClientHandshake, timeout_s: float) -> bytes:
    try:
        header = channel.next_header(timeout_s)
    except VersionError:
        if handshake.expected_kind is FrameKind.CHALLENGE:
            # The header contains this client's protocol version, so the server can report the difference too.
            channel.send(pack_header(FrameKind.HELLO))
        raise
    except PacelineError as error:
        raise handshake.explain(error) from None
    handshake.check(header)
    meta = channel.receive_meta()
    if header.kind != handshake.expected_kind:
        raise handshake.refusal_error(meta)
    return meta

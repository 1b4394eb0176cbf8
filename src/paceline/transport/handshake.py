"""The client's half of the handshake; the server's is in `accepting`.

:class:`Greeting` has the rules. :func:`greet` follows them on a blocking channel, `opening` in an event loop.
"""

from __future__ import annotations

import secrets

import msgspec

from paceline.errors import (
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    ProtocolError,
    VersionError,
)
from paceline.transport.addresses import Address
from paceline.transport.authentication import (
    NONCE_BYTES,
    Challenge,
    Hello,
    Proof,
    decode,
    encode_hello,
    prove,
    verify,
)
from paceline.transport.channel import StreamChannel
from paceline.transport.frames import Header, Kind, Limits, frame_bytes


class Greeting:
    """One connecting process's half of one handshake, without what carries its frames.

    In order: :meth:`answer` to the CHALLENGE, :meth:`finish` with the WELCOME. What fails in between becomes the
    error to raise by :meth:`explain`.
    """

    def __init__(self, address: Address, token: str, hello: Hello) -> None:
        self.address = address
        self.awaited = Kind.CHALLENGE
        """The kind of frame that is to come."""
        self._token = token
        self._mine = encode_hello(hello)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._server_nonce = b""

    def check(self, header: Header) -> None:
        """Raise ProtocolError if this frame is not the one that is to come."""
        if header.kind != self.awaited or frame_bytes(header) > Limits().max_handshake_bytes:
            raise ProtocolError(
                f"the server at {self.address} sent a frame of kind {header.kind} and {frame_bytes(header)} "
                f"bytes in the handshake, {self.awaited.name} was expected"
            )

    def answer(self, meta: bytes | memoryview) -> bytes:
        """Return the meta of the HELLO that answers a CHALLENGE."""
        self._server_nonce = decode(meta, Challenge).nonce
        self.awaited = Kind.WELCOME
        proof = prove(self._token, "client", self._nonce, self._server_nonce, self._mine)
        return msgspec.msgpack.encode(Proof(self._mine, self._nonce, proof))

    def finish(self, meta: bytes | memoryview) -> Hello:
        """Return what the server says of itself in its WELCOME; raise AuthenticationError if it cannot prove it."""
        welcome = decode(meta, Proof)
        try:
            return verify(self._token, "server", self._nonce, self._server_nonce, welcome)
        except AuthenticationError:
            raise AuthenticationError(
                f"the server at {self.address} could not prove that it holds the token of this cluster; "
                "check the address, and that both were started with the same token (PACELINE_TOKEN)"
            ) from None

    def explain(self, error: PacelineError) -> PacelineError:
        """Return what an error that came instead of the awaited frame means at this point."""
        if self.awaited is Kind.CHALLENGE and isinstance(error, (ConnectionLostError, DeadlineError)):
            return type(error)(f"{error} before it said a word: does it use TLS, and this process not?")
        if self.awaited is Kind.WELCOME and isinstance(error, AuthenticationError):
            return AuthenticationError(
                f"the server at {self.address} refused the token; start this process with the token that the "
                "cluster was started with (PACELINE_TOKEN)"
            )
        return error


def greet(channel: StreamChannel, token: str, hello: Hello, timeout_s: float) -> None:
    """Do the client's half of the handshake, or close the channel and raise."""
    greeting = Greeting(channel.address, token, hello)
    try:
        challenge = _receive(channel, greeting, timeout_s)
        channel.send_frame(Kind.HELLO, meta=greeting.answer(challenge))
        channel.peer = greeting.finish(_receive(channel, greeting, timeout_s))
    except BaseException:
        channel.close()
        raise


def _receive(channel: StreamChannel, greeting: Greeting, timeout_s: float) -> bytes:
    try:
        header = channel.receive_header(timeout_s)
        greeting.check(header)
        return channel.receive_meta()
    except VersionError:
        if greeting.awaited is Kind.CHALLENGE:
            channel.send_frame(Kind.HELLO)  # its header tells the server which version we speak, so both can say so
        raise
    except PacelineError as error:
        raise greeting.explain(error) from None

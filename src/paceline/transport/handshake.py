"""Client's half of the handshake; `reception` has the server's.

:class:`Greeting` has the rules. :func:`greet` applies them to a blocking channel, `opening` in an event loop.
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
from paceline.transport.failures import unproved
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
from paceline.transport.security.reception import mistaken
from paceline.transport.security.sealing import Seals, derive_seals


class Greeting:
    """A client's half of one handshake, without I/O.

    In order: :meth:`answer` the CHALLENGE, :meth:`finish` with the WELCOME. :meth:`explain` turns failures in between
    into the error to raise.
    """

    def __init__(self, address: Address, token: str, hello: Hello, *, listener: str = "") -> None:
        """``listener``: the id of the expected listener; empty accepts any listener at the address."""
        self.address = address
        self.awaited = FrameKind.CHALLENGE
        """The kind of the next expected frame."""
        self.seals: Seals | None = None
        """Seals of later frames, available after the WELCOME; None if frames are not sealed."""
        self._token = token
        self._hello = hello
        self._who = hello.to or "server"
        self._view = ConnectionIdentity(address=str(address), listener=listener)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._said: tuple[bytes, ...] = ()

    def check(self, header: Header) -> None:
        """Raise ProtocolError if this frame is neither the expected one nor a refusal."""
        expected = header.kind in (self.awaited, FrameKind.REFUSED, FrameKind.ERROR)
        if not expected or frame_bytes(header) > Limits().max_handshake_bytes:
            raise ProtocolError(
                f"the server at {self.address} sent a frame of kind {header.kind} and {frame_bytes(header)} "
                f"bytes in the handshake, {self.awaited.name} was expected"
            )

    def refused(self, meta: bytes | memoryview) -> PacelineError:
        """Return the error for a refusal by a peer that has not authenticated yet.

        Such a peer can cause only two errors, and could cause both silently: by failing to prove that it holds the
        token, or by closing the connection.
        """
        error, words = unproved(meta)
        if self.awaited is FrameKind.WELCOME and error == AuthenticationError.__name__:
            return AuthenticationError(
                f"the {self._who} at {self.address} refused the token; start this process with the token of the "
                "cluster (PACELINE_TOKEN). The peer has not authenticated itself: check the address too"
            )
        return ConnectionLostError(
            f"the {self._who} at {self.address} closed the connection in the handshake; an unauthenticated peer "
            f"reported {error}: '{words}'"
        )

    def answer(self, meta: bytes | memoryview, binding: bytes) -> bytes:
        """Return the meta of the HELLO that answers a CHALLENGE; ``binding`` is this end's."""
        theirs = decode(meta, Challenge).nonce
        if len(theirs) != NONCE_BYTES:
            raise ProtocolError(
                f"the server at {self.address} sent a nonce of {len(theirs)} bytes, {NONCE_BYTES} were expected; "
                "the connection is closed"
            )
        self.awaited = FrameKind.WELCOME
        self._view = msgspec.structs.replace(self._view, binding=binding)
        mine, view = encode_hello(self._hello), msgspec.msgpack.encode(self._view)
        self._said = (self._nonce, theirs, mine, view)
        return msgspec.msgpack.encode(Proof(mine, view, self._nonce, prove(self._token, "client", *self._said)))

    def finish(self, meta: bytes | memoryview) -> Hello:
        """Return the server's Hello from its WELCOME.

        Raises AuthenticationError if its proof is wrong, AddressError if it is not the expected server.
        """
        welcome = decode(meta, Proof)
        said = (*self._said, welcome.hello, welcome.view)
        try:
            check_proof(self._token, "server", welcome, *said)
        except AuthenticationError:
            raise AuthenticationError(
                f"the {self._who} at {self.address} could not prove that it holds the token of this cluster; "
                "check the address, and that both were started with the same token (PACELINE_TOKEN)"
            ) from None
        hello, view = read_hello("server", welcome.hello), decode(welcome.view, ConnectionIdentity)
        reason = mistaken(self._hello, self._view, hello, view)
        if reason:
            raise AddressError(f"wrong server at {self.address}: {reason}")
        if not (view.binding and view.binding == self._view.binding):
            nonces = self._said[0] + self._said[1]
            self.seals = derive_seals(self._token, nonces, join_fields(*said), connecting=True)
        return hello

    def explain(self, error: PacelineError) -> PacelineError:
        """Return the error for an end or a timeout of the connection at this point."""
        if self.awaited is FrameKind.CHALLENGE and isinstance(error, (ConnectionLostError, DeadlineError)):
            return type(error)(f"{error} before its first frame: does it use TLS, but this process not?")
        return error


def greet(
    channel: StreamChannel,
    token: str,
    hello: Hello,
    timeout_s: float,
    *,
    listener: str = "",
    always_sealed: bool = False,
) -> None:
    """Do the client's half of the handshake, or close the channel and raise. Arguments as :class:`Greeting`."""
    greeting = Greeting(channel.address, token, hello, listener=listener)
    try:
        challenge = _receive(channel, greeting, timeout_s)
        binding = b"" if always_sealed else channel.binding()
        channel.send(*frame_parts(FrameKind.HELLO, meta=greeting.answer(challenge, binding)))
        channel.peer = greeting.finish(_receive(channel, greeting, timeout_s))
        if greeting.seals is not None:
            channel.seal(greeting.seals)
    except BaseException:
        channel.close()
        raise


def _receive(channel: StreamChannel, greeting: Greeting, timeout_s: float) -> bytes:
    try:
        header = channel.next_header(timeout_s)
    except VersionError:
        if greeting.awaited is FrameKind.CHALLENGE:
            channel.send(pack_header(FrameKind.HELLO))  # sends our version, so that both ends can report it
        raise
    except PacelineError as error:
        raise greeting.explain(error) from None
    greeting.check(header)
    meta = channel.receive_meta()
    if header.kind != greeting.awaited:
        raise greeting.refused(meta)
    return meta

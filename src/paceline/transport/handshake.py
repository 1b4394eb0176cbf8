"""The client's half of the handshake; the server's is in `connection`."""

from __future__ import annotations

import secrets

import msgspec

from paceline.errors import AuthenticationError, ConnectionLostError, DeadlineError, ProtocolError, VersionError
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
from paceline.transport.frames import Kind, Limits, frame_bytes


def greet(channel: StreamChannel, token: str, hello: Hello, timeout_s: float) -> None:
    """Do the client's half of the handshake, or close the channel and raise."""
    try:
        _greet(channel, token, hello, timeout_s)
    except BaseException:
        channel.close()
        raise


def _greet(channel: StreamChannel, token: str, hello: Hello, timeout_s: float) -> None:
    try:
        challenge = decode(_receive_handshake(channel, Kind.CHALLENGE, timeout_s), Challenge)
    except VersionError:
        channel.send_frame(Kind.HELLO)  # its header tells the server which version we speak, so both can say so
        raise
    except (ConnectionLostError, DeadlineError) as error:
        raise type(error)(f"{error} before it said a word: does it use TLS, and this process not?") from None
    nonce = secrets.token_bytes(NONCE_BYTES)
    mine = encode_hello(hello)
    proof = Proof(mine, nonce, prove(token, "client", nonce, challenge.nonce, mine))
    channel.send_frame(Kind.HELLO, meta=msgspec.msgpack.encode(proof))
    try:
        answer = decode(_receive_handshake(channel, Kind.WELCOME, timeout_s), Proof)
    except AuthenticationError:
        raise AuthenticationError(
            f"the server at {channel.address} refused the token; start this process with the token that the "
            "cluster was started with (PACELINE_TOKEN)"
        ) from None
    try:
        channel.peer = verify(token, "server", nonce, challenge.nonce, answer)
    except AuthenticationError:
        raise AuthenticationError(
            f"the server at {channel.address} could not prove that it holds the token of this cluster; "
            "check the address, and that both were started with the same token (PACELINE_TOKEN)"
        ) from None


def _receive_handshake(channel: StreamChannel, kind: Kind, timeout_s: float) -> bytes:
    header = channel.receive_header(timeout_s)
    if header.kind != kind or frame_bytes(header) > Limits().max_handshake_bytes:
        raise ProtocolError(
            f"the server at {channel.address} sent a frame of kind {header.kind} and {frame_bytes(header)} "
            f"bytes in the handshake, {kind.name} was expected"
        )
    return channel.receive_meta()

"""An attacker between two ends that share a token can cut their connection, but nothing more."""

from __future__ import annotations

import socket

import msgspec
import numpy as np
import pytest
from tests.waiting import in_thread

from paceline.errors import AddressError, AuthenticationError, ConnectionLostError, PeerError
from paceline.testing import EchoHandler, serve_in_thread
from paceline.testing.transports import ECHO
from paceline.transport import TLS, Address, Channel, Endpoint, FrameKind, Hello, SocketTransport, frame_parts
from paceline.transport.frames import HEADER_BYTES, join, unpack_header
from paceline.transport.security.authentication import Challenge, Proof
from paceline.transport.streams import connect_stream, welcome_stream
from paceline.version import __version__

from .relay import Meddle, relay

WORKER = Hello(role="worker", rank=3)
TOKEN = "the-token-of-a-cluster"
SIZES = (0, 100, 5_000, 1_000_000)


def echo(transport: SocketTransport, target: Endpoint | Address, *sizes: int) -> None:
    channel = transport.connect(target, WORKER)
    try:
        for size in sizes:
            body = np.random.default_rng(size).bytes(size)
            channel.send(*frame_parts(ECHO, meta=b"meta", body=body))
            assert bytes(channel.receive_frame(10).body) == body
    finally:
        channel.close()


def test_an_unchanged_relay_has_no_effect(transport: SocketTransport) -> None:
    with serve_in_thread(EchoHandler(), transport, unix=False) as served, relay(served.endpoint.tcp) as between:
        echo(transport, between.address, *SIZES)
        endpoint = msgspec.structs.replace(served.endpoint, tcp=between.address)
        echo(transport, endpoint, *SIZES)


FAULTS: dict[str, Meddle] = {
    "a flipped bit": lambda number, frame: [frame[:60] + bytes([frame[60] ^ 1]) + frame[61:] if number == 2 else frame],
    "another kind": lambda number, frame: [frame[:3] + b"\x12" + frame[4:] if number == 2 else frame],
    "a replay": lambda number, frame: [frame, frame] if number == 2 else [frame],
    "a hole": lambda number, frame: [] if number == 2 else [frame],
    "a frame of its own": lambda number, frame: (
        [frame, join(frame_parts(ECHO, body=b"evil")) + bytes(16)] if number == 1 else [frame]
    ),
}


def talk(channel: Channel, size: int) -> None:
    for number in range(4):
        channel.send(*frame_parts(ECHO, request=number, body=bytes(size)))
    for number in range(5):
        frame = channel.receive_frame(10)
        assert frame.header.request == number
        assert bytes(frame.body) == bytes(size)


@pytest.mark.parametrize("size", [100, 1_000_000])
@pytest.mark.parametrize("fault", FAULTS)
def test_frames_changed_by_a_relay_end_the_connection(transport: SocketTransport, fault: str, size: int) -> None:
    handler = EchoHandler()
    with serve_in_thread(handler, transport) as served, relay(served.endpoint.tcp, FAULTS[fault]) as between:
        channel = transport.connect(between.address, WORKER)
        try:
            with pytest.raises(ConnectionLostError):
                talk(channel, size)
        finally:
            channel.close()
        handler.wait_until(lambda: len(handler.reasons) == 1)
        assert isinstance(handler.reasons[0], ConnectionLostError)
        assert "altered, repeated or dropped" in str(handler.reasons[0])
        assert handler.num_frames == {"a replay": 2, "a frame of its own": 1}.get(fault, 1)


def test_frames_of_the_server_are_sealed(transport: SocketTransport) -> None:
    for size in (100, 1_000_000):
        with serve_in_thread(EchoHandler(), transport) as served, socket.create_server(("127.0.0.1", 0)) as trap:

            def between(size: int = size) -> None:
                client, _ = trap.accept()
                place = (served.endpoint.tcp.host, served.endpoint.tcp.port)
                with client, socket.create_connection(place) as server:
                    client.sendall(read(server, 0))
                    server.sendall(read(client, 0))
                    client.sendall(read(server, 0))
                    server.sendall(read(client, 16))
                    answer = bytearray(read(server, 16))
                    answer[-100] ^= 1
                    client.sendall(answer)

            with in_thread(between):
                channel = transport.connect(Address("tcp", *trap.getsockname()), WORKER)
                channel.send(*frame_parts(ECHO, body=bytes(size)))
                with pytest.raises(ConnectionLostError, match="altered"):
                    channel.receive_frame(10)


def read(source: socket.socket, tag_bytes: int) -> bytes:
    """Return the next frame."""
    data = source.recv(HEADER_BYTES, socket.MSG_WAITALL)
    header = unpack_header(data)
    remaining = (header.meta_bytes + 7 & -8) + (header.body_bytes + 7 & -8) + tag_bytes
    while remaining:
        part = source.recv(remaining)
        data, remaining = data + part, remaining - len(part)
    return data


def meta_of(frame: bytes) -> bytes:
    return frame[HEADER_BYTES : HEADER_BYTES + unpack_header(frame).meta_bytes]


def test_a_hello_cannot_be_forged(transport: SocketTransport) -> None:
    """The attacker builds a nonce from the real server's nonce and the head of another Hello."""
    handler = EchoHandler()
    with serve_in_thread(handler, transport) as served, socket.create_server(("127.0.0.1", 0)) as trap:
        encode = msgspec.msgpack.encode
        pairs = {"role": "scheduler", "rank": 77, "protocol": 2, "paceline": __version__, "extra": {}}
        head = bytes([0x80 | 6]) + b"".join(encode(key) + encode(value) for key, value in pairs.items()) + encode("z")
        answers: list[int] = []

        def attack() -> None:
            victim, _ = trap.accept()
            with victim, socket.create_connection((served.endpoint.tcp.host, served.endpoint.tcp.port)) as real:
                nonce = msgspec.msgpack.decode(meta_of(read(real, 0)), type=Challenge).nonce
                victim.sendall(join(frame_parts(FrameKind.CHALLENGE, meta=encode(Challenge(nonce + head)))))
                reply = victim.recv(1 << 16)
                if not reply:
                    return
                peer_proof = msgspec.msgpack.decode(meta_of(reply), type=Proof)
                forged = msgspec.structs.replace(peer_proof, hello=head + peer_proof.hello)
                real.sendall(join(frame_parts(FrameKind.HELLO, meta=encode(forged))))
                answers.append(unpack_header(read(real, 0)).kind)

        with in_thread(attack), pytest.raises(PeerError):
            transport.connect(Address("tcp", *trap.getsockname()), WORKER, timeout_s=5)
        assert answers in ([], [int(FrameKind.REFUSED)])
        assert not handler.peers


def test_a_proof_is_valid_for_only_one_listener(transport: SocketTransport) -> None:
    """Both ends detect a relay that connects a member to another node of its cluster."""
    handler = EchoHandler()
    with (
        serve_in_thread(EchoHandler(), transport) as wanted,
        serve_in_thread(handler, transport) as other,
        relay(other.endpoint.tcp) as between,
    ):
        led_astray = msgspec.structs.replace(wanted.endpoint, tcp=between.address, unix=None)
        with pytest.raises(AddressError, match="another process listens there now"):
            transport.connect(led_astray, WORKER)
        with pytest.raises(AddressError, match="a server listens there, but a scheduler was expected"):
            transport.connect(between.address, Hello(role="worker", to="scheduler"))
        assert not handler.peers


def test_a_replayed_proof_is_rejected(transport: SocketTransport) -> None:
    recorded: list[bytes] = []

    def record(number: int, frame: bytes) -> list[bytes]:
        recorded.append(frame)
        return [frame]

    handler = EchoHandler()
    with serve_in_thread(handler, transport) as served, relay(served.endpoint.tcp, record) as between:
        echo(transport, between.address, 10)
        handler.wait_until(lambda: len(handler.reasons) == 1)
        with socket.create_connection((served.endpoint.tcp.host, served.endpoint.tcp.port)) as again:
            read(again, 0)
            again.sendall(recorded[0])
            assert unpack_header(read(again, 0)).kind == FrameKind.REFUSED
        assert not handler.peers
        assert handler.num_frames == 1


def test_local_frames_have_no_tags(certificates: dict[str, TLS]) -> None:
    plain, secured = SocketTransport(TOKEN), SocketTransport(TOKEN, tls=certificates["ours"])
    for transport in (plain, secured):
        with serve_in_thread(EchoHandler(), transport) as served, relay(served.endpoint.tcp) as between:
            assert bytes_of_a_frame(transport, served.endpoint) == HEADER_BYTES
            assert bytes_of_a_frame(transport, served.endpoint.tcp) == HEADER_BYTES
            if transport is plain:
                assert bytes_of_a_frame(transport, between.address) == HEADER_BYTES + 16


def bytes_of_a_frame(transport: SocketTransport, target: Endpoint | Address) -> int:
    channel = transport.connect(target, WORKER)
    try:
        before = channel.statistics()
        channel.send(*frame_parts(ECHO))
        channel.receive_header(10)
        after = channel.statistics()
        assert after.bytes_sent - before.bytes_sent == after.bytes_received - before.bytes_received
        return after.bytes_sent - before.bytes_sent
    finally:
        channel.close()


def test_streams_without_frames_are_not_relayed_on_one_host() -> None:
    failures: list[Exception] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            for _ in range(2):
                connected, _ = listening.accept()
                with connected:
                    try:
                        welcome_stream(connected, TOKEN, Hello(role="node"), 5)
                    except PeerError as error:
                        failures.append(error)

        with in_thread(accept):
            address = Address("tcp", *listening.getsockname())
            connect_stream(address, TOKEN, WORKER, 5)[0].close()
            with relay(address) as between, pytest.raises(PeerError):
                connect_stream(between.address, TOKEN, WORKER, 5)
    assert [type(error) for error in failures] == [AuthenticationError]

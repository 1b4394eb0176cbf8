"""Misbehaving peers do not affect other clients of the server, and no resource leaks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from paceline.errors import (
    AddressError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PeerError,
    ProtocolError,
    VersionError,
)
from paceline.testing import EchoHandler, Served, serve_in_thread
from paceline.testing.transports import ECHO, SILENT
from paceline.transport import (
    HEADER,
    MAGIC,
    TLS,
    Address,
    Channel,
    FrameKind,
    Hello,
    Limits,
    SocketTransport,
    frame_parts,
    pack_header,
    unpack_header,
)
from paceline.transport.client import open_socket
from paceline.transport.decoding import error_of

TOKEN = "the-token-of-tests"
WORKER = Hello(role="worker")
_TCP_REPAIR = 19  # in this mode, Linux closes a socket without a packet


class Bystander:
    """A server with a well-behaved client."""

    def __init__(self, transport: SocketTransport, handler: EchoHandler, served: Served) -> None:
        self.handler = handler
        self.served = served
        self.endpoint = served.endpoint
        self.channel = transport.connect(served.endpoint, WORKER)

    def assert_unaffected(self) -> None:
        self.channel.send(*frame_parts(ECHO, body=b"still here"))
        assert bytes(self.channel.receive_frame(10).body) == b"still here"

    def raw(self) -> socket.socket:
        return socket.create_connection((self.endpoint.tcp.host, self.endpoint.tcp.port), timeout=10)


@contextmanager
def bystander(transport: SocketTransport) -> Iterator[Bystander]:
    handler = EchoHandler()
    with serve_in_thread(handler, transport) as served:
        witness = Bystander(transport, handler, served)
        try:
            witness.assert_unaffected()
            yield witness
            witness.assert_unaffected()
        finally:
            witness.channel.close()


def read_to_end(connected: socket.socket) -> bytes:
    parts = []
    try:
        while part := connected.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def refusal(answer: bytes) -> PeerError:
    """Return the error in a server's reply, which has a challenge and then REFUSED."""
    challenge = unpack_header(answer)
    assert challenge.kind == FrameKind.CHALLENGE
    at = 40 + (challenge.meta_bytes + 7 & -8)
    header = unpack_header(answer, at)
    assert header.kind == FrameKind.REFUSED
    with pytest.raises(PeerError) as caught:
        raise error_of(answer[at + 40 : at + 40 + header.meta_bytes])
    return caught.value


def test_a_wrong_token_is_rejected_with_one_sentence(transport: SocketTransport) -> None:
    with bystander(transport) as witness:
        for address in (witness.endpoint.tcp, witness.endpoint.unix):
            assert address is not None
            with pytest.raises(AuthenticationError, match=f"server at {address} refused the token"):
                SocketTransport("the-token-of-others").connect(address, WORKER)
        assert len(witness.handler.peers) == 1


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8\r\n\r\n", ProtocolError),
        (np.random.default_rng(3).bytes(100_000), ProtocolError),
        (pack_header(ECHO), ProtocolError),
        (pack_header(FrameKind.HELLO), ProtocolError),
        (pack_header(FrameKind.HELLO, meta_bytes=8) + b"\xc1" * 8, ProtocolError),
        (pack_header(FrameKind.HELLO, meta_bytes=4096), ProtocolError),
        (pack_header(FrameKind.HELLO, body_bytes=1 << 60), ProtocolError),
        (HEADER.pack(MAGIC, 3, FrameKind.HELLO, 0, 0, 0, 0, 0, 0, 0, 0), VersionError),
    ],
    ids=["http", "random", "no-hello", "empty", "garbled", "long", "endless", "version"],
)
def test_invalid_handshakes_are_rejected(transport: SocketTransport, sent: bytes, kind: type) -> None:
    with bystander(transport) as witness, witness.raw() as intruder:
        intruder.sendall(sent)
        answer = read_to_end(intruder)
        if len(sent) < 1000:  # otherwise the reset may arrive before the reason
            assert type(refusal(answer)) is kind
        assert witness.served.listener.num_connections == 1


def test_both_ends_name_both_versions(transport: SocketTransport, caplog: pytest.LogCaptureFixture) -> None:
    challenge = HEADER.pack(MAGIC, 9, FrameKind.CHALLENGE, 0, 0, 0, 0, 0, 0, 0, 0)
    with socket.create_server(("127.0.0.1", 0)) as future:
        port = future.getsockname()[1]
        client = subprocess.Popen([sys.executable, "-c", _CONNECT, f"127.0.0.1:{port}"], stdout=subprocess.PIPE)
        accepted, _ = future.accept()
        with accepted, client:
            accepted.sendall(challenge)
            assert unpack_header(accepted.recv(40)).kind == FrameKind.HELLO  # so that this end can report it
            out, _ = client.communicate(timeout=60)
    assert b"VersionError" in out
    assert b"version 9" in out
    assert b"version 2" in out
    with bystander(transport) as witness, witness.raw() as old:
        old.sendall(HEADER.pack(MAGIC, 9, FrameKind.HELLO, 0, 0, 0, 0, 0, 0, 0, 0))
        message = str(refusal(read_to_end(old)))
    assert "version 9" in message
    assert "version 2" in message
    assert message in caplog.text


_CONNECT = f"""
import sys
from paceline.transport import Hello, SocketTransport
try:
    SocketTransport({TOKEN!r}).connect(sys.argv[1], Hello(role="worker"))
except Exception as error:
    print(type(error).__name__, error)
"""

_DIE_IN_A_FRAME = f"""
import sys, time
from paceline.transport import Hello, SocketTransport, pack_header
channel = SocketTransport({TOKEN!r}).connect(sys.argv[1], Hello(role="worker", rank=5))
channel.send(pack_header({ECHO}, body_bytes=10_000_000), bytes(4_000_000))
print("sent", flush=True)
time.sleep(60)
"""


def test_a_peer_killed_in_mid_frame(transport: SocketTransport) -> None:
    with bystander(transport) as witness:
        command = [sys.executable, "-c", _DIE_IN_A_FRAME, str(witness.endpoint.tcp)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"sent\n"
            os.kill(victim.pid, signal.SIGKILL)
            witness.handler.wait_until(lambda: len(witness.handler.reasons) == 1)
        reason = witness.handler.reasons[0]
        assert isinstance(reason, ConnectionLostError)
        assert "worker 5" in str(reason)
        assert "in the middle of a frame" in str(reason)


def test_claimed_lengths_allocate_no_memory(transport: SocketTransport) -> None:
    with bystander(transport) as witness:
        before = psutil.Process().memory_info()
        for size in (1 << 60, (1 << 64) - 1, (1 << 30) + 1):
            channel = transport.connect(witness.endpoint, WORKER)
            channel.send(pack_header(ECHO, body_bytes=size))
            with pytest.raises(ProtocolError, match="most 1073741824"):
                channel.receive_header(10)
        after = psutil.Process().memory_info()
        assert after.vms - before.vms < 1 << 30
        assert after.rss - before.rss < 1 << 26


def test_the_callers_limits_are_used() -> None:
    transport = SocketTransport(TOKEN, limits=Limits(max_frame_bytes=4096))
    with bystander(transport) as witness:
        with pytest.raises(ValueError, match="at most 4096"):
            witness.channel.send(*frame_parts(ECHO, body=bytes(5000)))
        other = SocketTransport(TOKEN).connect(witness.endpoint, WORKER)
        other.send(*frame_parts(ECHO, body=bytes(5000)))
        with pytest.raises((ProtocolError, ConnectionLostError)):
            other.receive_header(10)


def test_an_incomplete_frame_delays_no_other_peer(transport: SocketTransport) -> None:
    with bystander(transport) as witness:
        silent = transport.connect(witness.endpoint, Hello(role="worker", rank=1))
        silent.send(pack_header(ECHO, body_bytes=1000), bytes(500))
        for _ in range(10):
            witness.assert_unaffected()
        silent.send(bytes(500))
        assert silent.receive_header(10).body_bytes == 1000
        silent.close()


def test_an_unfinished_handshake_times_out() -> None:
    transport = SocketTransport(TOKEN, handshake_timeout_s=0.2)
    with bystander(transport) as witness, witness.raw() as mute, witness.raw() as slow:
        slow.sendall(pack_header(FrameKind.HELLO, meta_bytes=100)[:20])
        for intruder in (mute, slow):
            error = refusal(read_to_end(intruder))
            assert isinstance(error, DeadlineError)
            assert "within 0.2 s" in str(error)


def test_a_server_of_another_protocol(transport: SocketTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(DeadlineError) as caught:
            transport.connect(where, WORKER, timeout_s=0.1)
        assert f"{where} within 0.1 s" in str(caught.value)
    with pytest.raises(AddressError, match="no process listens"):
        transport.connect(where, WORKER)
    with pytest.raises(AddressError, match="not known"):
        transport.connect("no-such-host.invalid:1", WORKER)


def test_a_peer_without_reads_delays_no_other_peer() -> None:
    transport = SocketTransport(TOKEN, limits=Limits(max_backlog_bytes=1 << 22), send_timeout_s=0.3)
    with bystander(transport) as witness:
        deaf = transport.connect(witness.endpoint, WORKER)

        def send_on_and_on() -> None:
            for _ in range(1000):  # finally the server stops reading
                deaf.send(*frame_parts(ECHO, body=bytes(1 << 20)))

        with pytest.raises(DeadlineError, match="read no messages"):
            send_on_and_on()
        witness.assert_unaffected()


def test_a_slow_reader_receives_all_frames() -> None:
    transport = SocketTransport(TOKEN, limits=Limits(max_backlog_bytes=1 << 20))
    with bystander(transport) as witness:
        channel = transport.connect(witness.endpoint, WORKER)
        body = np.arange(1 << 19)  # 4 MiB
        for number in range(3):
            channel.send(*frame_parts(ECHO, request=number, body=body[number:]))
        witness.assert_unaffected()
        for number in range(3):
            into = np.empty(len(body) - number, np.int64)
            assert channel.receive(into, 10).request == number
            assert np.array_equal(into, body[number:])
        channel.close()


def test_deadline_within_a_frame_closes_the_channel(transport: SocketTransport) -> None:
    hello = pack_header(ECHO, body_bytes=100) + bytes(10)

    class Stingy(EchoHandler):
        def frame_received(self, peer, header, meta, body) -> None:  # type: ignore[no-untyped-def]
            peer.send(hello)

    with serve_in_thread(Stingy(), transport) as served:
        for size in (100, 100_000):
            channel: Channel = transport.connect(served.endpoint, WORKER)
            channel.send(*frame_parts(SILENT))
            with pytest.raises(DeadlineError):
                channel.receive(np.empty(size, np.uint8), 0.1)
            with pytest.raises(ConnectionLostError):
                channel.receive(np.empty(size, np.uint8), 0.1)


def test_port_in_use(transport: SocketTransport) -> None:
    with bystander(transport) as witness:
        where = witness.endpoint.tcp.netloc
        message = f"cannot listen on {where}: the port is in use by another program"
        with (
            pytest.raises(AddressError, match=message),
            serve_in_thread(EchoHandler(), transport, address=where),
        ):
            pass
    with (
        pytest.raises(AddressError, match="no such address"),
        serve_in_thread(EchoHandler(), transport, address="192.0.2.1:0"),
    ):
        pass


@pytest.mark.parametrize("server", ["misnamed", "foreign", "foreign_but_trusting"])
def test_a_servers_wrong_certificate(certificates: dict[str, TLS], server: str) -> None:
    serving = SocketTransport(TOKEN, tls=certificates[server])
    client = SocketTransport(TOKEN, tls=certificates["ours"])
    with (
        serve_in_thread(EchoHandler(), serving) as served,
        pytest.raises(AuthenticationError, match=r"no TLS connection to the server at tcp://127.*Check"),
    ):
        client.connect(served.endpoint, WORKER)


@pytest.mark.parametrize("client", ["bare", "foreign_but_trusting"])
def test_a_clients_wrong_certificate(certificates: dict[str, TLS], client: str) -> None:
    transport = SocketTransport(TOKEN, tls=certificates["ours"])
    with bystander(transport) as witness:
        assert witness.endpoint.unix is None
        with pytest.raises(AuthenticationError, match="not trust this process's certificate"):
            SocketTransport(TOKEN, tls=certificates[client]).connect(witness.endpoint, WORKER)


def test_plain_text_to_a_tls_server(certificates: dict[str, TLS]) -> None:
    transport = SocketTransport(TOKEN, tls=certificates["ours"])
    with bystander(transport) as witness:
        with witness.raw() as http:
            http.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_to_end(http)
        with pytest.raises(PeerError):
            SocketTransport(TOKEN).connect(witness.endpoint.tcp, WORKER, timeout_s=0.3)


def test_a_lost_connection_is_reported_by_a_restarted_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        waiting = open_socket(Address("tcp", *listening.getsockname()), 5.0)
        with waiting, listening.accept()[0] as forgotten:
            try:
                forgotten.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            except OSError as error:
                pytest.skip(f"a connection cannot be closed without a word here: {error}")
            forgotten.close()
            waiting.settimeout(20.0)
            with pytest.raises(ConnectionResetError):
                waiting.recv(1)

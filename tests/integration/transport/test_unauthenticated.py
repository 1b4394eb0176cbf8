"""Limits for unauthenticated connections: their number, and the users that may connect."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest
from tests.waiting import wait_until

from paceline.errors import AddressError
from paceline.meeting.node import Node
from paceline.testing import EchoHandler, serve_in_thread
from paceline.testing.opened_checks import Inbox
from paceline.testing.transports import ECHO
from paceline.transport import TLS, Endpoint, Hello, SocketTransport, frame_parts
from paceline.transport.client import open_socket
from paceline.transport.security.unauthenticated import max_unauthenticated

from .conftest import TOKEN

WORKER = Hello(role="worker")
LIMIT = 16


def echo(transport: SocketTransport, endpoint: Endpoint) -> None:
    channel = transport.connect(endpoint, WORKER, timeout_s=10)
    try:
        channel.send(*frame_parts(ECHO, body=b"word"))
        assert bytes(channel.receive_frame(10).body) == b"word"
    finally:
        channel.close()


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_the_oldest_unauthenticated_connection_is_closed(
    kind: str, certificates: dict[str, TLS], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.transport.listening.max_unauthenticated", lambda: LIMIT)
    tls = certificates["ours"] if kind == "tls" else None
    transport = SocketTransport(TOKEN, tls=tls, handshake_timeout_s=60)
    process = psutil.Process()
    with serve_in_thread(EchoHandler(), transport) as served, ExitStack() as stack:
        address = served.endpoint.unix if kind == "unix" else served.endpoint.tcp
        assert address is not None
        known = transport.connect(served.endpoint, WORKER)
        stack.callback(known.close)
        before = process.num_fds()
        silent = [stack.enter_context(open_socket(address, 10)) for _ in range(5 * LIMIT)]
        wait_until(lambda: process.num_fds() <= before + len(silent) + LIMIT)
        silent[0].settimeout(10)
        while silent[0].recv(1 << 12):
            pass  # the client receives its challenge and the end of the stream
        echo(transport, served.endpoint)
        known.send(*frame_parts(ECHO, body=b"still here"))
        assert bytes(known.receive_frame(10).body) == b"still here"
        assert served.listener.num_connections <= LIMIT + 2


_CROWD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
crowd = []
for _ in range(400):
    connected = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
    crowd.append(connected)
print("all", flush=True)
sys.stdin.read()
"""


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_unauthenticated_connections_leave_descriptors_to_other_peers(transport: SocketTransport) -> None:
    with few_descriptors(spare=200), serve_in_thread(EchoHandler(), transport) as served:
        place = (served.endpoint.tcp.host, str(served.endpoint.tcp.port))
        command = [sys.executable, "-c", _CROWD, *place]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == b"all\n"
            for _ in range(3):
                echo(transport, served.endpoint)
            crowd.communicate(timeout=60)


def test_unauthenticated_connections_use_at_most_a_quarter_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 256), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024), (2, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert max_unauthenticated() == most


def test_connections_of_another_user_are_closed(transport: SocketTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = EchoHandler()
    node = Node(TOKEN)
    with serve_in_thread(handler, transport) as served:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        for endpoint in (served.endpoint, node.info.endpoint):
            assert endpoint.unix is not None
            with open_socket(endpoint.unix, 10) as other:
                other.settimeout(10)
                assert other.recv(1) == b""
    node.close()
    assert not handler.peers


def test_another_users_process_is_reached_by_tcp(transport: SocketTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_and_close(endpoint: Endpoint) -> str:
        peer = await transport.open(Inbox(), endpoint, WORKER)
        peer.abort()
        return peer.address

    nodes = Node(TOKEN), Node(TOKEN)
    with serve_in_thread(EchoHandler(), transport) as served:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        channel = transport.connect(served.endpoint, WORKER)
        assert channel.address == served.endpoint.tcp
        channel.close()
        assert asyncio.run(open_and_close(served.endpoint)) == str(served.endpoint.tcp)
        assert served.endpoint.unix is not None
        with pytest.raises(AddressError, match="belongs to another user"):
            transport.connect(served.endpoint.unix, WORKER)
        assert nodes[0].request_status(nodes[1].info, "a group", 10) == b""
        assert nodes[0].is_listening(nodes[1].info)
    for node in nodes:
        node.close()

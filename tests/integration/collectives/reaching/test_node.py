"""The node of a process: accepted connections, replies, and cleanup."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.waiting import in_thread

from paceline.errors import AddressError, AuthenticationError, DeadlineError, GroupClosedError, ProtocolError
from paceline.meeting.node import Node, NodeInfo, memory_domain
from paceline.transport import host_identity
from paceline.transport.client import open_socket

from .ranks import nodes, soon


def test_description_of_a_node() -> None:
    with nodes(2) as (first, second):
        info = NodeInfo.decode(first.info.encode())
        assert info == first.info
        assert info.id != second.info.id
        assert info.pid == os.getpid()
        assert info.memory_domain == second.info.memory_domain == memory_domain()
        assert info.memory_domain.startswith(host_identity())
        assert info.endpoint.tcp.host == "127.0.0.1"
        with pytest.raises(ProtocolError):
            NodeInfo.decode(b"nonsense")


def test_connect_and_accept() -> None:
    with nodes(2) as (first, second):
        outgoing = first.connect(second.info, "all", 3, "collective", soon())
        incoming = second.accept("all", 3, "collective", soon())
        with outgoing, incoming:
            assert outgoing.getblocking() is False
            assert incoming.getblocking() is False
            outgoing.send(b"word")
            assert incoming.recv(10) == b"word"
            with pytest.raises(DeadlineError, match="rank 3 of group 'all'"):
                second.accept("all", 3, "collective", soon(0.01))
            with pytest.raises(DeadlineError):
                second.accept("all", 3, "p2p", soon(0.01))


def test_tcp_has_no_delay() -> None:
    with nodes(2) as (first, second):
        by_tcp = msgspec.structs.replace(second.info, endpoint=msgspec.structs.replace(second.info.endpoint, unix=None))
        with first.connect(by_tcp, "all", 0, "collective", soon()) as outgoing:
            assert outgoing.family == socket.AF_INET
            assert outgoing.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        second.accept("all", 0, "collective", soon()).close()


def test_silent_clients_do_not_delay_other_clients() -> None:
    with nodes(2) as (first, second):
        silent = [open_socket(second.info.endpoint.best(), 5.0) for _ in range(20)]
        with first.connect(second.info, "all", 0, "collective", soon()):
            second.accept("all", 0, "collective", soon()).close()
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_many_unauthenticated_clients_do_not_delay_members(kind: str) -> None:
    with nodes(2) as (first, second):
        address = getattr(second.info.endpoint, kind)
        silent = [open_socket(address, 5.0) for _ in range(200)]
        assert first.request_status(second.info, "all", 5.0) == b""
        threads = [thread for thread in threading.enumerate() if thread.name == "paceline-greeter"]
        assert len(threads) < 200
        silent += [open_socket(address, 5.0) for _ in range(100)]
        with first.connect(second.info, "all", 0, "collective", soon()) as outgoing:
            outgoing.send(b"word")
            with second.accept("all", 0, "collective", soon()) as incoming:
                incoming.setblocking(True)
                assert incoming.recv(4) == b"word"
        for connection in silent:
            connection.close()


def test_clients_without_the_token_are_rejected() -> None:
    with nodes(1) as (node,):
        stranger = Node("another token for tests")
        with pytest.raises(AuthenticationError):
            stranger.connect(node.info, "all", 0, "collective", soon())
        with pytest.raises(AuthenticationError):
            stranger.request_status(node.info, "all", 5.0)
        with open_socket(node.info.endpoint.tcp, 5.0) as rude:
            rude.sendall(b"GET / HTTP/1.1\r\nHost: a-host-with-a-long-name\r\n\r\n")
            rude.settimeout(5.0)
            while rude.recv(1 << 12):
                pass
        stranger.close()


def test_status_requests_are_answered() -> None:
    with nodes(2) as (first, second):
        second.set_status("all", lambda: b"call 7" * 100_000)
        assert first.request_status(second.info, "all", 5.0) == b"call 7" * 100_000
        assert first.request_status(second.info, "other", 5.0) == b""
        second.forget("all")
        assert first.request_status(second.info, "all", 5.0) == b""
        assert first.is_listening(second.info)


def test_a_dead_node() -> None:
    with nodes(2) as (first, second):
        second.close()
        with pytest.raises(AddressError):
            first.request_status(second.info, "all", 5.0)
        with pytest.raises(AddressError):
            first.connect(second.info, "all", 0, "collective", soon())
        assert not first.is_listening(second.info)


def test_another_process_at_the_address_is_detected() -> None:
    with nodes(2) as (first, second):
        before = msgspec.structs.replace(second.info, id="of a process that has ended")
        with pytest.raises(AddressError, match="another process listens"):
            first.connect(before, "all", 0, "collective", soon())


def test_close_removes_the_socket_and_wakes_waiting_threads() -> None:
    with nodes(2) as (first, second), ThreadPoolExecutor(1) as pool:
        unix = first.info.endpoint.unix
        assert unix is not None
        waiting = pool.submit(first.accept, "all", 1, "collective", soon())
        second.connect(first.info, "untaken", 1, "collective", soon()).close()
        silent = open_socket(unix, 5.0)
        first.close()
        first.close()
        with pytest.raises(GroupClosedError):
            waiting.result(5.0)
        with pytest.raises(AddressError):
            open_socket(unix, 5.0)
        silent.close()


def test_dropped_nodes_are_closed() -> None:
    with nodes(2) as (first, second), first.connect(second.info, "all", 0, "collective", soon()) as outgoing:
        taken = second.accept("all", 0, "collective", soon())
        with first.connect(second.info, "all", 0, "collective", soon()) as again:
            second.set_status("all", lambda: b"")
            again.setblocking(True)
            again.settimeout(5.0)
            closed = threading.Event()

            def forget() -> None:
                while not closed.is_set():
                    second.forget("all")

            with in_thread(forget):
                try:
                    assert again.recv(1) == b""
                finally:
                    closed.set()
        outgoing.send(b"word")
        assert taken.recv(4) == b"word"
        taken.close()

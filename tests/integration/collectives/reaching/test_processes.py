"""Ranks are real processes, which use the environment and are killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psutil
import pytest

from paceline.collectives.p2p.point_to_point import PointToPoint
from paceline.environment import Environment
from paceline.errors import AddressError, RankLostError
from paceline.meeting.node import Node, NodeInfo
from paceline.meeting.rendezvous import Meeting, rendezvous
from paceline.meeting.store import exchange
from paceline.transport.unix_sockets import remove_unix

from .ranks import PATIENCE_S, soon
from .test_rendezvous import free_ports

_OTHER = """
import time
from paceline.meeting.node import Node, NodeInfo
from paceline.collectives.p2p.point_to_point import PointToPoint
from paceline.meeting.rendezvous import rendezvous
from paceline.meeting.store import exchange

meeting = rendezvous(timeout_s=20.0)
node = Node(meeting.token, host=meeting.host)
node.set_status("all", lambda: b"here")
values = exchange(meeting.store, 1, 2, node.info.encode(), time.monotonic() + 20.0, description="group 'all'")
end = PointToPoint(node, "all", 1, [NodeInfo.decode(value) for value in values])
while True:
    buffer = memoryview(bytearray(8))
    end.receive(buffer, 0, 1, "int64[1]").wait(20.0)
    if bytes(buffer) == b"the end.":
        break
    end.send(buffer, 0, 2, "int64[1]").wait(20.0)
end.close()
node.close()
meeting.close()
"""


class Pair:
    """Rank 0 runs in this process; rank 1 is a child process that echoes messages."""

    def __init__(self, meeting: Meeting, node: Node, other: subprocess.Popen[bytes]) -> None:
        self.other = other
        self.node = node
        values = exchange(meeting.store, 0, 2, self.node.info.encode(), soon(), description="group 'all'")
        self.infos = [NodeInfo.decode(value) for value in values]
        self.end = PointToPoint(self.node, "all", 0, self.infos)

    def echo(self, data: bytes) -> bytes:
        buffer = memoryview(bytearray(len(data)))
        self.end.send(memoryview(data), 1, 1, "int64[1]").wait(PATIENCE_S)
        self.end.receive(buffer, 1, 2, "int64[1]").wait(PATIENCE_S)
        return bytes(buffer)


@contextmanager
def pair() -> Iterator[Pair]:
    port = free_ports()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PACELINE_TOKEN": ""}
    with subprocess.Popen([sys.executable, "-c", _OTHER], env={**os.environ, **shared, "RANK": "1"}) as other:
        try:
            parent_environment = Environment(rank=0, world_size=2, master_addr="127.0.0.1", master_port=port)
            with (
                closing(rendezvous(variables=parent_environment, timeout_s=PATIENCE_S)) as meeting,
                closing(Node(meeting.token, host=meeting.host)) as node,
            ):
                made = Pair(meeting, node, other)
                with closing(made.end):
                    yield made
                unix = made.infos[1].endpoint.unix
                if unix is not None:
                    remove_unix(unix)  # a killed process leaves this file
        finally:
            other.kill()


def test_two_processes_exchange_messages() -> None:
    with pair() as ranks:
        for number in range(10):
            assert ranks.echo(b"word %3d" % number) == b"word %3d" % number
        assert ranks.infos[0].memory_domain == ranks.infos[1].memory_domain
        assert ranks.infos[1].pid == ranks.other.pid
        ranks.end.send(memoryview(b"the end."), 1, 1, "int64[1]").wait(PATIENCE_S)
        assert ranks.other.wait(PATIENCE_S) == 0


def test_a_killed_rank_is_named_immediately() -> None:
    with pair() as ranks:
        ranks.echo(b"word 001")
        pending = ranks.end.receive(memoryview(bytearray(8)), 1, 2)
        ranks.other.send_signal(signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 has closed its connection") as lost:
            pending.wait(PATIENCE_S)
        assert lost.value.ranks == (1,)
        ranks.other.wait(PATIENCE_S)
        with pytest.raises(AddressError):
            ranks.node.request_status(ranks.infos[1], "all", 5.0)


def test_a_stopped_rank_does_not_answer() -> None:
    with pair() as ranks:
        assert ranks.node.request_status(ranks.infos[1], "all", 5.0) == b"here"
        ranks.other.send_signal(signal.SIGSTOP)
        process = psutil.Process(ranks.other.pid)
        while process.status() != psutil.STATUS_STOPPED:
            os.sched_yield()
        assert ranks.node.request_status(ranks.infos[1], "all", 0.1) is None
        with pytest.raises(RankLostError, match="no message with tag 2 arrived from rank 1"):
            ranks.end.receive(memoryview(bytearray(8)), 1, 2).wait(0.1)
        ranks.other.send_signal(signal.SIGCONT)
        assert ranks.node.request_status(ranks.infos[1], "all", PATIENCE_S) == b"here"

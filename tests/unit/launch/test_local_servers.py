"""Local servers that die: their replacement, and the messages of a run."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from tests.free_ports import free_port
from tests.waiting import wait_until

from paceline.launch import supervisor
from paceline.launch.local import LocalCluster
from paceline.launch.run.servers import RunServers
from paceline.launch.share import Share
from paceline.protocol import Role
from paceline.ps import Client, messages
from paceline.transport import SocketTransport

pytestmark = pytest.mark.usefixtures("warm_clusters")

_TOKEN = "a token for tests"


@pytest.fixture
def servers() -> RunServers:
    """Two servers with one replica."""
    return RunServers.start(
        messages.ClusterSettings(num_servers=2, replicas=1),
        token=_TOKEN,
        share=None,
    )


def test_a_failing_server_is_started_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 30.0)
    monkeypatch.setattr(supervisor, "SHORT_LIFE_S", 30.0)
    port, scheduler = free_port(), f"127.0.0.1:{free_port()}"
    share = Share(scheduler=scheduler, runs_scheduler=True, servers={0: "127.0.0.1:0", 1: f"127.0.0.1:{port}"})
    statuses: list[int] = []
    with LocalCluster.start(
        messages.ClusterSettings(num_servers=2, replicas=1),
        share=share,
        on_replaced=lambda name, status: statuses.append(status),
    ) as local:
        os.kill(local.pids("server")[1], signal.SIGTERM)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            while taken.getsockname()[1] != port:
                try:
                    taken.bind(("127.0.0.1", port))
                except OSError:
                    time.sleep(0.001)
            taken.listen()
            wait_until(lambda: len(statuses) == 1 and len(local.pids("server")) == 1)
            time.sleep(0.5)
            assert statuses == [-signal.SIGTERM]  # the status 1 of the failed replacement is not reported
            assert local.dead_children("server") == []  # another replacement follows
            since = time.monotonic()
            local.close()
            assert time.monotonic() - since < 8.0  # close() does not wait for the pause before the next start
    output = capfd.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in output
    assert output.count("\n") == 1


def test_a_death_is_reported_to_every_caller(servers: RunServers, capsys: pytest.CaptureFixture[str]) -> None:
    """Writing to standard error must not block the link's thread, which sends heartbeats."""
    with servers, Client.connect(SocketTransport(_TOKEN), servers.scheduler, observer=True) as client:
        cluster = client.link.view
        assert cluster is not None
        before = {server.incarnation for server in cluster.of_role(Role.SERVER)}
        os.kill(servers.cluster.pids("server")[0], signal.SIGTERM)

        def is_replaced() -> bool:
            now = {server.incarnation for server in client.link.get_view().of_role(Role.SERVER)}
            return len(now) == 2 and bool(now - before)

        wait_until(is_replaced)
        time.sleep(0.2)
        assert capsys.readouterr().err == ""
        assert servers.failure() is None
        assert capsys.readouterr().err == (
            "paceline run: server 0 was killed by SIGTERM: its replicas serve its data, and another server "
            "replaces it\n"
        )


def test_the_end_of_the_cluster_is_not_attributed_to_absent_nodes(servers: RunServers) -> None:
    with servers, Client.connect(SocketTransport(_TOKEN), servers.scheduler, rank=0) as client:
        wait_until(lambda: bool(servers.connected))
        client.link.call(messages.EndCluster())
        wait_until(lambda: servers.failure() is not None)
        assert servers.failure() == "the scheduler was ended"

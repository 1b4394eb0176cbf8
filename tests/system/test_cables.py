"""Cut cables: each server is in its own network namespace, connected to a switch in another namespace.

A cut cable breaks no connection and shows no error on either end; the sent bytes stay unacknowledged.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until
from tests.warm.processes import WarmProcess

from .running import PROMPT_S, Commands, Running
from .test_roles import end

NETWORK = "10.203.9"
SERVERS = (1, 2, 3)
HEARTBEAT_TIMEOUT_S = 1.5
COUNTING_S = 5.0


class Switch:
    """Hosts 0 to 3 on one switch, in their own network namespaces."""

    def __init__(self) -> None:
        self._tag = f"pl{os.getpid()}x{secrets.token_hex(2)}"
        self._names = [f"{self._tag}{name}" for name in ("sw", "h0", "h1", "h2", "h3")]

    def build(self) -> None:
        switch, *hosts = self._names
        for name in self._names:
            run("ip", "netns", "add", name)
        run("ip", "-n", switch, "link", "add", "name", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(hosts):
            run("ip", "-n", switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "e", "netns", host)
            run("ip", "-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            run("ip", "-n", host, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "e")
            run("ip", "-n", host, "link", "set", "e", "up")
            run("ip", "-n", host, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Remove all namespaces. The processes in them have ended."""
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def within(self, host: int) -> Path:
        """Return the namespace of a host."""
        return Path("/run/netns") / self._names[host + 1]

    def set_cable(self, host: int, state: str) -> None:
        """Cut a host's cable ("down") or reconnect it ("up")."""
        run("ip", "-n", self._names[0], "link", "set", f"p{host}", state)

    def part(self, one: int, other: int) -> None:
        """Cut the connection of two hosts; each of them still reaches all other hosts."""
        for host in (one, other):
            run("bridge", "-n", self._names[0], "link", "set", "dev", f"p{host}", "isolated", "on")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def switch() -> Iterator[Switch]:
    """The network. It is removed after the commands in it have ended."""
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "bridge"))):
        pytest.skip("network namespaces need Linux, root, and ip and bridge of iproute2")
    switch = Switch()
    try:
        try:
            switch.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield switch
    finally:
        switch.remove()


class Cluster:
    """A scheduler and a counting worker on host 0, and three servers. A server's rank is the number of its host."""

    def __init__(self, paceline: Commands, switch: Switch, folder: Path) -> None:
        self._paceline, self._switch, self._folder = paceline, switch, folder
        self._counts = folder / "acknowledged"
        scheduler_arguments = ["--host", f"{NETWORK}.1", "--port", "0", "--token-file", "token", "--heartbeat-timeout"]
        self.scheduler = paceline.start(
            "scheduler",
            *scheduler_arguments,
            f"{HEARTBEAT_TIMEOUT_S}",
            "--servers",
            "3",
            "--replicas",
            "1",
            within=switch.within(0),
        )
        found = re.search(r"tcp://([0-9.]+:\d+)", self.scheduler.wait_line("listening on"))
        assert found is not None
        self._address = found.group(1)
        self._worker: WarmProcess | None = None
        self.servers: dict[int, Running] = {}
        for host in SERVERS:
            worker_arguments = ["--host", f"{NETWORK}.{host + 1}", "--rank", f"{host}", "--scheduler", self._address]
            self.servers[host] = paceline.start(
                "server", *worker_arguments, "--token-file", "token", within=switch.within(host)
            )

    def start_worker(self) -> None:
        """Start counting, and wait for the first counts."""
        token = (self._folder / "token").read_text().strip()
        self._worker = WarmProcess(
            [Path(__file__).with_name("counting_worker.py"), str(COUNTING_S), self._counts],
            within=self._switch.within(0),
            env={**self._paceline.environment, "PACELINE_SCHEDULER": self._address, "PACELINE_TOKEN": token},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 20.0
        while self.num_acknowledged() < 20:
            assert time.monotonic() < deadline, "the worker does not start counting"
            time.sleep(0.01)

    def stop_worker(self) -> None:
        """Kill the worker if it still runs."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()

    def num_acknowledged(self) -> int:
        """Return the number of acknowledged pushes of the worker."""
        return int.from_bytes(self._counts.read_bytes() if self._counts.exists() else b"", "little")

    def longest_pause_s(self) -> float:
        """Return the longest time without an acknowledgement of the worker's next pushes."""
        longest, last, since = 0.0, self.num_acknowledged(), time.monotonic()
        end = since + HEARTBEAT_TIMEOUT_S + 2.5
        while (now := time.monotonic()) < end:
            count = self.num_acknowledged()
            longest = max(longest, now - since)
            if count != last:
                last, since = count, now
            time.sleep(0.005)
        return longest

    def check_worker(self) -> None:
        """Check that the worker ends with status 0: all values that it read were right."""
        assert self._worker is not None
        output = self._worker.communicate(timeout=20.0)[0]
        assert (self._worker.returncode, output) == (0, "")


def check_expelled(server: Running, reason: str) -> None:
    """Check that a server declared dead ends by itself with one sentence."""
    finished = server.wait(PROMPT_S)
    assert finished.status == 1, finished
    assert finished.err == f"paceline: this server was declared dead: {reason}\n"


def test_the_cable_of_a_server_is_cut(
    switch: Switch, paceline: Commands, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cluster = Cluster(paceline, switch, tmp_path)
    request.addfinalizer(cluster.stop_worker)
    cluster.start_worker()
    switch.set_cable(2, "down")
    pause_s = cluster.longest_pause_s()
    assert HEARTBEAT_TIMEOUT_S / 2 < pause_s < HEARTBEAT_TIMEOUT_S + 2.0
    assert cluster.servers[2].process.poll() is None  # the server does not detect the cut
    switch.set_cable(2, "up")
    check_expelled(cluster.servers.pop(2), "it was silent for 1.5 s")
    cluster.check_worker()
    end(cluster.scheduler, *cluster.servers.values())


def test_the_cable_between_two_servers_is_cut(
    switch: Switch, paceline: Commands, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cluster = Cluster(paceline, switch, tmp_path)
    request.addfinalizer(cluster.stop_worker)
    cluster.start_worker()
    switch.part(1, 3)
    pause_s = cluster.longest_pause_s()
    assert HEARTBEAT_TIMEOUT_S / 2 < pause_s < HEARTBEAT_TIMEOUT_S + 2.0
    wait_until(lambda: any(server.process.poll() is not None for server in cluster.servers.values()), "nobody ended")
    dead, other = (1, 3) if cluster.servers[1].process.poll() is not None else (3, 1)
    why = f"it and server {other} could not reach each other for 1.5 s, although all are alive"
    check_expelled(cluster.servers.pop(dead), why)
    cluster.check_worker()
    end(cluster.scheduler, *cluster.servers.values())


_RANK = """
import sys, datetime
from paceline.collectives import init

rank = int(sys.argv[1])
try:
    init(rank, 3, address="10.203.9.1:29400", token="secret" * 6, timeout=datetime.timedelta(seconds=40))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("connected")
"""


@pytest.mark.parametrize("is_cut", [False, True])
def test_collectives_name_the_hosts_that_cannot_reach_each_other(
    switch: Switch, paceline: Commands, tmp_path: Path, is_cut: bool
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    if is_cut:
        switch.part(1, 2)
    ranks = [
        WarmProcess(
            [script, str(rank)],
            within=switch.within(rank),
            env=paceline.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=30.0)[0] for rank in ranks]
    if not is_cut:
        assert outputs == ["connected\n"] * 3
        return
    for output in outputs:
        assert output.startswith("CollectiveError: ")
        assert re.findall(r"(\S+) \(rank \d\) cannot connect to (\S+)", output) == [
            (f"{NETWORK}.2", f"{NETWORK}.3"),
            (f"{NETWORK}.3", f"{NETWORK}.2"),
        ]

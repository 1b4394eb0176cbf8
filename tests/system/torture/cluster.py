"""The processes of a run: a scheduler, servers and workers. Each is started separately on its own host."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from tests.warm.processes import WarmProcess

from paceline.errors import PacelineError
from paceline.protocol import Role
from paceline.ps import Client, messages
from paceline.transport import SocketTransport, make_token

from .ledger import LEFT, MOST_WORKERS, STATE, Ledger
from .network import Network
from .worker import Part

HEARTBEAT_TIMEOUT_S = 3.0
TIMEOUT_S = 30.0
"""The timeout of an operation of a client. A longer operation counts as a hang."""
_SCHEDULER_PORT = 7400
_MOST_HOSTS = 40


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run; equal settings give equal runs."""

    seed: int
    mode: str
    duration_s: float
    folder: str
    num_faults: int = 0
    """The number of faults, without pauses. If 0, faults with pauses occur until the end of the time."""
    pause_s: float = 0.0
    """The average length of pauses. If 0, there are short and long pauses."""
    servers: int = 3
    workers: int = 3
    replicas: int = 1
    is_network: bool = True
    """Whether the system has network namespaces; otherwise all hosts are addresses of the loopback device."""
    is_apart: bool = False
    """Whether each host has separate process ids, as real machines have.

    The kernel then reports no ended processes of other hosts.
    """
    kinds: tuple[str, ...] = ()
    """If not empty, only faults of these kinds occur."""

    @property
    def consistency(self) -> str:
        """Return the consistency in the notation of the command."""
        return {"bounded": "bounded:2", "lockstep": "sequential"}.get(self.mode, self.mode)


@dataclass(eq=False)
class Node:
    """A started process."""

    role: str
    number: int
    host: int
    port: int
    process: subprocess.Popen[bytes] | WarmProcess
    log: Path
    is_wrapped: bool
    """Whether the started process is ``unshare``, with the real process as its child."""
    pid: int = 0
    doomed: str = ""
    """The reason why the process must end or has ended. If empty, its end is a failure."""
    risk_until: float = 0.0
    """The time until which the process may be declared dead. Until then, checks must not depend on it."""
    is_stopped: bool = False
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    """The time at which the end of the process was detected; 0 while it runs."""

    @property
    def name(self) -> str:
        """The name of the process in messages."""
        return f"{self.role} {self.number}"

    def is_alive(self) -> bool:
        """Whether the process runs, stopped or not."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process itself, not to its parent."""
        if self.is_alive():
            try:
                os.kill(self.inner_pid(), number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        """Return the last lines of its output."""
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]

    def inner_pid(self) -> int:
        """Return the id of the process itself."""
        deadline = time.monotonic() + 2.0
        while not self.pid:
            children = psutil.Process(self.process.pid).children() if self.is_wrapped else []
            if children or not self.is_wrapped or time.monotonic() > deadline:
                self.pid = children[0].pid if children else self.process.pid
        return self.pid


class Cluster:
    """The cluster of a run."""

    def __init__(self, settings: Settings, chance: random.Random) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.ledger = Ledger(self.folder / "ledger")
        self.network = Network(_MOST_HOSTS, settings.seed) if settings.is_network else None
        self.nodes: list[Node] = []
        self._chance = chance
        self._token = make_token()
        self._free_hosts = list(range(2, _MOST_HOSTS))
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
            "PACELINE_TOKEN": self._token,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
            "OPENBLAS_NUM_THREADS": "1",
            "TMPDIR": settings.folder,
        }
        self.scheduler = self.start_scheduler()
        for _ in range(settings.servers):
            self.start_server()
        self.observer = self._connect()

    # Processes.

    def start_scheduler(self, *, replaces: bool = False) -> Node:
        """Start a scheduler, always at the same address."""
        settings = self.settings
        words = ["scheduler", "--host", self.address(1), "--port", f"{_SCHEDULER_PORT}"]
        words += ["--servers", f"{settings.servers}", "--workers", f"{settings.workers}"]
        words += ["--consistency", settings.consistency, "--replicas", f"{settings.replicas}"]
        words += ["--heartbeat-timeout", f"{HEARTBEAT_TIMEOUT_S}", *(["--replaces"] if replaces else [])]
        self.scheduler = self._start("scheduler", 1, _SCHEDULER_PORT, ["-m", "paceline", *words])
        return self.scheduler

    def start_server(self, *, joins: bool = False) -> Node:
        """Start a server on its own host."""
        host, port = self._free_hosts.pop(0), 7500 + len(self.nodes)
        words = ["server", "--scheduler", self.scheduler_address, "--host", self.address(host), "--port", f"{port}"]
        return self._start("server", host, port, ["-m", "paceline", *words, *(["--join"] if joins else [])])

    def start_worker(self, *, visits: bool = False, rank: int | None = None, iterations: int = 0) -> Node | None:
        """Start a worker on its own host; return None if there are enough workers."""
        number = sum(node.role == "worker" for node in self.nodes)
        if number >= MOST_WORKERS or not self._free_hosts:
            return None
        part = Part(
            number=number,
            seed=self.settings.seed * 1000 + number,
            folder=str(self.folder),
            scheduler=self.scheduler_address,
            timeout_s=TIMEOUT_S,
            rank=rank,
            ranks=self.settings.workers,
            iterations=iterations,
            visits=visits,
        )
        words = ["-m", "system.torture.worker", msgspec.json.encode(part).decode()]
        return self._start("worker", self._free_hosts.pop(0), 0, words)

    def _start(self, role: str, host: int, port: int, words: list[str]) -> Node:
        number = sum(node.role == role for node in self.nodes)
        namespace = None if self.network is None else self.network.namespace(host)
        log = self.folder / f"{role}-{number}.log"
        process: subprocess.Popen[bytes] | WarmProcess
        with open(log, "wb") as out:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out.fileno(), "stderr": subprocess.STDOUT}
            if self.settings.is_apart:
                within = [] if namespace is None else ["nsenter", f"--net={namespace}"]
                within += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
                command = [*within, sys.executable, *words]
                process = subprocess.Popen(command, env=self._environment, **streams)
            else:
                process = WarmProcess(words, within=namespace, env=self._environment, **streams)
        node = Node(role, number, host, port, process, log, self.settings.is_apart)
        self.nodes.append(node)
        return node

    def _connect(self) -> Client:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return Client.connect(
                    SocketTransport(self._token), self.scheduler_address, observer=True, timeout_s=TIMEOUT_S
                )
            except PacelineError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def of_role(self, role: str) -> list[Node]:
        """Return the living processes of a role."""
        return [node for node in self.nodes if node.role == role and node.is_alive()]

    def address(self, host: int) -> str:
        """Return a host's IP address."""
        return f"127.1.0.{host + 1}" if self.network is None else self.network.address(host)

    @property
    def scheduler_address(self) -> str:
        """Return the address of the scheduler."""
        return f"{self.address(1)}:{_SCHEDULER_PORT}"

    def doom(self, node: Node, why: str) -> None:
        """Permit the end of a process. Other processes do not wait for such a worker."""
        node.doomed = node.doomed or why
        if node.role == "worker":
            self.ledger.board[node.number, STATE] = LEFT

    def close(self) -> None:
        """Kill all processes."""
        for node in self.nodes:
            node.kill()
        try:
            self.observer.abort()
            self.observer.close()
        except (PacelineError, AttributeError):
            pass
        if self.network is not None:
            self.network.close()

    # The cluster's own reports.

    def map(self) -> messages.View:
        """Return the newest received view."""
        found = self.observer.link.view
        assert found is not None
        return found

    def members(self) -> dict[int, Node]:
        """Return the living servers of the view by incarnation."""
        nodes = {(self.address(node.host), node.port): node for node in self.of_role("server")}
        found = {}
        for member in self.map().of_role(Role.SERVER):
            assert member.address is not None
            node = nodes.get((member.address.tcp.host, member.address.tcp.port))
            if node is not None:
                found[member.incarnation] = node
        return found

    def holders(self) -> list[list[Node]]:
        """Return the living servers of each chain."""
        members = self.members()
        return [[members[member] for member in group.members if member in members] for group in self.map().groups]

    def filling(self) -> list[Node]:
        """Return the servers that are being filled."""
        members = self.members()
        return [members[group.filling] for group in self.map().groups if group.filling in members]

    def is_whole(self) -> bool:
        """Whether every bucket has all its replicas on living servers that stay, and no server is being filled."""
        groups = self.map().groups
        staying = [[node for node in holders if not node.doomed] for holders in self.holders()]
        enough = all(len(nodes) > self.settings.replicas for nodes in staying)
        known = len(self.members()) == len(self.map().of_role(Role.SERVER))
        return (
            bool(groups) and enough and known and all(group.filling is None for group in groups) and self._is_newest()
        )

    def _is_newest(self) -> bool:
        """Whether the received view is the scheduler's newest view. A restarted scheduler may have an older view."""
        try:
            found = self.observer.link.get_view(timeout_s=2.0)
        except PacelineError:
            return False
        return bool((found.term, found.version) == (self.map().term, self.map().version))

    def is_safe(self, *victims: Node) -> bool:
        """Whether healthy servers have copies of all buckets, so the death of these servers loses no bucket."""
        now = time.monotonic()

        def is_sound(node: Node) -> bool:
            return node not in victims and not node.doomed and not node.is_stopped and now > node.risk_until

        return all(any(map(is_sound, holders)) for holders in self.holders())


def describe(settings: Settings) -> str:
    """Return the settings in words."""
    hosts = "one host" if not settings.is_network else "hosts apart" if settings.is_apart else "hosts under one kernel"
    return f"{settings.mode}, {settings.replicas} replicas, {settings.servers} servers, {hosts}"

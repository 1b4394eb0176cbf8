"""Run a cluster as processes of this machine, or join a running one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.environment import environment, naming
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.filters.modules import import_filter_modules
from paceline.observe.notebooks import NotebookTable
from paceline.observe.stuck.jobs import LaunchedJob, current_job, start_job
from paceline.observe.stuck.processes import unwatch, watch
from paceline.protocol import Accept, Consistency, Eventual, Role, StalePolicy, parse_consistency
from paceline.ps import Client, SchedulerLink, make_node_name, messages
from paceline.tables.memory.limit import MemoryLimit as MemoryLimit
from paceline.temporary import TemporaryFolder
from paceline.transport import TLS, Address, Hello, SocketTransport
from paceline.transport.backoff import reach
from paceline.transport.security.authentication import check_or_make_token, check_token

from .fork_server import CHILD, MALLOC, ForkError, ForkServer, module_command
from .kernels import prepare_kernels
from .share import Share
from .supervisor import Child, ChildProcess, Supervisor, describe_status, spawn

_logger = logging.getLogger(__name__)
_START_S = 60.0
_END_S = 10.0
_DEFAULT_SETTINGS = messages.ClusterSettings()
_LOOPBACK = "127.0.0.1:0"
_MAX_SERVERS = 100  # the first server of a rank and its replacements
_MAX_SCHEDULERS = 6  # the first scheduler and five replacements; another one would probably die from the same cause


class LocalCluster(Closing, NotebookTable):
    """A scheduler and servers as processes on this machine. Any number of clients may connect, from any process.

    Use it as a context manager. Every process ends when the cluster ends, or when this process is killed. A new
    scheduler replaces a dead one and recovers its state from the members. With replicas, dead servers are replaced too.
    Before a replacement joins, a thread calls `on_replaced` with the name and the exit status of the dead process. Rows
    beyond the `memory_limit` of a server are stored in files. With `start_workers` there are also worker processes,
    which run the posted jobs. With a `share` this machine runs only part of the cluster, and all machines must pass the
    same `token`. Servers and workers import the user's `filter_modules`.
    """

    def __init__(self, *, consistency: Consistency, token: str, tls: TLS | None) -> None:
        """Create a cluster without processes; use :meth:`start` instead."""
        self.consistency = consistency
        self.token = token
        self.scheduler = ""
        self.scheduler_restarts = 0
        """Number of replaced schedulers."""
        self.server_restarts = 0
        """Number of replaced servers (only with replicas)."""
        self._closing = contextlib.ExitStack()
        self.scratch = self._closing.enter_context(TemporaryFolder.make("cluster")).path
        """Folder of the processes' temporary files; removed at the end, even if this process is killed."""
        self._tls = tls
        self._filter_modules: list[str] = []
        self._supervisor = Supervisor()
        self._nodes: dict[str, tuple[str, ChildProcess]] = {}  # node name → local name and process of a server
        self._counting = threading.Lock()
        self._fork_server: ForkServer | None = None
        self._job: LaunchedJob | None = None

    def __repr__(self) -> str:
        return "<LocalCluster at {scheduler}: {processes}, {consistency}>".format(**self.described_rows())

    @override
    def described_rows(self) -> dict[str, Any]:
        counts = {role: len(self._supervisor.living(role)) for role in ("server", "worker")}
        running = ", ".join(f"{count} {role}{'' if count == 1 else 's'}" for role, count in counts.items() if count)
        return {"scheduler": self.scheduler, "processes": running or "ended", "consistency": self.consistency}

    @classmethod
    def start(
        cls,
        settings: messages.ClusterSettings = _DEFAULT_SETTINGS,
        *,
        memory_limit: MemoryLimit | None = None,
        tls: TLS | None = None,
        on_compile: Callable[[str], None] | None = None,
        start_workers: bool = False,
        token: str | None = None,
        share: Share | None = None,
        on_replaced: Callable[[str, int], None] = lambda name, status: None,
        fork_server: ForkServer | None = None,
        filter_modules: Sequence[str] = (),
    ) -> LocalCluster:
        """Start the processes with `fork_server` or a new fork server; wait until all servers have joined."""
        settings.check()
        environment()  # raises UsageError now, and not in every process
        if memory_limit is not None:
            memory_limit.check_folder()
        import_filter_modules(filter_modules)
        token = check_or_make_token(token)
        cluster = cls(consistency=parse_consistency(settings.consistency), token=token, tls=tls)
        cluster._filter_modules = list(filter_modules)
        cluster._job = current_job() or cluster._start_job()
        try:
            cluster._fork_server = fork_server or cluster._closing.enter_context(ForkServer.start())
            prepare_kernels(on_compile)
            listening = dict.fromkeys(range(settings.num_servers), _LOOPBACK) if share is None else share.servers
            serving = {"role": "server", "memory_limit": None if memory_limit is None else asdict(memory_limit)}
            cluster._start(
                settings, serving, listening, settings.num_workers if start_workers else 0, share, on_replaced
            )
        except BaseException:
            cluster.scheduler = ""  # so that close() ends the scheduler last: a starting server still needs it
            cluster.close()
            raise
        return cluster

    def _start_job(self) -> LaunchedJob | None:
        """Start a job whose processes are this process and the processes of the cluster."""
        job = start_job(cluster=self.scratch)
        if job is not None:
            self._closing.enter_context(job)
            watch("driver", job.folder)
            self._closing.callback(unwatch)
        return job

    def _start(
        self,
        settings: messages.ClusterSettings,
        server: dict[str, Any],
        listening: Mapping[int, str],
        num_workers: int,
        share: Share | None,
        on_replaced: Callable[[str, int], None],
    ) -> None:
        """Start all processes before waiting for the first, so that they import and load in parallel."""
        patience_s = _START_S if share is None else share.patience_s
        scheduler: Child | None = None
        if share is None or share.runs_scheduler:
            bind = _LOOPBACK if share is None else share.bind or share.scheduler
            scheduling = {"role": "scheduler", "address": bind, "scratch": str(self.scratch)}
            scheduling["settings"] = msgspec.to_builtins(settings)
            scheduler = self._start_child("scheduler", {**scheduling, "replaces": False})
        serving: list[tuple[Child, dict[str, Any]]] = []
        for rank, address in listening.items():
            options: dict[str, Any] = {**server, "rank": rank, "address": address}
            if scheduler is None:
                options["scratch"] = str(self.scratch)
            serving.append((self._start_child(f"server {rank}", options), options))
        for rank in range(num_workers):
            self._start_child(f"worker {rank}", {"role": "worker", "rank": rank})
        if scheduler is not None:
            self.scheduler = _read_address(scheduler.process)
            if share is None:
                scheduling["address"] = self.scheduler.removeprefix("tcp://")
            if self._job is not None:
                self._job.set_scheduler(self.scheduler)
            self._keep_scheduler(scheduler, {**scheduling, "replaces": True}, on_replaced)
        else:
            assert share is not None
            wait_cluster(self.transport(), share.scheduler, patience_s, ready=False)
            self.scheduler = share.scheduler
        for child in self._supervisor.children:
            if child is not scheduler:
                _send_address(child.process, self.scheduler)
        wait_cluster(self.transport(), self.scheduler, patience_s, check=lambda: self._check_started("server"))
        if settings.replicas:
            for child, options in serving:
                self._keep_server(child, {**options, "rank": None, "extra": True}, on_replaced)

    def connect(
        self, *, observer: bool = False, rank: int | None = None, timeout_s: float = 60.0, **options: Any
    ) -> Client:
        """Connect this process as a worker (`rank` or the next free rank) or as an observer (outside iterations)."""
        return Client.connect(
            self.transport(), self.scheduler, observer=observer, rank=rank, timeout_s=timeout_s, **options
        )

    def transport(self) -> SocketTransport:
        """Return a transport with this cluster's token."""
        return SocketTransport(self.token, tls=self._tls)

    def dead_children(self, role: str) -> list[tuple[str, int]]:
        """Return name and exit status of each ended process with this role."""
        return self._supervisor.ended(role)

    def pids(self, role: str) -> list[int]:
        """Return the ids of the living processes with this role, by rank."""
        return [child.process.pid for child in self._supervisor.living(role)]

    def kill_server(self, node: str) -> str | None:
        """Kill the server `node` if it is a living process of this machine; return its local name."""
        name, process = self._nodes.get(node, ("", None))
        if process is None or process.poll() is not None:
            return None
        process.send_signal(signal.SIGKILL)
        return name

    def wait_workers(self, client: Client, count: int, timeout_s: float = _START_S) -> None:
        """Wait until `count` workers have joined. Raises PeerError if a worker ends before."""
        deadline = time.monotonic() + timeout_s
        while len(client.link.get_view().of_role(Role.WORKER)) < count:
            self._check_started("worker")
            if time.monotonic() > deadline:
                raise PeerError(f"the workers did not start within {timeout_s:g} s")
            time.sleep(0.005)

    def end_workers(self) -> None:
        """End the worker processes; servers and scheduler continue."""
        workers = self._supervisor.living("worker")
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.process.wait()

    def close(self) -> None:
        """End every process of the cluster. Idempotent."""
        self._supervisor.stop_replacing()
        # Kill the workers: their state is no longer needed, and a stuck worker would ignore a request.
        self.end_workers()
        if self.scheduler and self._supervisor.living():
            self._request_end()
        self._supervisor.close(_END_S)
        self._closing.close()

    def _request_end(self) -> None:
        try:
            link = SchedulerLink(
                self.transport(), self.scheduler, Hello(role="observer"), timeout_s=2.0, reconnect_s=0.0
            )
            try:
                link.call(messages.EndCluster())
            finally:
                link.close()
        except PacelineError:
            pass  # the scheduler did not start or has ended; servers detect this and end

    # The processes.

    def _start_child(self, name: str, options: dict[str, Any]) -> Child:
        return self._supervisor.start(name, partial(self._launch, name, options))

    def _launch(self, name: str, options: dict[str, Any]) -> ChildProcess:
        if self._tls is not None:
            options = {**options, "tls": asdict(self._tls)}
        if self._filter_modules and options["role"] != "scheduler":
            options = {**options, "filter_modules": self._filter_modules, "path": sys.path}
        if options["role"] == "server":
            options = {**options, "node": make_node_name("server")}
        process = self._fork_or_spawn(json.dumps(options, default=str), captured=options["role"] == "scheduler")
        if "node" in options:
            self._nodes[options["node"]] = (name, process)
        return process

    def _fork_or_spawn(self, argument: str, *, captured: bool) -> ChildProcess:
        environment = {**MALLOC, **os.environ, "PACELINE_TOKEN": self.token, "TMPDIR": str(self.scratch)}
        environment |= {"PACELINE_JOB_DIR": ""} if self._job is None else self._job.variables
        try:
            if self._fork_server is not None:
                return self._fork_server.fork([argument], environment=environment, captured=captured)
        except ForkError as error:
            _logger.debug("cannot fork, processes are spawned: %s", error)
            self._fork_server = None
        stdout = subprocess.PIPE if captured else subprocess.DEVNULL
        return spawn(module_command(CHILD, argument), stdin=subprocess.PIPE, stdout=stdout, env=environment)

    def _keep_scheduler(self, child: Child, options: dict[str, Any], on_replaced: Callable[[str, int], None]) -> None:
        """Replace a scheduler that dies, at the same address."""

        def replaced(scheduler: ChildProcess, status: int) -> None:
            on_replaced(child.name, status)
            assert scheduler.stdout is not None
            with contextlib.suppress(ValueError):  # the cluster was closed, and its stream with it
                if scheduler.stdout.readline():
                    self.scheduler_restarts += 1

        launch = partial(self._launch, child.name, options)
        self._supervisor.keep(child, launch, most=_MAX_SCHEDULERS - 1, on_replaced=replaced)

    def _keep_server(self, child: Child, options: dict[str, Any], on_replaced: Callable[[str, int], None]) -> None:
        """Replace a server that dies; the other servers send its buckets to the new server."""

        def replaced(server: ChildProcess, status: int) -> None:
            on_replaced(child.name, status)
            with self._counting:
                self.server_restarts += 1
            _send_address(server, self.scheduler)

        launch = partial(self._launch, child.name, options)
        self._supervisor.keep(child, launch, most=_MAX_SERVERS, on_replaced=replaced)

    def _check_started(self, role: str) -> None:
        for name, status in self.dead_children(role):
            raise PeerError(f"{name} {describe_status(status)} at its start. See its output above")


def _read_address(scheduler: ChildProcess) -> str:
    assert scheduler.stdout is not None
    line = scheduler.stdout.readline().decode().strip()
    if not line:
        raise PeerError("the scheduler did not start. See its output above")
    return line


def _send_address(process: ChildProcess, scheduler: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(scheduler.encode() + b"\n")
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        pass  # the process has ended, or the cluster is closing; the waiting code detects this


def wait_cluster(
    transport: SocketTransport,
    scheduler: str,
    patience_s: float,
    *,
    ready: bool = True,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until a scheduler answers and, if `ready`, has all servers. Raises PeerError after `patience_s`."""
    deadline = time.monotonic() + patience_s
    observer = Hello(role="observer")
    link = reach(
        lambda: SchedulerLink(transport, scheduler, observer, timeout_s=_START_S, reconnect_s=0.0), patience_s, check
    )
    try:
        while ready and not link.get_view().is_ready:
            check()
            if time.monotonic() > deadline:
                raise PeerError(f"the servers did not start within {patience_s:g} s")
            time.sleep(0.005)
    finally:
        link.close()


def local_cluster(
    *,
    servers: int = 1,
    workers: int = 1,
    consistency: Consistency | None = None,
    stale: StalePolicy | None = None,
    replicas: int = 0,
    min_replicas: int = 0,
    non_finite: str = "refuse",
    memory_limit: MemoryLimit | None = None,
    heartbeat_timeout_s: float = 10.0,
    tls: TLS | None = None,
    filter_modules: Sequence[str] = (),
) -> LocalCluster:
    """Start a cluster on this machine: a context manager whose ``connect()`` returns a client.

    - `servers`: processes that store the tables.
    - `workers`: number of clients that iterations wait for, under `consistency` (default ``Eventual()``).
    - `stale`: policy for stale gradients.
    - `replicas`: additional copies of every row on other servers. No data is lost if at most this number of servers
      dies.
    - `min_replicas`: replicas that must have a push before the push is acknowledged. With fewer living replicas a push
      waits, and fails with ``DeadlineError`` after the client's timeout.
    - `heartbeat_timeout_s`: time without a heartbeat after which a member is declared dead.
    - `non_finite`: operations that would leave infinities or NaN in a table fail with ``NonFiniteError``; with
      ``"count"`` they are accepted and counted in the tables' statistics.
    - `memory_limit`: memory for a server's rows (``MemoryLimit(num_bytes=8 << 30, spill_dir="/data")``). Other rows are
      stored in files.
    - `filter_modules`: modules with your own filters, which the servers import. Servers import no module on a
      client's request.
    """
    settings = messages.ClusterSettings(
        num_servers=servers,
        num_workers=workers,
        consistency=str(Eventual() if consistency is None else consistency),
        stale=str(Accept() if stale is None else stale),
        replicas=replicas,
        min_replicas=min_replicas,
        non_finite=non_finite,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
    return LocalCluster.start(settings, memory_limit=memory_limit, tls=tls, filter_modules=filter_modules)


def connect(
    scheduler: str | None = None,
    *,
    token: str | None = None,
    tls: TLS | None = None,
    observer: bool = False,
    rank: int | None = None,
    timeout_s: float = 60.0,
) -> Client:
    """Join the cluster whose scheduler listens at ``host:port``. Use the client as a context manager, or close it.

    Default values come from environment variables: PACELINE_SCHEDULER, PACELINE_TOKEN, and PACELINE_TLS_CERT,
    PACELINE_TLS_KEY and PACELINE_TLS_CA. An `observer` reads and writes outside the iterations. A worker gets `rank`,
    or the next free rank. Raises UsageError without an address or token, AddressError if no scheduler listens there,
    AuthenticationError for a wrong token.
    """
    settings = environment()
    scheduler, token = scheduler or settings.scheduler, token or settings.token
    if not scheduler or not token:
        raise UsageError("no scheduler or no token. Pass both, or set PACELINE_SCHEDULER and PACELINE_TOKEN")
    tls = tls or TLS.of_environment(settings)
    check_token(token, "the token (default: PACELINE_TOKEN)")
    with naming("the scheduler (default: PACELINE_SCHEDULER)"):
        Address.parse(scheduler)
    prepare_kernels()
    return Client.connect(SocketTransport(token, tls=tls), scheduler, observer=observer, rank=rank, timeout_s=timeout_s)

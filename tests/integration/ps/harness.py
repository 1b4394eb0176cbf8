"""A complete cluster in this process: a scheduler and servers in threads. Servers join like ``paceline server``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import PacelineError
from paceline.protocol import Accept, Consistency, Eventual, Role, StalePolicy
from paceline.protocol.buckets import buckets_in
from paceline.ps import Client, Scheduler, SchedulerLink, Server, make_node_name, messages
from paceline.ps.client.table import TableClient
from paceline.ps.fail_stop import watch_loop
from paceline.ps.scheduler.link import LinkHooks
from paceline.tables.bucket_arrays import buckets_of_keys
from paceline.testing import Served, serve_in_thread
from paceline.transport import Channel, Hello, SocketTransport, Transport

TOKEN = "the-token-of-tests"
PATIENCE_S = 60.0

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


class ServerNode:
    """One server: its handler in a thread, and its link to the scheduler."""

    def __init__(self, cluster: Cluster, rank: int | None, stack: ExitStack, *, extra: bool = False) -> None:
        self.server = Server(
            cluster.settings,
            transport=cluster.transport,
            on_filled=self._send_filled,
            fail=self._failed,
        )
        self.failures: list[BaseException] = []
        """The exception that would have ended this server's process, if any. A test that expects it removes it."""
        self.served: Served | None = None
        self.expelled = ""
        """The reason of a received declaration of death, if any. The server of the test continues."""
        node = make_node_name("server")
        self.link = SchedulerLink(
            cluster.transport,
            cluster.scheduler_address,
            Hello(role="server", name=node),
            hooks=LinkHooks(self._receive_notice, unreachable=self.server.unreachable),
        )
        self._stack = stack.enter_context(ExitStack())
        self._serving = self._stack.enter_context(ExitStack())
        served = self.served = self._serving.enter_context(serve_in_thread(self.server, cluster.transport))
        served.loop.call_soon_threadsafe(watch_loop, served.loop, self.server._fail)
        self._serving.callback(lambda: served.call(self.server.close))
        self._stack.callback(self.link.close)
        self.registration = messages.Register(
            node=node, role=Role.SERVER, address=self.served.endpoint, rank=rank, is_extra=extra
        )

    def join(self) -> ServerNode:
        """Become a member as soon as all servers of the initial cluster are registered."""
        welcome = self.link.register(self.registration)
        name = self.registration.node
        hello = Hello(role="server", rank=welcome.rank, incarnation=welcome.incarnation, name=name)
        self.call(lambda: self.server.joined(hello, welcome.heartbeat_s))
        self.call(lambda: self.server.view_changed(welcome.view))
        return self

    @property
    def netloc(self) -> str:
        """Return the TCP address of the listener."""
        assert self.served is not None
        return self.served.endpoint.tcp.netloc

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the server's thread."""
        assert self.served is not None
        return self.served.call(function)

    def stop(self) -> None:
        """Close all connections, as if the process had ended."""
        self._stack.close()
        self.served = None

    def stop_serving(self) -> None:
        """Make the server unreachable for other servers. The scheduler still receives its heartbeats."""
        self.served = None
        self._serving.close()

    def _send_filled(self, filled: messages.Filled) -> None:
        with suppress(PacelineError):  # the link is closed
            self.link.notify(filled)

    def _failed(self, error: BaseException) -> None:
        """Simulate the end of the process: connected peers receive no further data."""
        self.failures.append(error)
        served = self.served
        if served is not None:
            served.loop.call_soon_threadsafe(self._break_off, served)

    def _break_off(self, served: Served) -> None:
        self.server.close()
        self._closing = served.loop.create_task(served.listener.close())

    def _receive_notice(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.View) and self.served is not None:
            self.served.loop.call_soon_threadsafe(self.server.view_changed, notice)
        elif isinstance(notice, messages.Expelled):
            self.expelled = self.expelled or notice.reason


def check_all_buckets(node: ServerNode) -> int:
    """Send the digests of all buckets of a server to its successors; return their number."""
    core, rounds = node.server.core, node.server.replicator.rounds

    def send() -> int:
        found = [(target, bucket) for target in rounds.targets for bucket in buckets_in(core.checkable(target))]
        return sum(rounds.send(target, bucket) for target, bucket in found)

    number: int = node.call(send)
    return number


def break_off(link: SchedulerLink) -> None:
    """Close a member's connection to the scheduler, as if the process had ended."""
    link.is_closing = True  # otherwise the link's thread would report the broken connection
    link.calls.channel.close()
    link.thread.join(PATIENCE_S)


class Cluster:
    """Context manager of a scheduler, `servers` servers, and the clients of a test. All end with the block."""

    def __init__(
        self,
        *,
        servers: int = 1,
        workers: int = 1,
        consistency: Consistency | None = None,
        stale: StalePolicy | None = None,
        replicas: int = 0,
        min_replicas: int = 0,
        non_finite: str = "refuse",
        expected_servers: int | None = None,
        heartbeat_timeout_s: float = 30.0,
        transport: Transport | None = None,
    ) -> None:
        self.settings = messages.ClusterSettings(
            num_servers=servers if expected_servers is None else expected_servers,
            num_workers=workers,
            consistency=str(Eventual() if consistency is None else consistency),
            stale=str(Accept() if stale is None else stale),
            replicas=replicas,
            min_replicas=min_replicas,
            non_finite=non_finite,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self.transport = SocketTransport(TOKEN) if transport is None else transport
        self.failures: list[BaseException] = []
        """The exception that would have ended the scheduler's process."""
        self.scheduler = Scheduler(self.settings, fail=self.failures.append)
        self._stack = ExitStack()
        self._scheduler_stack = self._stack.enter_context(ExitStack())
        self.served = self._scheduler_stack.enter_context(
            serve_in_thread(self.scheduler, self.transport, hello=Hello(role="scheduler"))
        )
        self._scheduler_stack.callback(lambda: self.served.call(self.scheduler.close))
        self.scheduler_address = self.served.endpoint.best()
        try:
            self.nodes = [ServerNode(self, rank, self._stack) for rank in range(servers)]
            if expected_servers is None:
                in_threads(*[node.join for node in self.nodes])
            else:
                for node in self.nodes:  # these threads wait for other members
                    node.link.start(node.registration, messages.Welcome)
        except BaseException:
            self._stack.close()
            raise
        self._clients = self._stack.enter_context(ExitStack())

    def connect(self, *, transport: Transport | None = None, timeout_s: float = PATIENCE_S, **options: Any) -> Client:
        """Return a client that is closed at the end."""
        client = Client.connect(transport or self.transport, self.scheduler_address, timeout_s=timeout_s, **options)
        self._clients.callback(client.close)
        return client

    def connect_all(self, **options: Any) -> list[Client]:
        """Return the clients of all expected workers, by rank."""
        return [self.connect(rank=rank, **options) for rank in range(self.settings.num_workers)]

    def link(self, name: str = "", role: str = "worker", rank: int | None = None) -> SchedulerLink:
        """Return a member's link to the scheduler, without connections to servers."""
        node = name or make_node_name(role)
        link = SchedulerLink(self.transport, self.scheduler_address, Hello(role=role, name=node), timeout_s=PATIENCE_S)
        self._clients.callback(link.close)
        link.register(messages.Register(node=node, role=Role(role), rank=rank))
        return link

    def raw(self, server: int = 0, **extra: Any) -> Channel:
        """Return a channel to a server as worker 7 of the cluster. It sends no messages by itself."""
        welcome = self.link().state.welcome
        served = self.nodes[server].served
        assert welcome is not None
        assert served is not None
        hello = Hello(role="worker", rank=7, incarnation=welcome.incarnation, extra=extra)
        channel = self.transport.connect(served.endpoint, hello, timeout_s=PATIENCE_S)
        self._clients.callback(channel.close)
        return channel

    def lose(self, link: SchedulerLink) -> None:
        """Simulate the end of a member's process: the process sends no further data, and the kernel reports its end."""
        welcome = link.state.welcome
        assert welcome is not None
        break_off(link)
        self.served.call(lambda: self.scheduler.process_ended(welcome.incarnation))

    def kill(self, client: Client) -> None:
        """Break every connection of a client, as if its process had died."""
        self.lose(client.link)
        for connection in client.servers.connections:
            connection.lost = ConnectionError("killed")  # type: ignore[assignment]
            connection.channel.close()
        client.servers.connections = []

    def num_counted(self) -> int:
        """Return the number of workers in the iterations: the maximum over the servers."""
        return max(len(node.server.core.workers.counted) for node in self.nodes)

    def compare_replicas(self) -> int:
        """Compare the buckets of all servers with their predecessors; return the number of compared buckets.

        Raises AssertionError with the differences. A bucket that received the same pushes in another order
        does not count as different.
        """
        nodes = [node for node in self.nodes if node.served is not None and not node.failures]
        newest = (
            self.scheduler.core.cluster.newest.version
        )  # leave out buckets that are still being filled in an older view
        wait_until(lambda: all(node.server.core.replication.version >= newest for node in nodes))
        checks = [node.server.replicator.checks for node in nodes]
        compared, received = sum(check.num_compared for check in checks), sum(check.num_received for check in checks)
        expected = received + sum(check_all_buckets(node) for node in nodes)
        wait_until(lambda: sum(check.num_received for check in checks) >= expected)
        differences = [line for check in checks for line in check.differences]
        if differences:
            raise AssertionError("\n".join(differences))
        return sum(check.num_compared for check in checks) - compared

    def stop_scheduler(self) -> None:
        """End the scheduler."""
        self._scheduler_stack.close()

    def close(self) -> None:
        """End all processes. Raise the errors of servers and scheduler that the test did not expect."""
        self._stack.close()
        for error in [*self.failures, *(error for node in self.nodes for error in node.failures)]:
            raise error

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes. A longer write fails with EFBIG."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def keys_of(*numbers: int) -> Keys:
    """Return an array of keys."""
    return np.array(numbers, np.uint64)


def floats(*values: float) -> Floats:
    """Return a float32 array."""
    return np.array(values, np.float32)


def key_of(client: Client, rank: int) -> Keys:
    """Return a key whose primary is the server of the rank."""
    keys = np.arange(1000, dtype=np.uint64).reshape(-1, 1)
    return next(key for key in keys if client.servers.routes.owners[buckets_of_keys(key).bit_length() - 1] == rank)


def random_keys(random: np.random.Generator, count: int) -> Keys:
    """Return distinct keys, including the smallest and the largest key."""
    keys = np.unique(np.concatenate([keys_of(0, 2**64 - 1), random.integers(0, 2**64, count, np.uint64)]))
    return random.permutation(keys)


def statistics_of(client: TableClient, table: str) -> Sequence[messages.TableStatistics]:
    """Return a table's statistics on every server."""
    return [server.tables[table] for server in client.statistics()]

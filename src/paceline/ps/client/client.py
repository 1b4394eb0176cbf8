"""A worker's client: tables by name, iterations, all servers at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.errors import (
    AddressError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    StaleEpochError,
    UsageError,
)
from paceline.protocol import Consistency, Sequential, parse_consistency
from paceline.protocol.buckets import Buckets
from paceline.protocol.chains import has_followers
from paceline.ps import messages
from paceline.ps.client.buffer_pool import Copies
from paceline.ps.client.connection import Pending, ServerConnection
from paceline.ps.client.dense_table import DenseTable
from paceline.ps.client.resending import send_again
from paceline.ps.client.routes import MapWatch, Routes, no_routes
from paceline.ps.client.sparse_table import SparseTable
from paceline.ps.forked import NoLock, own
from paceline.ps.messages import TICK, TICKS, TableSpec
from paceline.ps.scheduler.link import SchedulerLink
from paceline.tables.bounds import Clock, TableNumber
from paceline.tables.initializers import Initializer, Zeros
from paceline.tables.rules import UpdateRule
from paceline.tables.settings import to_fields
from paceline.tables.spec import MAX_DIM, MAX_NAME
from paceline.transport import Address, Endpoint, Hello, Transport, known

_CONNECT_S = 1.0
_Result = TypeVar("_Result")


def make_node_name(role: str) -> str:
    """Return a name for this process that no other has."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class Client:
    """One process's view of a cluster's tables. Make one with ``cluster.connect()``, or with a transport.

    A *worker* takes part in the iterations: servers wait for its :meth:`tick` as the cluster's consistency says. An
    *observer* only reads and writes. Methods may be called from several threads; one waits for the other.

    Raises, from any method: DeadlineError when an answer does not come within `timeout_s`, ConnectionLostError when
    a server is gone.
    """

    def __init__(
        self,
        transport: Transport,
        scheduler: Address | str,
        *,
        observer: bool = False,
        rank: int | None = None,
        timeout_s: float = 60.0,
        reconnect_s: float = 3.0,
        scheduler_reconnect_s: float = 60.0,
        on_notice: Callable[[msgspec.Struct], None] | None = None,
    ) -> None:
        role = "observer" if observer else "worker"
        self.role = role
        self._lock: threading.RLock | NoLock = threading.RLock()
        own(self)
        self._connections: list[ServerConnection] = []
        self._tables: dict[str, SparseTable | DenseTable] = {}
        self._specs: dict[int, TableSpec] = {}
        self._clock = 0
        self._sequence = 0
        self._counts = False
        self._watch = MapWatch()
        self._routes = no_routes()
        self._failures: list[Pending] = []
        self._copies = Copies()
        self._gone_bytes = [0, 0]
        self._is_closing = False
        self._settling_lock = threading.Lock()
        self._settling: threading.Thread | None = None
        self._transport = transport
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        node = make_node_name(role)
        self.link = SchedulerLink(
            transport,
            scheduler,
            Hello(role=role, name=node),
            timeout_s=timeout_s,
            reconnect_s=scheduler_reconnect_s,
            on_notice=on_notice,
            on_lost=self._watch.fail,
            on_map=self._take_map,
        )
        try:
            welcome = self.link.register(messages.Register(node=node, role=role, rank=rank), timeout_s=timeout_s)
            self.rank = welcome.rank
            self.incarnation = welcome.incarnation
            self.settings: messages.Settings = welcome.settings
            self.consistency: Consistency = parse_consistency(welcome.settings.consistency)
            self._hello = Hello(
                role=role,
                rank=self.rank,
                incarnation=self.incarnation,
                name=node,
                extra={"timeout_ms": int(timeout_s * 1000)},
                to="server",
                cluster=welcome.settings.cluster,
            )
            with self._lock:
                self._routes = self._watch.wait_newer(0, timeout_s)
                for server in self._routes.servers:
                    connection = self._make_connection(server)
                    try:
                        connection.connect(min(timeout_s, _CONNECT_S if welcome.settings.replicas else 10.0))
                    except (AddressError, ConnectionLostError, DeadlineError):
                        if not welcome.settings.replicas:
                            raise
                        # It is dead or asleep: the next map says which, and whoever needs it tries again.
                    connection.version = self._routes.version
                    self._connections.append(connection)
            if not observer:
                self.join()
        except BaseException:
            self.close()
            raise

    # Iterations.

    @property
    def clock(self) -> int:
        """The number of iterations that this worker has finished, which is also the number of the current one."""
        return self._clock

    def tick(self) -> None:
        """End this worker's iteration. What it pushed in it counts; reads from now on belong to the next.

        Does not wait for the servers. Raises the failure of an earlier push that nobody has waited for; and UsageError
        if this client takes no part in the iterations.
        """
        with self._lock:
            self.tick_flag()
            connections = self.connections
            for connection in connections:
                connection.raise_failures()
            for connection in connections:
                connection.send(TICK, 0, 0, self._clock, 0, ())
            self._clock += 1

    def retire(self) -> None:
        """Stop taking part in the iterations for now: nobody waits for this worker until it calls :meth:`join`.

        What it pushed without a tick is dropped under sequential consistency. Until then it reads and writes as an
        observer does: at once. Where another server may come to lead what is on one now, it waits until what it has
        pushed with a tick is safe.
        """
        with self._lock:
            self._drain()
            if self._counts:
                self._wait_durable()
            self._take_part(False)
            self.call_all(messages.Retire())

    def join(self) -> None:
        """Take part in the iterations (again), from the one at which the others are."""
        if self.role != "worker":
            raise UsageError("an observer takes no part in the iterations: connect without observer=True")
        with self._lock:
            clock = self._clock
            while True:  # servers may differ for a moment: the latest one counts
                version = self._routes.version
                joins = self.call_all(messages.JoinClock(rank=self.rank, clock=clock), Clock)
                # If the map has changed meanwhile, all servers were told that we take no part.
                is_same_map = version == self._routes.version and not self._watch.is_unsettled
                if all(joined == clock for joined in joins) and is_same_map:
                    break
                clock = max(joins)
            self._clock = clock
            self._take_part(True)
            for connection in self._connections:  # one that has not seen this map yet would wait for us when it does
                connection.say_synced(clock, True, self.rank)

    def _take_part(self, counts: bool) -> None:
        self._counts = counts
        self._keep()
        if not counts:
            for connection in self._connections:
                connection.forget_synced()

    def _keep(self) -> None:
        """Keep pushes until they are safe, or do so no longer: as the map and this worker's part in iterations say."""
        keeps = self._counts and isinstance(self.consistency, Sequential) and has_followers(self._routes.groups)
        for connection in self._connections:
            connection.keeps = keeps
            if not keeps:
                connection.forget_kept({id(each) for each in connection.kept})

    def _wait_durable(self) -> None:
        """Wait until all that was pushed with a tick is on every server that shall have it."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            keeping = [each for each in self.connections if any(kept.clock < self._clock for kept in each.kept)]
            if not keeping:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"server {keeping[0].rank} does not say within {self._timeout_s:g} s that the iterations before "
                    f"{self._clock}, which this worker has ended, are complete and on its replicas"
                )
            keeping[0].wait_durable(self._clock)

    def flush(self) -> None:
        """Wait until every push is acknowledged; raise the first failure."""
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        while True:
            busy = next((connection for connection in self.connections if connection.is_busy), None)
            if busy is None:
                break
            busy.receive_next()
        for connection in self.connections:
            connection.raise_failures()

    # Tables.

    def sparse_table(
        self,
        name: str,
        *,
        dim: int = 1,
        update: UpdateRule,
        initializer: Initializer | None = None,
        seed: int = 0,
    ) -> SparseTable:
        """Declare a sparse table: uint64 key → row of `dim` float32; every process that uses it says the same.

        A row exists from its first push; until then it reads as `initializer` (default zeros) says, which depends on
        `seed` and key alone. Raises TableMismatchError if the table is known with other settings.
        """
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not 1 <= dim <= MAX_DIM:
            raise UsageError(f"sparse_table({name!r}, dim={dim!r}): expected a whole number from 1 to {MAX_DIM}")
        spec = self._spec(name, "sparse", update, initializer, seed, dim=int(dim))
        table = self._declare(spec)
        assert isinstance(table, SparseTable)
        return table

    def dense_table(
        self,
        name: str,
        *,
        size: int,
        update: UpdateRule,
        initializer: Initializer | None = None,
        seed: int = 0,
    ) -> DenseTable:
        """Declare a dense table: `size` float32 with keys 0 to size - 1, there at once. Raises as sparse_table."""
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise UsageError(f"dense_table({name!r}, size={size!r}): expected a positive whole number")
        spec = self._spec(name, "dense", update, initializer, seed, size=int(size))
        table = self._declare(spec)
        assert isinstance(table, DenseTable)
        return table

    def _spec(
        self, name: str, kind: str, update: UpdateRule, initializer: Initializer | None, seed: int, **shape: int
    ) -> TableSpec:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise UsageError(f"a table's name is 1 to {MAX_NAME} printable characters, {name!r} was given")
        if not isinstance(update, UpdateRule):
            raise UsageError(f"update={update!r}: expected an update rule such as paceline.SGD(lr=0.1)")
        initializer = Zeros() if initializer is None else initializer
        if not isinstance(initializer, Initializer):
            raise UsageError(f"initializer={initializer!r}: expected one such as paceline.Uniform(low=-0.1, high=0.1)")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise UsageError(f"seed={seed!r}: expected a whole number")
        return TableSpec(
            name=name,
            kind=kind,
            update=to_fields(update),
            initializer=to_fields(initializer),
            seed=int(seed) % 2**63,
            **shape,
        )

    def _declare(self, spec: TableSpec) -> SparseTable | DenseTable:
        with self._lock:
            # As it looks after the journey, where tuples are lists: so that equal specs compare equal.
            spec = msgspec.msgpack.decode(messages.encode(spec), type=known(TableSpec))
            number = self.link.call(messages.DeclareTable(spec=spec), TableNumber)
            declared = self._tables.get(spec.name)
            if declared is not None:
                return declared
            self.call_all(messages.CreateTable(number=number, spec=spec))
            table = SparseTable(self, number, spec) if spec.kind == "sparse" else DenseTable(self, number, spec)
            self._tables[spec.name] = table
            self._specs[number] = spec
            return table

    def tables(self) -> list[TableSpec]:
        """Return what tables the cluster has."""
        found: list[TableSpec] = self.link.call(messages.ListTables(), list[TableSpec])
        return found

    def open_table(self, spec: TableSpec) -> SparseTable | DenseTable:
        """Open a table as :meth:`tables` lists it."""
        return self._declare(spec)

    def save(self, directory: str | os.PathLike[str], **model: Any) -> None:
        """Write all tables to a directory, whole or not at all; `model` is kept in its manifest."""
        from paceline.ps.client.records import save_tables

        save_tables(self, directory, **model)

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Load the tables of a saved model, state included; return what was kept in its manifest."""
        from paceline.ps.client.records import load_tables

        return load_tables(self, directory).manifest.model

    # Statistics and end.

    def statistics(self) -> list[messages.ServerStatistics]:
        """Return the statistics of every server, by rank."""
        with self._lock:
            answers = self.call_all(messages.GetStatistics(), messages.ServerStatistics)
            ranks = [connection.rank for connection in self._connections]
        return [answer for _, answer in sorted(zip(ranks, answers, strict=True), key=lambda each: each[0])]

    def byte_counts(self) -> tuple[int, int]:
        """Return the bytes received from and sent to the servers so far."""
        counts = [connection.byte_counts() for connection in self._connections]
        received, sent = self._gone_bytes
        return received + sum(count[0] for count in counts), sent + sum(count[1] for count in counts)

    def abort(self) -> None:
        """Give up what is in flight, in whatever thread: it raises there, and so does every call from now on.

        :meth:`close` is still to come, and has nothing to wait for.
        """
        self._watch.fail(UsageError("this client was closed before the server's answer came"))
        for connection in self._connections:
            connection.abort()

    def close(self) -> None:
        """Finish what is in flight and leave the cluster. Idempotent; nothing in a forked child."""
        if isinstance(self._lock, NoLock):
            return
        self._is_closing = True
        try:
            with self._lock:
                for connection in self._connections:
                    connection.patience_s = min(self._reconnect_s, self._timeout_s)
                for _ in range(len(self._connections) + 1):  # one that is lost is no reason to give up the others
                    try:
                        self._drain()
                        break
                    except DeadlineError:
                        break
                    except PacelineError:  # who wanted to know has waited or called flush()
                        pass
        finally:
            for connection in self._connections:
                connection.close()
            self._connections = []
            self._watch.fail(UsageError("this client is closed: connect again"))
            self.link.close()
            with self._settling_lock:
                settling = self._settling
            if settling is not None and settling is not threading.current_thread():
                settling.join(10.0)

    def disown(self) -> None:
        """Leave everything to the parent of this process, which has been forked."""
        self._lock = NoLock()

    def __enter__(self) -> Client:
        """Return itself; it is closed at the end of the block.

        A block that ends well waits, as :meth:`retire` does, until what was pushed is acknowledged, and what was pushed
        with a tick is safe; it raises the first failure. One that ends by an exception waits for no other worker.
        """
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self.close()

    def _finish(self) -> None:
        with self._lock:
            if self._failures or any(each.is_busy or each.kept for each in self._connections):
                self._drain()
                self._wait_durable()

    # For the tables.

    @property
    def lock(self) -> threading.RLock | NoLock:
        """Held while a request is made or awaited."""
        return self._lock

    @property
    def connections(self) -> list[ServerConnection]:
        """One per server, those of `server_ranks` in that order first; by the newest map."""
        if self._watch.is_unsettled:
            self.settle()
        if not self._connections:
            if self._routes.lost and not self._is_closing:
                raise self._routes.loss()
            raise UsageError("this client is closed: connect again")
        return self._connections

    @property
    def server_ranks(self) -> tuple[int, ...]:
        """The ranks of the servers that lead buckets, rising."""
        return self._routes.server_ranks

    @property
    def owners(self) -> npt.NDArray[np.int32]:
        """Bucket → position in `connections` of the server that leads it."""
        return self._routes.owners

    @property
    def routes(self) -> Routes:
        """The map that `connections` are of."""
        return self._routes

    def check_there(self, buckets: Buckets) -> None:
        """Raise ConnectionLostError if some of these buckets are lost."""
        if buckets & self._routes.lost:
            raise self._routes.loss()

    def call_all(self, message: msgspec.Struct, result: Any = Any) -> list[Any]:
        """Send a control message to every server of the newest map; return the answers, as `connections` are.

        Each is decoded as `result`.
        """
        results: dict[int, Any] = {}

        def call_rest() -> list[Any]:
            while True:
                connections = self.connections
                rest = [each for each in connections if each.incarnation not in results]
                if not rest:
                    return [results[each.incarnation] for each in connections]
                results[rest[0].incarnation] = rest[0].call(message, result)[0]

        with self._lock:
            return self.retry(call_rest)

    def retry(self, function: Callable[[], _Result]) -> _Result:
        """Call a function until no server says any more that the map is an old one; with the lock held."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            version = self._routes.version
            try:
                return function()
            except StaleEpochError:
                self._watch.wait_newer(version, deadline - time.monotonic())
                self.settle()

    def tick_flag(self) -> int:
        """Return the flag of a push that ends the iteration. Raises UsageError if this client takes no part in them."""
        if not self._counts:
            what = "this worker has retired: call join() first" if self.role == "worker" else "an observer cannot tick"
            raise UsageError(f"{what}; it takes no part in the iterations")
        return TICKS

    def next_sequence(self) -> int:
        """Return the number of the next push."""
        self._sequence += 1
        return self._sequence

    def last_sequence(self) -> int:
        """Return the number of the last push, which pulls behind it bear."""
        return self._sequence

    def ticked_by_push(self) -> None:
        """Note that a push ended the iteration."""
        self._clock += 1

    # The map.

    def settle(self) -> None:
        """Work by the newest map: connect to its servers, and send again what is not answered.

        Waits for one if a server says that there is one. Raises DeadlineError if it does not come.
        """
        with self._lock:
            while not self._is_closing or self._connections:
                self._watch.is_unsettled = False
                newest = self._watch.newest
                try:
                    if newest is not None and newest.version > self._routes.version:
                        self._change(newest)
                    elif any(connection.is_stuck for connection in self._connections):
                        self._watch.wait_newer(self._routes.version, self._patience_s())
                    else:
                        return
                except BaseException:
                    self._watch.is_unsettled = True
                    raise

    def _patience_s(self) -> float:
        return min(self._reconnect_s, self._timeout_s) if self._is_closing else self._timeout_s

    def _make_connection(self, server: messages.MemberInfo) -> ServerConnection:
        assert isinstance(server.endpoint, Endpoint)
        return ServerConnection(
            self._transport,
            server.endpoint,
            self._hello,
            rank=server.rank,
            incarnation=server.incarnation,
            timeout_s=self._timeout_s,
            reconnect_s=self._reconnect_s,
            watch=self._watch,
            settle=self.settle,
            failures=self._failures,
            copies=self._copies,
        )

    def _change(self, routes: Routes) -> None:
        """Send again what is not answered, by other routes. Waits for no server."""
        before = self._connections
        known = {connection.incarnation: connection for connection in before}
        connections = []
        for server in routes.servers:
            connection = known.pop(server.incarnation, None)
            if connection is None:
                connection = self._make_connection(server)
                with contextlib.suppress(PacelineError):  # whoever waits for it tries again
                    connection.connect(min(self._timeout_s, _CONNECT_S))
            connection.version = routes.version
            connections.append(connection)
        old, self._routes, self._connections = self._routes, routes, connections
        after = {connection.incarnation: connection for connection in connections}
        send_rest = send_again(old, routes, before, after, self._specs)
        self._keep()
        if self.role == "worker":
            for connection in connections:
                connection.say_synced(self._clock, self._counts, self.rank)
        for connection in known.values():
            received, sent = connection.byte_counts()
            self._gone_bytes = [self._gone_bytes[0] + received, self._gone_bytes[1] + sent]
            connection.close()
        send_rest()

    def _take_map(self, cluster: messages.ClusterMap) -> None:
        """Take a map; in the thread of the line to the scheduler, or in that which registers."""
        if not self._watch.take(cluster):
            return
        for connection in self._connections:
            if not self._watch.has(connection.incarnation):
                connection.wake()
        if not self._connections or self._is_closing:
            return
        # Who is at work looks before every request; servers are not to wait for one who is busy elsewhere.
        with self._settling_lock:
            if self._settling is None:
                self._settling = threading.Thread(target=self._settle_aside, name="paceline-settling", daemon=True)
                self._settling.start()

    def _settle_aside(self) -> None:
        with self._lock:
            with self._settling_lock:
                self._settling = None
            if self._is_closing:
                return
            with contextlib.suppress(PacelineError):  # who uses the client next is told
                if self._watch.is_newer_than(self._routes.version):
                    self.settle()
                for connection in list(self._connections):
                    connection.revive()

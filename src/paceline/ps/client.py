"""A worker's client: tables by name, iterations, all servers at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from paceline.errors import PacelineError, UsageError
from paceline.protocol import NUM_BUCKETS, Consistency, parse_consistency, place
from paceline.ps import messages
from paceline.ps.connection import ServerConnection
from paceline.ps.dense_table import DenseTable
from paceline.ps.messages import TICK, TICKS, TableSpec
from paceline.ps.rules import Initializer, UpdateRule, Zeros, to_fields
from paceline.ps.scheduler_link import SchedulerLink
from paceline.ps.sparse_table import SparseTable
from paceline.transport import Address, Endpoint, Hello, Transport

MAX_NAME = 200


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
        on_notice: Callable[[msgspec.Struct], None] | None = None,
    ) -> None:
        role = "observer" if observer else "worker"
        self.role = role
        self._lock = threading.RLock()
        self._connections: list[ServerConnection] = []
        self._tables: dict[str, SparseTable | DenseTable] = {}
        self._clock = 0
        self._sequence = 0
        self._counts = False
        node = make_node_name(role)
        self.link = SchedulerLink(
            transport, scheduler, Hello(role=role, name=node), timeout_s=timeout_s, on_notice=on_notice
        )
        try:
            welcome = self.link.register(messages.Register(node=node, role=role, rank=rank))
            self.rank = welcome.rank
            self.incarnation = welcome.incarnation
            self.consistency: Consistency = parse_consistency(welcome.settings.consistency)
            servers = self.link.wait_servers(timeout_s)
            self.server_ranks = tuple(server.rank for server in servers)
            hello = Hello(
                role=role,
                rank=self.rank,
                incarnation=self.incarnation,
                name=node,
                extra={"timeout_ms": int(timeout_s * 1000)},
            )
            for server in servers:
                assert isinstance(server.endpoint, Endpoint)
                connection = ServerConnection(
                    transport, server.endpoint, hello, rank=server.rank, timeout_s=timeout_s, reconnect_s=reconnect_s
                )
                self._connections.append(connection)
            self.placement = place(NUM_BUCKETS, self.server_ranks)
            position = {rank: i for i, rank in enumerate(self.server_ranks)}
            self.owners = np.array([position[self.placement.primary(b)] for b in range(NUM_BUCKETS)], np.int32)
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
            for connection in self.connections:
                connection.raise_failures()
            for connection in self.connections:
                connection.send(TICK, 0, 0, self._clock, 0, ())
            self._clock += 1

    def retire(self) -> None:
        """Stop taking part in the iterations for now: nobody waits for this worker until it calls :meth:`join`.

        What it pushed without a tick is dropped under sequential consistency. Until then it reads and writes as an
        observer does: at once.
        """
        with self._lock:
            for connection in self.connections:
                connection.drain()
                connection.call(messages.Retire())
            self._counts = False

    def join(self) -> None:
        """Take part in the iterations (again), from the one at which the others are."""
        if self.role != "worker":
            raise UsageError("an observer takes no part in the iterations: connect without observer=True")
        with self._lock:
            clock = self._clock
            while True:  # servers may differ for a moment: the latest one counts
                request = messages.JoinClock(rank=self.rank, clock=clock)
                joins = [connection.call(request)[0] for connection in self.connections]
                if all(joined == clock for joined in joins):
                    break
                clock = max(joins)
            self._clock = clock
            self._counts = True

    def flush(self) -> None:
        """Wait until every push is acknowledged; raise the first failure."""
        with self._lock:
            for connection in self.connections:
                connection.drain()

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
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not 1 <= dim <= 1 << 16:
            raise UsageError(f"sparse_table({name!r}, dim={dim!r}): expected a whole number from 1 to 65536")
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
            spec = msgspec.msgpack.decode(messages.encode(spec), type=TableSpec)
            number = self.link.call(messages.DeclareTable(spec=spec), int)
            known = self._tables.get(spec.name)
            if known is not None:
                return known
            for connection in self.connections:
                connection.call(messages.CreateTable(number=number, spec=spec, servers=self.server_ranks))
            table = SparseTable(self, number, spec) if spec.kind == "sparse" else DenseTable(self, number, spec)
            self._tables[spec.name] = table
            return table

    def tables(self) -> list[TableSpec]:
        """Return what tables the cluster has."""
        found: list[TableSpec] = self.link.call(messages.ListTables(), list[TableSpec])
        return found

    def open_table(self, spec: TableSpec) -> SparseTable | DenseTable:
        """Open a table as :meth:`tables` lists it."""
        return self._declare(spec)

    def save(self, directory: str | os.PathLike[str], **model: Any) -> None:
        """Write all tables to a directory, whole or not at all; `model` is kept in its manifest. See ps.saving."""
        from paceline.ps.saving import save_tables

        save_tables(self, directory, **model)

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Load the tables of a saved model, state included; return what was kept in its manifest."""
        from paceline.ps.saving import load_tables

        return load_tables(self, directory).manifest.model

    # Statistics and end.

    def statistics(self) -> list[messages.ServerStatistics]:
        """Return the statistics of every server, by rank."""
        with self._lock:
            answers = [connection.call(messages.GetStatistics())[0] for connection in self.connections]
        return [msgspec.convert({**answer}, messages.ServerStatistics) for answer in answers]

    def byte_counts(self) -> tuple[int, int]:
        """Return the bytes received from and sent to the servers so far."""
        counts = [connection.byte_counts() for connection in self._connections]
        return sum(count[0] for count in counts), sum(count[1] for count in counts)

    def abort(self) -> None:
        """Give up what is in flight, in whatever thread: it raises there, and so does every call from now on.

        :meth:`close` is still to come, and has nothing to wait for.
        """
        for connection in self._connections:
            connection.abort()

    def close(self) -> None:
        """Finish what is in flight and leave the cluster. Idempotent."""
        try:
            with self._lock:
                for connection in self._connections:
                    with contextlib.suppress(PacelineError):  # who wanted to know has waited or called flush()
                        connection.drain()
        finally:
            for connection in self._connections:
                connection.close()
            self._connections = []
            self.link.close()

    def __enter__(self) -> Client:
        """Return itself; the connection is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For the tables.

    @property
    def lock(self) -> threading.RLock:
        """Held while a request is made or awaited."""
        return self._lock

    @property
    def connections(self) -> list[ServerConnection]:
        """One per server, in the order of `server_ranks`."""
        if not self._connections:
            raise UsageError("this client is closed: connect again")
        return self._connections

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

    def ticked_by_push(self) -> None:
        """Note that a push ended the iteration."""
        self._clock += 1

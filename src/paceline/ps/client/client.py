"""The client of workers and observers: tables, iterations, and connections to all servers."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from typing_extensions import override

from paceline.errors import PeerError, UsageError
from paceline.filters.base import Filter
from paceline.observe.notebooks import NotebookTable
from paceline.protocol import Consistency, Role, Sequential, parse_consistency
from paceline.protocol.client import ClientCore
from paceline.ps import messages
from paceline.ps.client.dense_table import DenseTable
from paceline.ps.client.exchange import DataRequest
from paceline.ps.client.filtered import TableFilters
from paceline.ps.client.following import ViewFollower
from paceline.ps.client.servers import Servers
from paceline.ps.client.sparse_table import SparseTable
from paceline.ps.forked import NoLock
from paceline.ps.messages import KnownTable, TableSpec
from paceline.ps.scheduler.link import LinkHooks, SchedulerLink
from paceline.tables.bounds import Clock
from paceline.tables.initializers import Initializer, Zeros
from paceline.tables.rules import UpdateRule
from paceline.tables.settings import to_fields, whole_number
from paceline.tables.spec import MAX_DIM, MAX_NAME
from paceline.transport import Address, Hello, Transport, register_type


def make_node_name(role: str) -> str:
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class Client(NotebookTable):
    """One process's access to a cluster's tables. ``cluster.connect()`` creates a client.

    A *worker* takes part in the iterations: servers wait for its :meth:`tick` according to the cluster's consistency.
    An *observer* only reads and writes. Several threads may call methods; they run one at a time.

    Any method may raise DeadlineError if an answer does not come within `timeout_s`, and ConnectionLostError if a
    server was lost.
    """

    def __init__(
        self, link: SchedulerLink, welcome: messages.Welcome, servers: Servers, follower: ViewFollower
    ) -> None:
        self.link = link
        self.servers = servers
        self.role = "worker" if servers.core.is_worker else "observer"
        self.rank = welcome.rank
        self.incarnation = welcome.incarnation
        self.settings: messages.ClusterSettings = welcome.settings
        self.consistency: Consistency = parse_consistency(welcome.settings.consistency)
        self._tables: dict[str, SparseTable | DenseTable] = {}
        self.follower = follower

    @classmethod
    def connect(
        cls,
        transport: Transport,
        scheduler: Address | str,
        *,
        observer: bool = False,
        rank: int | None = None,
        timeout_s: float = 60.0,
        reconnect_s: float = 3.0,
        scheduler_reconnect_s: float = 60.0,
        on_notice: Callable[[msgspec.Struct], None] | None = None,
    ) -> Client:
        """Register at a scheduler, connect to its servers and, except as an observer, join the iterations."""
        role = "observer" if observer else "worker"
        hello = Hello(role=role, name=make_node_name(role))
        follower = ViewFollower()

        def receive_notice(notice: msgspec.Struct) -> None:
            if isinstance(notice, messages.View):
                follower.take(notice)
            elif isinstance(notice, messages.Ended):
                follower.watch.end()
            elif isinstance(notice, messages.Expelled):
                follower.fail(PeerError(f"this {role} was declared dead: {notice.reason}; connect again"))
            if on_notice is not None:
                on_notice(notice)

        link = SchedulerLink(
            transport,
            scheduler,
            hello,
            timeout_s=timeout_s,
            reconnect_s=scheduler_reconnect_s,
            hooks=LinkHooks(receive_notice, follower.watch.fail, on_beat=follower.check_connections),
        )
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            welcome = link.register(messages.Register(node=hello.name, role=Role(role), rank=rank), timeout_s=timeout_s)
            is_sequential = isinstance(parse_consistency(welcome.settings.consistency), Sequential)
            core = ClientCore(is_worker=not observer, is_sequential=is_sequential)
            hello = Hello(
                role=role,
                rank=welcome.rank,
                incarnation=welcome.incarnation,
                name=hello.name,
                extra={"timeout_ms": int(timeout_s * 1000)},
                to="server",
                cluster=welcome.settings.cluster,
            )
            servers = Servers(transport, hello, core, follower.watch, timeout_s=timeout_s, reconnect_s=reconnect_s)
            client = cls(link, welcome, servers, follower)
            undo.callback(client.close)
            servers.open(bool(welcome.settings.replicas))
            follower.servers = servers
            if not observer:
                client.join()
            undo.pop_all()
        return client

    def __repr__(self) -> str:
        rows = self.described_rows()
        tables = f", tables {rows['tables']}" if rows["tables"] else ""
        return "<Client: {role} of {scheduler}, {servers}, {consistency}".format(**rows) + f"{tables}>"

    @override
    def described_rows(self) -> dict[str, Any]:
        identity = f"worker {self.rank}" if self.role == "worker" else self.role
        servers = len(self.servers.routes.server_ranks)
        where = "closed" if self.servers.is_closed else f"{servers} server{'' if servers == 1 else 's'}"
        return {
            "role": identity,
            "scheduler": self.link.address,
            "servers": where,
            "consistency": self.consistency,
            "tables": ", ".join(self._tables),
        }

    @property
    def clock(self) -> int:
        """The number of the current iteration, which is also the number of finished iterations."""
        return self.servers.core.clock

    def tick(self) -> None:
        """End this worker's iteration: later pushes and reads belong to the next iteration.

        This method does not wait for the servers. Raises the error of an earlier push if the caller has not waited for
        this push, and UsageError if this client does not take part in the iterations.
        """
        servers = self.servers
        with servers.lock:
            servers.check_may_tick()
            servers.raise_failures()
            for connection in servers.connections:
                connection.send(DataRequest(clock=servers.core.clock))
            servers.core.tick()

    def retire(self) -> None:
        """Stop taking part in the iterations: servers do not wait for this worker until it calls :meth:`join`.

        Until then this worker reads and writes like an observer, without waiting. Under sequential consistency its
        pushes of the unfinished iteration are dropped. If the cluster has replicas, the call waits until the pushes of
        finished iterations are on all servers of their chains.
        """
        servers = self.servers
        with servers.lock:
            servers.drain()
            if servers.core.takes_part:
                servers.wait_stable()
            servers.execute(servers.core.retire())
            servers.call_all(messages.Retire())

    def join(self, clock: int = 0) -> None:
        """Join or rejoin the iterations at the other workers' current iteration, or at `clock` if that is later."""
        if self.role != "worker":
            raise UsageError("an observer cannot take part in the iterations: connect without observer=True")
        servers, core = self.servers, self.servers.core

        def request_remaining() -> None:
            while core.is_joining:
                servers.newest()  # first apply a new view, because this repeats the requests to join
                request = servers.join_requests.pop(0)
                connection = next(found for found in servers.connections if found.session.server == request.server)
                clock = connection.call(messages.JoinClock(rank=self.rank, clock=request.clock), Clock)[0]
                servers.newest()
                servers.execute(core.joined(request.server, request.round, clock))

        with servers.lock:
            servers.newest()
            servers.execute(core.join(clock))
            try:
                servers.retry(request_remaining)
            finally:
                core.stop_joining()

    def flush(self) -> None:
        """Wait until every push is acknowledged; raise the first error."""
        with self.servers.lock:
            self.servers.drain()

    def sparse_table(
        self,
        name: str,
        *,
        dim: int = 1,
        update: UpdateRule,
        initializer: Initializer | None = None,
        seed: int = 0,
        filters: Sequence[Filter] = (),
        pull_filters: Sequence[Filter] | None = None,
    ) -> SparseTable:
        """Declare a sparse table: uint64 key → row of `dim` float32.

        Every process declares it with the same settings. A row exists from its first push. Before its first push, a
        read returns the values of `initializer` (default zeros), which depend only on `seed` and key. Raises
        TableMismatchError if the table exists with other settings.

        `filters` (:mod:`paceline.filters`) encode this client's pushes and pulls, and `pull_filters` the returned
        values (default: the filters for values and bytes in `filters`). Raises UsageError if a server does not have the
        same version of a filter.
        """
        dim = whole_number(f"sparse_table({name!r}, dim={dim!r})", dim, 1, MAX_DIM)
        spec = make_spec(name, "sparse", update, initializer, seed, dim=dim)
        table = self.open_table(spec, TableFilters(filters, pull_filters))
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
        filters: Sequence[Filter] = (),
        pull_filters: Sequence[Filter] | None = None,
    ) -> DenseTable:
        """Declare a dense table: `size` float32 with keys 0 to size - 1, which all exist from the start.

        Other arguments and errors are those of :meth:`sparse_table`. Filters for values and bytes are allowed and, for
        pushes and pulls by key, :class:`~paceline.filters.KeyCaching` and :class:`~paceline.filters.KeyNumbers`.
        """
        size = whole_number(f"dense_table({name!r}, size={size!r})", size, 1)
        spec = make_spec(name, "dense", update, initializer, seed, size=size)
        table = self.open_table(spec, TableFilters(filters, pull_filters, is_dense=True))
        assert isinstance(table, DenseTable)
        return table

    def tables(self) -> list[TableSpec]:
        """Return the specifications of the cluster's tables."""
        found: list[TableSpec] = self.link.call(messages.ListTables(), list[TableSpec])
        return found

    def open_table(self, spec: TableSpec, filters: TableFilters | None = None) -> SparseTable | DenseTable:
        """Open a table from its specification in :meth:`tables`."""
        if not isinstance(spec, TableSpec):
            raise UsageError(f"open_table({spec!r}): expected an element of client.tables()")
        servers, filters = self.servers, filters or None
        if filters is not None:
            filters.check_fits(spec)
        with servers.lock:
            # Encode and decode the spec, because decoded specs have lists in place of tuples.
            spec = msgspec.msgpack.decode(messages.encode(spec), type=register_type(TableSpec))
            known = self.link.call(messages.DeclareTable(spec=spec), KnownTable)
            declared = self._tables.get(spec.name)
            if declared is not None:
                if filters is not None and not filters.are(declared.filters):
                    raise UsageError(
                        f"this client opened table {spec.name!r} with other filters: pass the same filters or none, or "
                        "change them with table.set_filters(...)"
                    )
                return declared
            if filters is not None:
                servers.call_all(messages.CheckFilters(filters=filters.info))
            servers.call_all(messages.CreateTable(table=known))
            kind = SparseTable if spec.kind == "sparse" else DenseTable
            table: SparseTable | DenseTable = kind(self, known.number, known.spec, filters)
            self._tables[spec.name] = table
            servers.specs[known.number] = known.spec
            return table

    def save(self, directory: str | os.PathLike[str], **model: Any) -> None:
        """Write all tables to a directory atomically; `model` is stored in the directory's manifest."""
        from paceline.ps.client.records import save_tables

        _check_directory("save", directory)
        save_tables(self, directory, **model)

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Load the tables of a saved model with their state; return the `model` from its manifest."""
        from paceline.ps.client.records import load_tables

        _check_directory("load", directory)
        return load_tables(self, directory).manifest.model

    def statistics(self) -> list[messages.ServerStatistics]:
        """Return the statistics of every server, in the order of their ranks."""
        return list(self.statistics_by_rank().values())

    def statistics_by_rank(self) -> dict[int, messages.ServerStatistics]:
        """Return the statistics of every server by its rank, in this order."""
        with self.servers.lock:
            answers = self.servers.call_all(messages.GetStatistics(), messages.ServerStatistics)
            ranks = [connection.rank for connection in self.servers.connections]
        return dict(sorted(zip(ranks, answers, strict=True), key=lambda pair: pair[0]))

    def byte_counts(self) -> tuple[int, int]:
        """Return the bytes received from and sent to the servers so far."""
        return self.servers.byte_counts()

    def abort(self) -> None:
        """Make waiting calls in other threads, and all later calls, raise an error.

        After this, :meth:`close` does not wait.
        """
        self.servers.abort()

    def close(self) -> None:
        """Finish requests in flight and leave the cluster. Idempotent. Has no effect in a forked child."""
        if isinstance(self.servers.lock, NoLock):
            return
        try:
            self.servers.close()
        finally:
            self.link.close()
            self.follower.close()

    def __enter__(self) -> Client:
        """Return the client; the end of the block closes it.

        Without an exception, the end of the block waits until all pushes are acknowledged, and, like :meth:`retire`,
        until the pushes of finished iterations are on all servers of their chains. The end of the block raises the
        first error. After an exception in the block, the end does not wait for other workers.
        """
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        servers = self.servers
        try:
            if kind is None:
                with servers.lock:
                    if servers.core.has_unfinished:
                        servers.drain()
                        servers.wait_stable()
        finally:
            self.close()


def _check_directory(method: str, directory: object) -> None:
    if not isinstance(directory, (str, os.PathLike)):
        raise UsageError(f"{method}({directory!r}): expected the path of a directory")


def make_spec(
    name: str, kind: str, update: UpdateRule, initializer: Initializer | None, seed: int, **shape: int
) -> TableSpec:
    """Return the specification of a table; raises UsageError for an invalid argument."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise UsageError(f"table name {name!r}: expected 1 to {MAX_NAME} printable characters")
    if not isinstance(update, UpdateRule):
        raise UsageError(f"update={update!r}: expected an update rule such as paceline.SGD(lr=0.1)")
    initializer = Zeros() if initializer is None else initializer
    if not isinstance(initializer, Initializer):
        raise UsageError(f"initializer={initializer!r}: expected an initializer such as paceline.Zeros()")
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

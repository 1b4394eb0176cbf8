"""A client's sparse table: push and pull by key, each key on the server that owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.filters.chance import seed_of
from paceline.kernels.dedup import put_rows, split, take_keys, take_rows
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.bounds import Natural
from paceline.protocol.client import Request
from paceline.ps import messages
from paceline.ps.client.connection import ServerConnection
from paceline.ps.client.exchange import DataRequest
from paceline.ps.client.filtered import FilteredSender, TableFilters
from paceline.ps.client.records import Positions, call_owners
from paceline.ps.client.servers import Ticket
from paceline.ps.client.table import Table
from paceline.ps.messages import EXACT, PULL, PUSH, PUSH_PULL, TICKS
from paceline.tables.bounds import MAX_PASS, MAX_PASSES
from paceline.tables.bucket_arrays import buckets_of_keys
from paceline.tables.settings import whole_number
from paceline.tables.types import Floats, Keys

_MAX_AHEAD = (1 << 31) - 1
_NO_GRADS = np.empty(0, np.float32)


class SparseTable(Table):
    """Rows of `dim` float32, each with a uint64 key, on several servers. Declared by ``client.sparse_table``."""

    is_count = False
    """Whether this object pushes counts: servers neither drop nor compensate stale pushes of counts."""

    @property
    def dim(self) -> int:
        """Values per row."""
        return self.spec.dim

    def push(
        self, keys: npt.ArrayLike, grads: npt.ArrayLike, *, tick: bool = False, assume_unique: bool = False
    ) -> Ticket:
        """Send gradients; the servers apply the table's update rule once per key.

        `keys`: uint64 [n], any order; gradients of equal keys are summed. `grads`: float32 [n, dim] (or [n] if dim is
        1), all finite. `tick` ends the iteration with this push, as :meth:`Client.tick` does. `assume_unique` skips
        the search for equal keys. Returns immediately; do not change the arrays until the ticket is done.

        Raises UsageError for a wrong dtype or shape, and NonFiniteError for NaN or Inf, before anything is sent.
        """
        with self._servers.lock:
            distinct, flat, _ = self._prepare_push(keys, grads, assume_unique)
            if self.filters is not None:
                distinct, flat = self._choose_rows(self.filters, distinct, flat)
            return self._send_by_key(PUSH, distinct, flat, None, ticks=tick)

    def pull(self, keys: npt.ArrayLike, out: Floats | None = None, *, assume_unique: bool = False) -> Floats:
        """Return the values of `keys` (uint64 [n]) as float32 [n, dim], in `out` if given.

        Waits until the iteration may begin.
        """
        values: Floats = self.pull_async(keys, out, assume_unique=assume_unique).result()
        return values

    def pull_async(
        self, keys: npt.ArrayLike, out: Floats | None = None, *, assume_unique: bool = False, ahead: int = 0
    ) -> Ticket:
        """Request values; ``ticket.result()`` waits and returns them as :meth:`pull` does.

        With `ahead`, the values are those of the iteration that comes `ahead` iterations after the current one. So the
        worker can compute during the round trip, but the values may lack this worker's own last pushes. Raises
        UsageError if `ahead` exceeds τ, the maximum delay of the cluster's consistency.
        """
        with self._servers.lock:
            if type(ahead) is not int or ahead:
                ahead = self._check_ahead(ahead)
            checked = self._check_keys(keys)
            out = self._check_out(out, len(checked), self.dim)
            if not len(checked):
                return Ticket(self._servers, [], lambda: out)
            distinct, inverse = (checked, None) if assume_unique else self._dedup(checked)
            if self.filters is not None:
                distinct, _, inverse = self.filters.order(distinct, _NO_GRADS, self.dim, inverse)
            return self._send_read(PULL, distinct, inverse, None, out, False, ahead)

    def push_pull(
        self, keys: npt.ArrayLike, grads: npt.ArrayLike, out: Floats | None = None, *, tick: bool = False,
        assume_unique: bool = False,
    ) -> Floats:  # fmt: skip
        """Push gradients and read the values of the same keys in one message.

        With `tick`, the read is of the next iteration. Under sequential consistency a gradient changes the values only
        in the next iteration.
        """
        ticket = self.push_pull_async(keys, grads, out, tick=tick, assume_unique=assume_unique)
        values: Floats = ticket.result()
        return values

    def push_pull_async(
        self, keys: npt.ArrayLike, grads: npt.ArrayLike, out: Floats | None = None, *, tick: bool = False,
        assume_unique: bool = False,
    ) -> Ticket:  # fmt: skip
        """Start a :meth:`push_pull` without waiting."""
        with self._servers.lock:
            distinct, flat, inverse = self._prepare_push(keys, grads, assume_unique)
            out = self._check_out(out, len(distinct) if inverse is None else len(inverse), self.dim)
            if self.filters is not None:
                distinct, flat, inverse = self.filters.order(distinct, flat, self.dim, inverse)
            return self._send_read(PUSH_PULL, distinct, inverse, flat, out, tick)

    def erase(self, keys: npt.ArrayLike) -> int:
        """Erase rows, as if they had never been pushed; return the number of erased rows.

        The number may be too low if the view changes during the call.
        """
        with self._servers.lock:
            self._client.flush()
            checked, erased = self._check_keys(keys), 0
            sequence = self._servers.core.next_sequence()
            message = messages.Erase(table=self._number)

            def erase(connection: ServerConnection, chosen: Positions) -> None:
                nonlocal erased
                erased += connection.call(message, Natural, (checked[chosen],), sequence=sequence)[0]

            call_owners(self._client, self.spec, checked, erase)
            return erased

    def begin_pass(self, number: int, rows_of: int | None = None) -> None:
        """Start pass `number` (from 1) over the data: later pushes of all workers count for this pass.

        All pushes of the previous pass must have arrived. At the first call, existing rows count as last pushed in pass
        `rows_of` (default: the previous pass). Snapshots, and servers that replace dead servers, get each row's last
        pass; saved models do not contain it. Pass numbers are at most 2^24 and stored modulo 63, so increase `number`
        by 1 each time. A row without a push for 63 passes counts as pushed in the current pass, unless it was erased.
        """
        number = whole_number(f"begin_pass({number!r})", number, 1, MAX_PASS)
        former = number - 1
        if rows_of is not None:
            former = whole_number(f"begin_pass({number}, rows_of={rows_of!r})", rows_of, 0, MAX_PASS)
        self._flush_filtered()
        message = messages.BeginPass(table=self._number, number=number, rows_of=former)
        with self._servers.lock:
            self._servers.call_all(message)

    def erase_unseen(self, passes: int, *, also: Sequence[SparseTable] = ()) -> int:
        """Erase the rows without a push in this pass and the `passes` - 1 passes before; return their number.

        :meth:`begin_pass` sets the current pass; without it nothing is erased. Rows of the tables `also` with the same
        keys are erased too, even if they were pushed recently. No worker may push during the call. Call this at least
        once in 63 - `passes` passes; otherwise some rows are not erased (see :meth:`begin_pass`).
        """
        passes = whole_number(f"erase_unseen({passes!r})", passes, 1, MAX_PASSES)
        is_list = isinstance(also, Sequence) and all(isinstance(table, SparseTable) for table in also)
        if not is_list or any(table._client is not self._client for table in also):
            raise UsageError(f"erase_unseen({passes}, also={also!r}): expected a list of sparse tables of this client")
        self._flush_filtered()
        erased = 0
        for bucket in range(NUM_BUCKETS):
            numbers = tuple(table._number for table in also)
            message = messages.EraseUnseen(table=self._number, bucket=bucket, passes=passes, also=numbers)
            with self._servers.lock:
                sequence = self._servers.core.next_sequence()
                erased += self._servers.retry(partial(self._call_owner, bucket, message, sequence))
        return erased

    def _call_owner(self, bucket: int, message: messages.EraseUnseen, sequence: int) -> int:
        answer: int = self._servers.owner_of(bucket).call(message, Natural, sequence=sequence)[0]
        return answer

    def __len__(self) -> int:
        """Return the number of rows on all servers."""
        self._flush_filtered()
        return sum(server.tables[self.name].rows for server in self._client.statistics())

    def _check_ahead(self, ahead: int) -> int:
        tau = self._client.consistency.tau
        ahead = whole_number(f"ahead={ahead!r}", ahead, 0, _MAX_AHEAD)
        if tau is not None and ahead > tau:
            raise UsageError(
                f"ahead={ahead}: under {self._client.consistency} consistency a worker may read 0 to {tau} iterations "
                "ahead of its own pushes"
            )
        return ahead

    def _prepare_push(
        self, keys: npt.ArrayLike, grads: npt.ArrayLike, assume_unique: bool
    ) -> tuple[Keys, Floats, npt.NDArray[np.int32] | None]:
        checked, dim = self._check_keys(keys), self.dim
        flat = self._check_grads(grads, len(checked), dim)
        return (checked, flat, None) if assume_unique else self._sum_equal(checked, flat, dim)

    def _choose_rows(self, filters: TableFilters, keys: Keys, grads: Floats) -> tuple[Keys, Floats]:
        """Return the keys and gradients that the row filters select, in the order of transmission."""
        core = self._servers.core
        if filters.requests.rows:
            seed = seed_of(self._client.rank, core.clock, core.sequence, self._number)
            keys, grads = filters.choose(keys, grads, self.spec, core.clock, seed)
        return filters.order(keys, grads, self.dim, None)[:2]

    def _send_read(
        self,
        kind: int,
        keys: Keys,
        inverse: npt.NDArray[np.int32] | None,
        grads: Floats | None,
        out: Floats,
        ticks: bool,
        ahead: int = 0,
    ) -> Ticket:
        values = out.reshape(-1) if inverse is None else np.empty(len(keys) * self.dim, np.float32)
        ticket = self._send_by_key(kind, keys, grads, values, ticks=ticks, ahead=ahead)
        inner, filters = ticket._finish, self.filters

        def finish() -> Floats:
            if inner is not None:
                inner()
            if filters is not None and filters.follow_weights:
                filters.record_pulled(keys, values, self.dim)
            if inverse is not None:
                take_rows(values, inverse, self.dim, out.reshape(-1))
            return out

        ticket._finish = finish
        return ticket

    def _send_by_key(
        self,
        kind: int,
        keys: Keys,
        grads: Floats | None,
        out: Floats | None,
        *,
        ticks: bool = False,
        ahead: int = 0,
    ) -> Ticket:
        """Send a request for distinct keys to the servers that own them; `grads` and `out` are flat."""
        servers = self._servers
        connections: Sequence[ServerConnection | FilteredSender] = servers.newest()
        if self.filters is not None:
            connections = self.filters.senders(servers.connections)
        if servers.routes.lost:
            servers.check_not_lost(buckets_of_keys(keys))
        flags = EXACT if self.is_count and kind == PUSH else 0
        data = servers.request(kind, self._number, flags=flags, ticks=ticks, ahead=ahead)
        data.parts, data.out = (keys,) if grads is None else (keys, grads), out
        finish: Callable[[], None] | None = None
        if len(connections) == 1:
            sent = [connections[0].send(data)]
        else:
            sent, finish = self._send_split(connections, data)
        if ticks:
            servers.core.tick()
        return Ticket(servers, sent, finish)

    def _send_split(
        self, connections: Sequence[ServerConnection | FilteredSender], data: DataRequest
    ) -> tuple[list[Request], Callable[[], None] | None]:
        """Send each server the request for its keys. The returned function copies the received values to `data.out`."""
        keys, dim, out = data.parts[0], self.dim, data.out
        order = np.empty(len(keys), np.int64)
        starts = np.empty(len(connections) + 1, np.int64)
        split(keys, self._servers.routes.owners, starts, order)
        bounds = starts.tolist()
        sent: list[Request] = []
        places: list[tuple[Floats, npt.NDArray[np.int64]]] = []
        for i, connection in enumerate(connections):
            chosen = order[bounds[i] : bounds[i + 1]]
            if not len(chosen):
                if data.flags & TICKS:
                    sent.append(connection.send(DataRequest(clock=data.clock)))
                continue
            if len(chosen) == len(keys):  # one server has all keys
                sent.append(connection.send(data))
                continue
            own_keys = np.empty(len(chosen), np.uint64)
            take_keys(keys, chosen, own_keys)
            parts: list[Any] = [own_keys]
            for grads in data.parts[1:]:
                parts.append(np.empty(len(chosen) * dim, np.float32))
                take_rows(grads, chosen, dim, parts[-1])
            own_out = None
            if out is not None:
                own_out = np.empty(len(chosen) * dim, np.float32)
                places.append((own_out, chosen))
            sent.append(connection.send(data.of_server(parts, own_out)))

        def put_all() -> None:
            for values, chosen in places:
                put_rows(values, chosen, dim, out)

        return sent, None if out is None else put_all

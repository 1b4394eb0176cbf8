"""A client's dense table: push and pull by range or by key, each bucket on the server that owns it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.protocol.buckets import bucket_set
from paceline.protocol.client import Request
from paceline.ps.client.connection import ServerConnection
from paceline.ps.client.exchange import DataRequest
from paceline.ps.client.filtered import FilteredSender, TableFilters
from paceline.ps.client.servers import Ticket
from paceline.ps.client.table import Table, TableClient
from paceline.ps.messages import PULL, PUSH, PUSH_PULL, RANGE, TableSpec
from paceline.tables.bucket_arrays import clip_runs, dense_buckets, range_buckets, runs_in
from paceline.tables.types import Floats, Keys


class DenseTable(Table):
    """A table of `size` float32 with keys 0 to size - 1, in contiguous buckets. Declared by ``client.dense_table``.

    Every method takes either a range or `keys`: ``push(grads, start=0)`` means [0, len(grads)).
    """

    def __init__(self, client: TableClient, number: int, spec: TableSpec, filters: TableFilters | None = None) -> None:
        super().__init__(client, number, spec, filters)
        self._runs: list[Sequence[tuple[int, int]]] = []  # for each server, its ranges of keys
        self._runs_of = 0  # the version of the view for which `_runs` was computed

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    def push(
        self, grads: npt.ArrayLike, *, start: int = 0, keys: npt.ArrayLike | None = None, tick: bool = False
    ) -> Ticket:
        """Send gradients (float32 [n]) for [start, start + n), or for `keys` (uint64 [n]; equal keys are summed).

        The other arguments, the result and the errors are those of :meth:`SparseTable.push`.
        """
        with self._servers.lock:
            if keys is None:
                start, stop = self._check_range(start, None, self._count(grads))
                flat = self._check_grads(grads, stop - start, 1)
                return self._send_range(PUSH, start, stop, flat, None, tick)
            distinct, flat, _ = self._prepare_keys(keys, grads)
            return self._send_dense_keys(PUSH, distinct, flat, None, None, tick)

    def pull(
        self,
        out: Floats | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        keys: npt.ArrayLike | None = None,
    ) -> Floats:
        """Return the values of [start, stop) (default: all from `start`), or of `keys`, as float32 [n]."""
        values: Floats = self.pull_async(out, start=start, stop=stop, keys=keys).result()
        return values

    def pull_async(
        self,
        out: Floats | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        keys: npt.ArrayLike | None = None,
    ) -> Ticket:
        """Request values; ``ticket.result()`` waits and returns them as :meth:`pull` does."""
        with self._servers.lock:
            if keys is not None:
                checked = self._check_dense_keys(keys)
                target = self._check_out(out, len(checked), 1).reshape(-1)
                return self._send_dense_keys(PULL, checked, None, target, None, False)
            start, stop = self._check_range(start, stop, None if out is None else np.size(out))
            target = self._check_out(out, stop - start, 1).reshape(-1)
            return self._send_range(PULL, start, stop, None, target, False)

    def push_pull(
        self, grads: npt.ArrayLike, out: Floats | None = None, *, start: int = 0, keys: npt.ArrayLike | None = None,
        tick: bool = False,
    ) -> Floats:  # fmt: skip
        """Push gradients and read the same elements in one message. With `tick`, the read is of the next iteration."""
        values: Floats = self.push_pull_async(grads, out, start=start, keys=keys, tick=tick).result()
        return values

    def push_pull_async(
        self, grads: npt.ArrayLike, out: Floats | None = None, *, start: int = 0, keys: npt.ArrayLike | None = None,
        tick: bool = False,
    ) -> Ticket:  # fmt: skip
        """Start a :meth:`push_pull` without waiting."""
        with self._servers.lock:
            count = self._count(grads)
            if keys is None:
                start, stop = self._check_range(start, None, count)
                flat = self._check_grads(grads, count, 1)
                target = self._check_out(out, count, 1).reshape(-1)
                return self._send_range(PUSH_PULL, start, stop, flat, target, tick)
            distinct, flat, inverse = self._prepare_keys(keys, grads)
            target = self._check_out(out, count, 1).reshape(-1)
            return self._send_dense_keys(PUSH_PULL, distinct, flat, target, inverse, tick)

    def _count(self, grads: npt.ArrayLike) -> int:
        shape = np.shape(grads)
        if not shape:
            raise UsageError(f"gradients for table {self.name!r} are a single number: expected float32 [n]")
        return int(shape[0])

    def _check_range(self, start: int, stop: int | None, count: int | None) -> tuple[int, int]:
        try:
            first = operator.index(start)
            end = operator.index(stop) if stop is not None else self.size if count is None else first + count
        except TypeError:
            raise UsageError(
                f"range [{start!r}, {stop!r}) of dense table {self.name!r}: expected whole numbers"
            ) from None
        if not 0 <= first <= end <= self.size:
            raise UsageError(
                f"range [{first}, {end}) of dense table {self.name!r}: expected one within [0, {self.size})"
            )
        return first, end

    def _check_dense_keys(self, keys: npt.ArrayLike) -> Keys:
        checked = self._check_keys(keys)
        if len(checked) and int(checked.max()) >= self.size:
            raise UsageError(
                f"keys of dense table {self.name!r} hold {checked.max()}: they go from 0 to {self.size - 1}"
            )
        return checked

    def _prepare_keys(
        self, keys: npt.ArrayLike, grads: npt.ArrayLike
    ) -> tuple[Keys, Floats, npt.NDArray[np.int32] | None]:
        checked = self._check_dense_keys(keys)
        flat = self._check_grads(grads, len(checked), 1)
        return self._sum_equal(checked, flat, 1)

    def _send_dense_keys(
        self,
        kind: int,
        keys: Keys,
        grads: Floats | None,
        out: Floats | None,
        inverse: npt.NDArray[np.int32] | None,
        ticks: bool,
    ) -> Ticket:
        servers = self._servers
        values = out if inverse is None or out is None else np.empty(len(keys), np.float32)
        data = servers.request(kind, self._number, ticks=ticks)
        connections = self._connections()
        buckets = dense_buckets(self.size, keys)
        if servers.routes.lost:
            servers.check_not_lost(bucket_set(np.unique(buckets).tolist()))
        owners = servers.routes.owners[buckets]
        sent: list[Request] = []
        places: list[tuple[Floats, npt.NDArray[np.int64]]] = []
        for i, connection in enumerate(connections):
            chosen = np.flatnonzero(owners == i)
            if len(chosen):
                own_out = None if values is None else np.empty(len(chosen), np.float32)
                parts = (keys[chosen],) if grads is None else (keys[chosen], grads[chosen])
                sent.append(connection.send(data.of_server(parts, own_out)))
                if own_out is not None:
                    places.append((own_out, chosen))
            elif ticks:
                sent.append(connection.send(DataRequest(clock=data.clock)))
        if ticks:
            servers.core.tick()

        def finish() -> Floats | None:
            if values is not None:
                for own, chosen in places:
                    values[chosen] = own
                if out is not None and inverse is not None:
                    out[:] = values[inverse]
            return out

        return Ticket(servers, sent, finish)

    def _connections(self) -> Sequence[ServerConnection | FilteredSender]:
        connections = self._servers.newest()
        return connections if self.filters is None else self.filters.senders(connections)

    def _current_runs(self) -> list[Sequence[tuple[int, int]]]:
        routes = self._servers.routes
        if self._runs_of != routes.version:
            self._runs = [runs_in(self.size, led) for led in routes.leads]
            self._runs_of = routes.version
        return self._runs

    def _send_range(
        self, kind: int, start: int, stop: int, grads: Floats | None, out: Floats | None, ticks: bool
    ) -> Ticket:
        servers = self._servers
        data = servers.request(kind, self._number, flags=RANGE, ticks=ticks)
        bounds = np.array([start, stop], np.uint64)
        data.parts, data.out = (bounds,) if grads is None else (bounds, grads), out
        connections = self._connections()
        if servers.routes.lost:
            servers.check_not_lost(range_buckets(self.size, start, stop))
        sent: list[Request] = []
        places: list[tuple[Floats, list[tuple[int, int]]]] = []
        for connection, runs in zip(connections, self._current_runs(), strict=True):
            own = clip_runs(runs, start, stop)
            length = sum(b - a for a, b in own)
            if length == stop - start and length:
                sent.append(connection.send(data))
            elif length:
                own_out = None if out is None else np.empty(length, np.float32)
                parts: list[npt.NDArray[Any]] = [bounds]
                if grads is not None:
                    parts.append(np.concatenate([grads[a - start : b - start] for a, b in own]))
                sent.append(connection.send(data.of_server(parts, own_out)))
                if own_out is not None:
                    places.append((own_out, own))
            elif ticks:
                sent.append(connection.send(DataRequest(clock=data.clock)))
        if ticks:
            servers.core.tick()

        def finish() -> Floats | None:
            for values, own in places:
                at = 0
                for a, b in own:
                    assert out is not None
                    out[a - start : b - start] = values[at : at + b - a]
                    at += b - a
            return out

        return Ticket(servers, sent, finish)

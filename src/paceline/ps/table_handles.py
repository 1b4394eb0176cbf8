"""What a user holds of a table: push, pull, and the tickets of those that are under way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import NonFiniteError, PacelineError, UsageError
from paceline.kernels.dedup import dedup, put_rows, scratch_size, split, sum_rows, take_keys, take_rows
from paceline.kernels.sparse import all_finite
from paceline.ps import messages
from paceline.ps.connection import Pending, ServerConnection
from paceline.ps.messages import DROPPED, PULL, PUSH, PUSH_PULL, RANGE, TICK, TableSpec
from paceline.ps.rules import UpdateRule, to_fields
from paceline.ps.sparse_store import Floats, Keys
from paceline.ps.tables import bucket_width, clip_runs, owned_runs

if TYPE_CHECKING:
    from paceline.ps.client import Client

Parts = list[tuple[ServerConnection, Pending]]


class Ticket:
    """A push or pull under way. Arrays given to it must not be changed, nor `out` read, before it is done."""

    __slots__ = ("_client", "_finish", "_finished", "_parts", "_result")

    def __init__(self, client: Client, parts: Parts, finish: Callable[[], Any] | None = None) -> None:
        self._client = client
        self._parts = parts
        self._finish = finish
        self._finished = False
        self._result: Any = None

    def wait(self) -> None:
        """Wait until it is done: a push is acknowledged by every server, a pull's values are here.

        Raises what a server reported, DeadlineError, or ConnectionLostError.
        """
        if not self._finished:
            self._wait()

    def _wait(self) -> None:
        with self._client.lock:
            if self._finished:  # by another thread
                return
            try:
                for connection, pending in self._parts:
                    connection.wait(pending)
            except PacelineError:
                for connection, pending in self._parts:
                    connection.forget(pending)
                raise
            if self._finish is not None:
                self._result = self._finish()
            self._finished = True

    def done(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        if self._finished:
            return True
        with self._client.lock:
            are_done = [connection.poll(pending) for connection, pending in self._parts]
            return all(are_done)

    def result(self) -> Any:
        """Wait; return the values (float32 [n, dim] or [n]) of a pull, None of a push."""
        self.wait()
        return self._result

    @property
    def dropped(self) -> bool:
        """Whether a server has dropped the gradient because it was too stale (policy drop:R). Waits."""
        self.wait()
        return any(pending.flags & DROPPED for _, pending in self._parts)


class _Table:
    """What sparse and dense tables share."""

    def __init__(self, client: Client, number: int, spec: TableSpec) -> None:
        self._client = client
        self._number = number
        self.spec = spec
        self._scratch = np.empty(0, np.int32)

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name

    @property
    def number(self) -> int:
        """The table's number in this cluster."""
        return self._number

    def set_update(self, update: UpdateRule) -> None:
        """Change hyperparameters, the learning rate for instance, on every server; the rule must be the same one."""
        if not isinstance(update, UpdateRule):
            raise UsageError(f"update={update!r}: expected an update rule such as paceline.SGD(lr=0.1)")
        with self._client.lock:
            for connection in self._client.connections:
                connection.call(messages.SetUpdate(table=self._number, update=to_fields(update)))

    def _check_keys(self, keys: npt.ArrayLike) -> Keys:
        array = np.asarray(keys)
        if array.dtype != np.uint64:
            array = self._convert_keys(array)
        if array.ndim != 1:
            raise UsageError(f"keys of table {self.name!r} have shape {array.shape}: expected one dimension, [n]")
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def _convert_keys(self, array: npt.NDArray[Any]) -> Keys:
        if array.size == 0:
            return array.astype(np.uint64)
        if array.dtype.kind not in "iu":
            raise UsageError(
                f"keys of table {self.name!r} are {array.dtype}: expected uint64 (or another integer type)"
            )
        if array.dtype.kind == "i" and array.min() < 0:
            raise UsageError(
                f"keys of table {self.name!r} hold {array.min()}: keys are uint64; if negative numbers are meant as "
                "bit patterns, pass keys.view(np.uint64)"
            )
        return array.astype(np.uint64)

    def _check_grads(self, grads: npt.ArrayLike, count: int, dim: int) -> Floats:
        array = np.asarray(grads)
        if array.dtype != np.float32:
            raise UsageError(
                f"gradients for table {self.name!r} are {array.dtype}: expected float32; convert with "
                "grads.astype(np.float32)"
            )
        if array.shape != (count, dim) and not (dim == 1 and array.shape == (count,)):
            raise UsageError(
                f"gradients for table {self.name!r} have shape {array.shape}: expected {(count, dim)}, one row per key"
            )
        flat = np.ascontiguousarray(array).reshape(-1)
        if not all_finite(flat):
            bad = flat[~np.isfinite(flat)][0]
            raise NonFiniteError(
                f"a push of {self._client.role} {self._client.rank} to table {self.name!r} holds {bad}; it was refused "
                "and the table is unchanged: look for a diverging loss or a division by zero in the gradient"
            )
        return flat

    def _check_out(self, out: Floats | None, count: int, dim: int) -> Floats:
        if out is None:
            return np.empty((count, dim), np.float32)
        if not isinstance(out, np.ndarray):
            raise UsageError(
                f"out for table {self.name!r} is a {type(out).__name__}: expected a NumPy array of float32"
            )
        is_fit = out.flags.c_contiguous and out.flags.writeable
        if out.dtype != np.float32 or out.size != count * dim or not is_fit:
            raise UsageError(
                f"out for table {self.name!r} is {out.dtype} of shape {out.shape}: expected a contiguous, writable "
                f"float32 array of {count * dim} elements"
            )
        return out

    def _dedup(self, keys: Keys) -> tuple[Keys, npt.NDArray[np.int32] | None]:
        """Return the distinct keys and, unless all are distinct, the inverse."""
        if len(keys) < 2:
            return keys, None
        size = scratch_size(len(keys))
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.int32)
        unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
        count = dedup(keys, self._scratch[:size], unique, inverse)
        return (keys, None) if count == len(keys) else (unique[:count], inverse)

    def _send_by_key(
        self,
        kind: int,
        keys: Keys,
        grads: Floats | None,
        out: Floats | None,
        dim: int,
        *,
        ticks: bool = False,
        ahead: int = 0,
    ) -> Ticket:
        """Send a request for distinct keys to the servers that own them; `grads` and `out` are flat."""
        client = self._client
        connections = client.connections
        clock, flags = client.clock + ahead, client.tick_flag() if ticks else 0
        sequence = client.next_sequence() if grads is not None else 0
        if len(connections) == 1:
            parts: Sequence[Any] = (keys,) if grads is None else (keys, grads)
            pending = connections[0].send(kind, self._number, flags, clock, sequence, parts, out)
            sent, finish = [(connections[0], pending)], None
        else:
            sent, finish = self._send_split(kind, keys, grads, out, dim, flags, clock, sequence)
        if ticks:
            client.ticked_by_push()
        return Ticket(client, sent, finish)

    def _send_split(
        self,
        kind: int,
        keys: Keys,
        grads: Floats | None,
        out: Floats | None,
        dim: int,
        flags: int,
        clock: int,
        sequence: int,
    ) -> tuple[Parts, Callable[[], None] | None]:
        client = self._client
        order = np.empty(len(keys), np.int64)
        starts = np.empty(len(client.connections) + 1, np.int64)
        split(keys, client.owners, starts, order)
        sent: Parts = []
        places: list[tuple[Floats, npt.NDArray[np.int64]]] = []
        for i, connection in enumerate(client.connections):
            chosen = order[starts[i] : starts[i + 1]]
            if not len(chosen):
                if flags:
                    sent.append((connection, connection.send(TICK, 0, 0, clock, 0, ())))
                continue
            own_keys = np.empty(len(chosen), np.uint64)
            take_keys(keys, chosen, own_keys)
            parts: list[Any] = [own_keys]
            if grads is not None:
                own_grads = np.empty(len(chosen) * dim, np.float32)
                take_rows(grads, chosen, dim, own_grads)
                parts.append(own_grads)
            own_out = None
            if out is not None:
                own_out = np.empty(len(chosen) * dim, np.float32)
                places.append((own_out, chosen))
            pending = connection.send(kind, self._number, flags, clock, sequence, parts, own_out)
            sent.append((connection, pending))
        if out is None:
            return sent, None
        target = out

        def put_all() -> None:
            for values, chosen in places:
                put_rows(values, chosen, dim, target)

        return sent, put_all


def _empty_ticket(client: Client, result: Any) -> Ticket:
    return Ticket(client, [], lambda: result)


class SparseTable(_Table):
    """uint64 key → row of `dim` float32, spread over the servers by key. Declared by ``client.sparse_table``."""

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
        the search for equal keys. Returns at once; the arrays must not change until the ticket is done.

        Raises UsageError for a wrong dtype or shape, NonFiniteError for NaN or Inf; then no server has seen any of it.
        """
        with self._client.lock:
            distinct, flat = self._prepare_push(keys, grads, assume_unique)
            return self._send_by_key(PUSH, distinct, flat, None, self.dim, ticks=tick)

    def pull(self, keys: npt.ArrayLike, out: Floats | None = None, *, assume_unique: bool = False) -> Floats:
        """Return the values of `keys` (uint64 [n]) as float32 [n, dim], in `out` if given; waits for the gate."""
        values: Floats = self.pull_async(keys, out, assume_unique=assume_unique).result()
        return values

    def pull_async(
        self, keys: npt.ArrayLike, out: Floats | None = None, *, assume_unique: bool = False, ahead: int = 0
    ) -> Ticket:
        """Ask for values; ``ticket.result()`` waits and returns them as :meth:`pull` does.

        With `ahead` they are asked for as of the iteration so many after the current one, before the worker has ticked:
        that hides the round trip, and the values may lack this worker's own last pushes. Only under a consistency whose
        τ is at least `ahead`; else UsageError.
        """
        with self._client.lock:
            if ahead:
                self._check_ahead(ahead)
            checked = self._check_keys(keys)
            out = self._check_out(out, len(checked), self.dim)
            if not len(checked):
                return _empty_ticket(self._client, out)
            distinct, inverse = (checked, None) if assume_unique else self._dedup(checked)
            return self._ask(PULL, distinct, inverse, None, out, False, ahead)

    def push_pull(
        self, keys: npt.ArrayLike, grads: npt.ArrayLike, out: Floats | None = None, *, tick: bool = False,
        assume_unique: bool = False,
    ) -> Floats:  # fmt: skip
        """Push gradients and read the same keys' values after that, in one message; with `tick`, the next iteration's.

        (Under sequential consistency a gradient shows only in the next iteration.)
        """
        ticket = self.push_pull_async(keys, grads, out, tick=tick, assume_unique=assume_unique)
        values: Floats = ticket.result()
        return values

    def push_pull_async(
        self, keys: npt.ArrayLike, grads: npt.ArrayLike, out: Floats | None = None, *, tick: bool = False,
        assume_unique: bool = False,
    ) -> Ticket:  # fmt: skip
        """Do as :meth:`push_pull` without waiting."""
        with self._client.lock:
            checked = self._check_keys(keys)
            flat = self._check_grads(grads, len(checked), self.dim)
            out = self._check_out(out, len(checked), self.dim)
            distinct, inverse = (checked, None) if assume_unique else self._dedup(checked)
            if inverse is not None:
                summed = np.empty(len(distinct) * self.dim, np.float32)
                sum_rows(inverse, flat, self.dim, summed)
                flat = summed
            return self._ask(PUSH_PULL, distinct, inverse, flat, out, tick)

    def erase(self, keys: npt.ArrayLike) -> int:
        """Erase rows, so that they read as never pushed; return how many there were."""
        with self._client.lock:
            self._client.flush()
            checked, erased = self._check_keys(keys), 0
            order = np.empty(len(checked), np.int64)
            starts = np.empty(len(self._client.connections) + 1, np.int64)
            split(checked, self._client.owners, starts, order)
            for i, connection in enumerate(self._client.connections):
                own = checked[order[starts[i] : starts[i + 1]]]
                erased += connection.call(messages.Erase(table=self._number), (own,))[0]
            return erased

    def __len__(self) -> int:
        """Return the number of rows on all servers."""
        return sum(server.tables[self.name].rows for server in self._client.statistics())

    def _check_ahead(self, ahead: int) -> None:
        tau = self._client.consistency.tau
        if ahead < 0 or (tau is not None and ahead > tau):
            raise UsageError(
                f"ahead={ahead}: under {self._client.consistency} consistency a worker may read 0 to {tau} iterations "
                "ahead of its own pushes"
            )

    def _prepare_push(self, keys: npt.ArrayLike, grads: npt.ArrayLike, assume_unique: bool) -> tuple[Keys, Floats]:
        checked = self._check_keys(keys)
        flat = self._check_grads(grads, len(checked), self.dim)
        if assume_unique:
            return checked, flat
        distinct, inverse = self._dedup(checked)
        if inverse is None:
            return checked, flat
        summed = np.empty(len(distinct) * self.dim, np.float32)
        sum_rows(inverse, flat, self.dim, summed)
        return distinct, summed

    def _ask(
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
        ticket = self._send_by_key(kind, keys, grads, values, self.dim, ticks=ticks, ahead=ahead)
        inner = ticket._finish

        def finish() -> Floats:
            if inner is not None:
                inner()
            if inverse is not None:
                take_rows(values, inverse, self.dim, out.reshape(-1))
            return out

        ticket._finish = finish
        return ticket


class DenseTable(_Table):
    """`size` float32 with keys 0 to size - 1, in contiguous buckets. Declared by ``client.dense_table``.

    Every method takes either a range or `keys`: ``push(grads, start=0)`` means [0, len(grads)).
    """

    def __init__(self, client: Client, number: int, spec: TableSpec) -> None:
        super().__init__(client, number, spec)
        self._runs = [owned_runs(spec.size, client.placement.owned(rank)) for rank in client.server_ranks]
        self._width = np.uint64(bucket_width(spec.size))

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    def push(
        self, grads: npt.ArrayLike, *, start: int = 0, keys: npt.ArrayLike | None = None, tick: bool = False
    ) -> Ticket:
        """Send gradients (float32 [n]) for [start, start + n), or for `keys` (uint64 [n]; equal ones are summed).

        Other arguments, result and errors as :meth:`SparseTable.push`.
        """
        with self._client.lock:
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
        """Ask for values; ``ticket.result()`` waits and returns them as :meth:`pull` does."""
        with self._client.lock:
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
        """Push gradients and read the same elements after that, in one message; with `tick`, of the next iteration."""
        values: Floats = self.push_pull_async(grads, out, start=start, keys=keys, tick=tick).result()
        return values

    def push_pull_async(
        self, grads: npt.ArrayLike, out: Floats | None = None, *, start: int = 0, keys: npt.ArrayLike | None = None,
        tick: bool = False,
    ) -> Ticket:  # fmt: skip
        """Do as :meth:`push_pull` without waiting."""
        with self._client.lock:
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
        distinct, inverse = self._dedup(checked)
        if inverse is None:
            return checked, flat, None
        summed = np.empty(len(distinct), np.float32)
        sum_rows(inverse, flat, 1, summed)
        return distinct, summed, inverse

    def _send_dense_keys(
        self,
        kind: int,
        keys: Keys,
        grads: Floats | None,
        out: Floats | None,
        inverse: npt.NDArray[np.int32] | None,
        ticks: bool,
    ) -> Ticket:
        client = self._client
        values = out if inverse is None or out is None else np.empty(len(keys), np.float32)
        flags = client.tick_flag() if ticks else 0
        sequence = client.next_sequence() if grads is not None else 0
        owners = client.owners[(keys // self._width).astype(np.int64)]
        sent: Parts = []
        places: list[tuple[Floats, npt.NDArray[np.int64]]] = []
        for i, connection in enumerate(client.connections):
            chosen = np.flatnonzero(owners == i)
            if not len(chosen):
                if ticks:
                    sent.append((connection, connection.send(TICK, 0, 0, client.clock, 0, ())))
                continue
            parts: list[Any] = [keys[chosen]]
            if grads is not None:
                parts.append(grads[chosen])
            own_out = None if values is None else np.empty(len(chosen), np.float32)
            pending = connection.send(kind, self._number, flags, client.clock, sequence, parts, own_out)
            sent.append((connection, pending))
            if own_out is not None:
                places.append((own_out, chosen))
        if ticks:
            client.ticked_by_push()

        def finish() -> Floats | None:
            if values is not None:
                for own, chosen in places:
                    values[chosen] = own
                if out is not None and inverse is not None:
                    out[:] = values[inverse]
            return out

        return Ticket(client, sent, finish)

    def _send_range(
        self, kind: int, start: int, stop: int, grads: Floats | None, out: Floats | None, ticks: bool
    ) -> Ticket:
        client = self._client
        flags = RANGE | (client.tick_flag() if ticks else 0)
        sequence = client.next_sequence() if grads is not None else 0
        bounds = np.array([start, stop], np.uint64)
        sent: Parts = []
        places: list[tuple[Floats, list[tuple[int, int]]]] = []
        for connection, runs in zip(client.connections, self._runs, strict=True):
            own = clip_runs(runs, start, stop)
            length = sum(b - a for a, b in own)
            if not length:
                if ticks:
                    sent.append((connection, connection.send(TICK, 0, 0, client.clock, 0, ())))
                continue
            whole = length == stop - start
            parts: list[Any] = [bounds]
            if grads is not None:
                parts.append(grads if whole else np.concatenate([grads[a - start : b - start] for a, b in own]))
            own_out = None if out is None else out if whole else np.empty(length, np.float32)
            pending = connection.send(kind, self._number, flags, client.clock, sequence, parts, own_out)
            sent.append((connection, pending))
            if own_out is not None and not whole:
                places.append((own_out, own))
        if ticks:
            client.ticked_by_push()

        def finish() -> Floats | None:
            for values, own in places:
                at = 0
                for a, b in own:
                    assert out is not None
                    out[a - start : b - start] = values[at : at + b - a]
                    at += b - a
            return out

        return Ticket(client, sent, finish)

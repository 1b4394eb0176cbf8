"""The calls of a group: check the arguments of a call, and return a function that runs it later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from paceline.collectives.arrays import ArrayMemory, as_array, empty_like
from paceline.collectives.calls import CollectiveCall, shorten
from paceline.collectives.connections import Connections
from paceline.collectives.engine import Area, Engine, Order, Reduction, copy
from paceline.collectives.p2p.pending import Pending
from paceline.collectives.tuner import SHARED, Tuner
from paceline.errors import MismatchError, UsageError
from paceline.kernels import combine
from paceline.observe import recording
from paceline.observe.stuck.processes import flight_recorder
from paceline.observe.stuck.recorder import COLLECTIVE, MESSAGE, RecordedOperation

Work: TypeAlias = Callable[[int], Any]

_OPS: Final = {
    "sum": combine.SUM,
    "mean": combine.SUM,
    "product": combine.PRODUCT,
    "min": combine.MIN,
    "max": combine.MAX,
    "bitwise_and": combine.BITWISE_AND,
    "bitwise_or": combine.BITWISE_OR,
    "bitwise_xor": combine.BITWISE_XOR,
}
_FLOATS: Final = frozenset(("float16", "bfloat16", "float32", "float64"))
_MAX_KNOWN_CALLS: Final = 10_000


class KnownCall(NamedTuple):
    """A call that a rank has made before, or makes now."""

    call: CollectiveCall
    signature: int
    recorded: bytes
    """The call in the format of the flight recorder."""


class Operations:
    """The collective operations of one rank in a group."""

    def __init__(self, connections: Connections, tuner: Tuner, timeout_s: float) -> None:
        self._recorder = flight_recorder()
        self._recorded_group = self._recorder.add_group(*connections.names_in_program())
        self._messages: dict[tuple[str, str, int, int], bytes] = {}
        self._num_messages = 0
        self._event = 0
        """The number of the current call in the flight recorder."""
        self.rank, self.size = connections.layout.rank, connections.layout.size
        self._connections = connections
        self._tuner = tuner
        self._timeout_s = timeout_s
        self._calls: dict[tuple[Any, ...], KnownCall] = {}
        self._reductions: dict[tuple[str, str], Reduction] = {}
        self._running: tuple[str, str, int, float] | None = None

    def barrier(self) -> Work:
        call = self._call("barrier")

        def work(sequence: int) -> None:
            if self.size > 1:
                engine, order = self._begin("barrier", 0, call, sequence)
                engine.barrier(order)

        return work

    def all_reduce(self, array: Any, op: str, out: Any) -> Work:
        if out is array:
            source = target = ArrayMemory(array, target=True)
        else:
            array = as_array(array)
            source = ArrayMemory(array)
            out = empty_like(array, source.shape) if out is None else out
            target = _matching(out, source, source.shape)
        call = self._call("all_reduce", source.dtype, source.shape, op)
        reduction = self._reduction(source, op)
        num_bytes = source.num_bytes
        source_area, target_area = Area(source.address, num_bytes), Area(target.address, num_bytes)

        def work(sequence: int) -> Any:
            if self.size > 1:
                engine, order = self._begin("all_reduce", num_bytes, call, sequence)
                engine.all_reduce(order, source_area, target_area, reduction)
            elif source is not target:
                copy(source_area, target_area)
            target.copy_back()
            return out

        return work

    def reduce(self, array: Any, op: str, root: int, out: Any) -> Work:
        self._check_root(root)
        array = as_array(array)
        source = ArrayMemory(array)
        call = self._call("reduce", source.dtype, source.shape, op, root)
        reduction = self._reduction(source, op)
        target: ArrayMemory | None = None
        if self.rank == root:
            out = empty_like(array, source.shape) if out is None else out
            target = _matching(out, source, source.shape)

        def work(sequence: int) -> Any:
            target_area = None if target is None else _area(target)
            if self.size > 1:
                engine, order = self._begin("reduce", source.num_bytes, call, sequence)
                engine.reduce(order, _area(source), target_area, reduction, root)
            else:
                assert target_area is not None
                copy(_area(source), target_area)
            return _copied_back(target, out)

        return work

    def reduce_scatter(self, array: Any, op: str, sizes: Sequence[int] | None, out: Any) -> Work:
        array = as_array(array)
        source = ArrayMemory(array)
        rows = self._rows(source.shape, sizes, "reduce_scatter")
        compared_shape = source.shape if sizes is None else (*source.shape[1:], *rows)
        call = self._call(_named("reduce_scatter", sizes), source.dtype, compared_shape, op)
        reduction = self._reduction(source, op)
        shape = (rows[self.rank], *source.shape[1:])
        out = empty_like(array, shape) if out is None else out
        target = _matching(out, source, shape)

        def work(sequence: int) -> Any:
            if self.size > 1:
                engine, order = self._begin("reduce_scatter", source.num_bytes, call, sequence)
                engine.reduce_scatter(order, _parts(source, rows), _area(target), reduction)
            else:
                copy(_area(source), _area(target))
            return _copied_back(target, out)

        return work

    def broadcast(self, array: Any, root: int) -> Work:
        self._check_root(root)
        memory = ArrayMemory(array, target=self.rank != root)
        call = self._call("broadcast", memory.dtype, memory.shape, "", root)

        def work(sequence: int) -> Any:
            if self.size > 1:
                engine, order = self._begin("broadcast", memory.num_bytes, call, sequence)
                engine.broadcast(order, _area(memory), root)
            return _copied_back(memory, array)

        return work

    def all_gather(self, array: Any, sizes: Sequence[int] | None, out: Any) -> Work:
        array = as_array(array)
        source = ArrayMemory(array)
        rows, shape, compared_shape = self._gathered(source, sizes)
        call = self._call(_named("all_gather", sizes), source.dtype, compared_shape)
        out = empty_like(array, shape) if out is None else out
        target = _matching(out, source, shape)

        def work(sequence: int) -> Any:
            if self.size > 1:
                engine, order = self._begin("all_gather", target.num_bytes, call, sequence)
                engine.all_gather(order, _area(source), _parts(target, rows))
            else:
                copy(_area(source), _area(target))
            return _copied_back(target, out)

        return work

    def gather(self, array: Any, root: int, sizes: Sequence[int] | None, out: Any) -> Work:
        self._check_root(root)
        array = as_array(array)
        source = ArrayMemory(array)
        rows, shape, compared_shape = self._gathered(source, sizes)
        call = self._call(_named("gather", sizes), source.dtype, compared_shape, "", root)
        target: ArrayMemory | None = None
        if self.rank == root:
            out = empty_like(array, shape) if out is None else out
            target = _matching(out, source, shape)

        def work(sequence: int) -> Any:
            if self.size > 1:
                targets = [] if target is None else _parts(target, rows)
                engine, order = self._begin("gather", source.num_bytes if sizes is None else 0, call, sequence)
                engine.gather(order, _area(source), targets, root)
            elif target is not None:
                copy(_area(source), _area(target))
            return _copied_back(target, out)

        return work

    def scatter(self, array: Any, out: Any, root: int, sizes: Sequence[int] | None) -> Work:
        self._check_root(root)
        target = ArrayMemory(out, target=True)
        source: ArrayMemory | None = None
        rows: list[int] = []
        if self.rank == root:
            source = ArrayMemory(as_array(array))
            rows = self._rows(source.shape, sizes, "scatter")
            part = (rows[root], *source.shape[1:])
            if source.dtype != target.dtype or part != target.shape:
                raise UsageError(
                    f"the part of rank {root} is {source.dtype}{list(part)}, but out is "
                    f"{target.dtype}{list(target.shape)}"
                )
        if sizes is not None and (len(sizes) != self.size or target.shape[:1] != (sizes[self.rank],)):
            raise UsageError(
                f"got sizes {list(sizes)} and out of shape {list(target.shape)} on rank {self.rank}; both must agree"
            )
        compared_shape = target.shape if sizes is None else (*target.shape[1:], *(int(number) for number in sizes))
        call = self._call(_named("scatter", sizes), target.dtype, compared_shape, "", root)

        def work(sequence: int) -> Any:
            sources = [] if source is None else _parts(source, rows)
            if self.size > 1:
                engine, order = self._begin("scatter", target.num_bytes if sizes is None else 0, call, sequence)
                engine.scatter(order, sources, _area(target), root)
            else:
                copy(sources[0], _area(target))
            return _copied_back(target, out)

        return work

    def all_to_all(self, array: Any, sends: Sequence[int] | None, receives: Sequence[int] | None, out: Any) -> Work:
        array = as_array(array)
        source = ArrayMemory(array)
        equal = sends is None and receives is None
        send_rows = self._rows(source.shape, sends, "all_to_all")
        expected = send_rows if equal else self._expected(receives, send_rows[self.rank])
        target: ArrayMemory | None = None  # None if the number of rows to receive is not known yet
        if expected is not None:
            shape = (sum(expected), *source.shape[1:])
            out = empty_like(array, shape) if out is None else out
            target = _matching(out, source, shape)
        elif out is not None:
            target = _matching(out, source, (*(ArrayMemory(out).shape[:1] or (0,)), *source.shape[1:]))
        call = self._call(
            "all_to_all" if equal else "all_to_all (uneven)", source.dtype, source.shape if equal else source.shape[1:]
        )

        def work(sequence: int) -> Any:
            rows = send_rows if equal else self._exchange_sizes(call, send_rows, expected, sequence)
            result, filled = out, target
            if filled is None:
                result = empty_like(array, (sum(rows), *source.shape[1:]))
                filled = ArrayMemory(result, target=True)
            elif sum(rows) != filled.shape[0]:
                raise MismatchError(
                    f"rank {self.rank}: out has {filled.shape[0]} rows, but the ranks send {rows} rows to it in "
                    "all_to_all. Pass the expected numbers as receive_sizes to see which rank sends another number"
                )
            if self.size > 1:
                engine, order = self._begin("all_to_all", source.num_bytes if equal else 0, call, sequence)
                engine.all_to_all(order, _parts(source, send_rows), _parts(filled, rows), equal=equal)
            else:
                copy(_area(source), _area(filled))
            return _copied_back(filled, result)

        return work

    def record_message(self, pending: Pending, name: str, memory: ArrayMemory, rank: int | None) -> Pending:
        """Record a send or receive in the flight recorder, and return it. `rank` is the other rank, or None for any."""
        peer = -1 if rank is None else rank
        key = (name, memory.dtype, memory.count, peer)
        recorded = self._messages.get(key)
        if recorded is None:
            if len(self._messages) >= _MAX_KNOWN_CALLS:
                self._messages.clear()
            operation = RecordedOperation(MESSAGE, name, self._recorded_group, memory.dtype, (memory.count,), "", peer)
            recorded = self._messages[key] = operation.encode()
        self._num_messages += 1
        pending.record(self._recorder.begin(recorded, self._num_messages))
        return pending

    def _expected(self, receives: Sequence[int] | None, own: int) -> list[int] | None:
        if receives is None:
            return None
        rows = [int(number) for number in receives]
        if len(rows) != self.size or min(rows) < 0 or rows[self.rank] != own:
            raise UsageError(
                f"got receive_sizes {rows}, expected {self.size} numbers, with {own} rows from rank {self.rank} itself"
            )
        return rows

    def _exchange_sizes(
        self, call: KnownCall, sends: list[int], receives: list[int] | None, sequence: int
    ) -> list[int]:
        """Exchange the numbers of rows between all ranks, and return the number of rows that each rank sends here.

        Raises MismatchError if another rank makes a different `call`.
        """
        numbers = np.array([sends, sends], np.int64)  # row 0 is sent, row 1 is received
        if self.size > 1:
            source_area, target_area = (_parts(ArrayMemory(row), [1] * self.size) for row in numbers)
            engine, order = self._begin("all_to_all", numbers[0].nbytes, call, sequence)
            engine.all_to_all(order, source_area, target_area, equal=True)
        rows: list[int] = numbers[1].tolist()
        if receives is not None and receives != rows:
            raise MismatchError(
                f"rank {self.rank} expects receive_sizes {receives} in all_to_all, but the ranks send {rows} rows"
            )
        return rows

    def _call(
        self, operation: str, dtype: str = "", shape: tuple[int, ...] = (), op: str = "", root: int = -1
    ) -> KnownCall:
        key = (operation, dtype, shape, op, root)
        entry = self._calls.get(key)
        if entry is None:
            if len(self._calls) >= _MAX_KNOWN_CALLS:
                self._calls.clear()
            call = shorten(CollectiveCall(operation, dtype, shape, op, root))
            recorded = RecordedOperation(
                COLLECTIVE, operation, self._recorded_group, dtype, call.shape, op, root
            ).encode()
            entry = self._calls[key] = KnownCall(call, call.signature, recorded)
        return entry

    def _reduction(self, memory: ArrayMemory, op: str) -> Reduction:
        entry = self._reductions.get((memory.dtype, op))
        if entry is None:
            entry = self._reductions[memory.dtype, op] = self._make_reduction(memory, op)
        return entry

    def _make_reduction(self, memory: ArrayMemory, op: str) -> Reduction:
        dtype = memory.dtype
        if op not in _OPS:
            raise UsageError(f"got op {op!r}, expected one of {', '.join(_OPS)}")
        if op == "mean" and dtype not in _FLOATS:
            raise UsageError(f"got op 'mean' for {dtype}, expected a float dtype; use 'sum' and divide the result")
        if op.startswith("bitwise") and dtype in _FLOATS:
            raise UsageError(f"got op {op!r} for {dtype}, expected an integer dtype or bool")
        scale = 1.0 / self.size if op == "mean" else 1.0
        return Reduction(combine.combiner(dtype), _OPS[op], scale, memory.item_bytes)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageError(f"got root {root}, expected a rank from 0 to {self.size - 1}")

    def _rows(self, shape: tuple[int, ...], sizes: Sequence[int] | None, operation: str) -> list[int]:
        if not shape:
            raise UsageError(
                f"got a 0-d array for {operation}, which divides arrays along the first axis; "
                "pass an array with at least one axis"
            )
        if sizes is None:
            if shape[0] % self.size:
                raise UsageError(
                    f"{operation} divides {shape[0]} rows into {self.size} equal parts; pass a multiple of "
                    f"{self.size} rows, or sizes"
                )
            return [shape[0] // self.size] * self.size
        rows = [int(number) for number in sizes]
        if len(rows) != self.size or min(rows) < 0 or sum(rows) != shape[0]:
            raise UsageError(
                f"got sizes {rows} for {shape[0]} rows and {self.size} ranks; pass one per rank, {shape[0]} in total"
            )
        return rows

    def _gathered(
        self, source: ArrayMemory, sizes: Sequence[int] | None
    ) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """Return the number of rows of each rank, the shape of the result, and the numbers that must be equal on all
        ranks.
        """
        own = source.shape or (1,)
        if sizes is None:
            return [own[0]] * self.size, (own[0] * self.size, *own[1:]), source.shape
        rows = [int(number) for number in sizes]
        if len(rows) != self.size or min(rows) < 0 or rows[self.rank] != own[0]:
            raise UsageError(
                f"got sizes {rows} for {self.size} ranks, and {own[0]} rows on rank {self.rank}; pass every rank's rows"
            )
        return rows, (sum(rows), *own[1:]), (*own[1:], *rows)

    def _begin(self, operation: str, num_bytes: int, call: KnownCall, sequence: int) -> tuple[Engine, Order]:
        """Return the engine and the description of a call. The tuner chooses the engine and the algorithm.

        `num_bytes` must be equal on all ranks, so that all ranks get the same choice.
        """
        if not self._event:
            self._event = self._recorder.begin_collective(call.recorded, sequence)
        self._connections.at = (sequence, call.call)
        order = Order(call.call, call.signature, sequence, self._timeout_s)
        engine, algorithm = self._tuner.choose(operation, num_bytes, order)
        self._running = (operation, algorithm, num_bytes, time.perf_counter())
        return engine, order._replace(algorithm=algorithm) if algorithm != SHARED else order

    def finished(self, *, has_failed: bool = False) -> None:
        if self._event:
            self._recorder.end(self._event, has_failed=has_failed)
            self._event = 0
        if has_failed:
            self._running = None
        if self._running is not None:
            operation, algorithm, num_bytes, start = self._running
            seconds = time.perf_counter() - start
            self._tuner.record(operation, algorithm, num_bytes, seconds)
            self._running = None
            if (recorder := recording.recorder) is not None:
                recorder.observe("paceline_collective_seconds", seconds, operation, algorithm)
                recorder.add("paceline_collective_bytes_total", num_bytes, operation)


def _named(operation: str, sizes: Sequence[int] | None) -> str:
    return operation if sizes is None else f"{operation} (uneven)"


def _area(memory: ArrayMemory) -> Area:
    return Area(memory.address, memory.num_bytes)


def _parts(memory: ArrayMemory, rows: Sequence[int]) -> list[Area]:
    total = sum(rows)
    row_bytes = memory.num_bytes // total if total else 0
    areas, address = [], memory.address
    for number in rows:
        areas.append(Area(address, number * row_bytes))
        address += number * row_bytes
    return areas


def _matching(out: Any, source: ArrayMemory, shape: tuple[int, ...]) -> ArrayMemory:
    target = ArrayMemory(out, target=True)
    if target.dtype != source.dtype or target.shape != tuple(shape):
        raise UsageError(
            f"got out of {target.dtype}{list(target.shape)}, expected {source.dtype}{list(shape)}; leave `out` out to "
            "get a new array"
        )
    return target


def _copied_back(target: ArrayMemory | None, out: Any) -> Any:
    if target is None:
        return None
    target.copy_back()
    return out

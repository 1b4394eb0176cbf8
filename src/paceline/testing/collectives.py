"""What every :class:`~paceline.collectives.Group` must do, checked against NumPy; and ranks as threads of one process.

:func:`check_collectives` runs all checks on ranks that the caller makes, :func:`run_ranks` makes them as threads.
``COLLECTIVE_CHECKS`` has the checks by name, for a test each: every one is called on every rank with its group, and
computes from the rank's number what the others give, so it needs no other way between them than the group itself.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.collectives import Group, MemoryStore, Store, Ticket, join
from paceline.collectives.node import NodeInfo
from paceline.errors import UsageError

_T = TypeVar("_T")
_Array = npt.NDArray[Any]
Check = Callable[[Group], None]

_TIMEOUT = timedelta(seconds=30)
_LEAVING_S = 5.0
_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES: Final = ("float16", "float32", "float64", *_INTEGERS, "bool")
_OPS: Final[Mapping[str, Any]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
_SIZES: Final = (0, 1, 7, 1000, 4097, 70_000)
"""In items; in float32 they lie on both sides of every size at which a group changes its way, up to 256 KB."""


class RunRanks(Protocol):
    """Calls a function on every rank of a fresh group, closes the groups, and returns what it returned, by rank."""

    def __call__(self, function: Callable[[Group], _T], /) -> list[_T]:
        """Raise AssertionError if the function raises anywhere."""


def check_collectives(run: RunRanks, *, only: str | None = None) -> None:
    """Check that groups keep the promises of `paceline.collectives`; AssertionError if they do not.

    ``run`` calls a function on every rank of a fresh group; ``only`` names one check of ``COLLECTIVE_CHECKS``.
    """
    for name, check in COLLECTIVE_CHECKS.items():
        if only is None or name == only:
            run(check)


def run_ranks(
    size: int,
    function: Callable[[Group], _T],
    *,
    hosts: Sequence[int] | None = None,
    within: timedelta = timedelta(seconds=60),
    **join_options: Any,
) -> list[_T]:
    """Join ``size`` ranks, threads of this process, call ``function(group)`` on each, close; return what it returns.

    ``hosts``: the number of every rank's make-believe host; ranks of different ones share no memory and meet over TCP.
    ``join_options`` are those of :func:`paceline.collectives.join`. Raises AssertionError that names the ranks if one
    raises, with the first error as its cause, or if one has not ended ``within`` that time: then it says where it is.
    """
    store = MemoryStore()
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}
    options = {"token": "a token for tests", "timeout": _TIMEOUT, **join_options}

    def work(rank: int) -> None:
        try:
            own = store if hosts is None else _StoreOfOneHost(store, rank, hosts)
            with join(own, rank, size, **options) as group:
                results[rank] = function(group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within.total_seconds()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    told = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
    late = [thread for thread in threads if thread.is_alive()]
    told += [f"{thread.name} has not ended within {within.total_seconds():g} s:\n{_stack(thread)}" for thread in late]
    if told:
        raise AssertionError("\n".join(told)) from next(iter(errors.values()), None)
    return results


@contextmanager
def nothing_left() -> Iterator[None]:
    """Raise AssertionError if threads or open files are left, some seconds after, that were not there before."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    deadline = time.monotonic() + _LEAVING_S
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    assert not left, f"threads are left: {left}"
    assert not _open_files() - files, f"files are left open: {_open_files() - files}"


def _open_files() -> set[str]:
    found = set()
    folder = Path("/proc/self/fd")
    for number in folder.iterdir() if folder.is_dir() else ():
        try:
            found.add(f"{number.name} {number.readlink()}")
        except OSError:
            pass  # the one of the listing itself
    return found


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame, 6))


class _StoreOfOneHost(Store):
    """Makes a rank believe that the ranks of other hosts share no memory with it, and have no Unix socket."""

    def __init__(self, store: Store, rank: int, hosts: Sequence[int]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts

    def get(self, key: str, deadline: float) -> bytes:
        """See :meth:`Store.get`."""
        value = self._store.get(key, deadline)
        place, _, name = key.rpartition("/")
        if place != "the rendezvous":
            return value
        host = self._hosts[int(name.removeprefix("rank "))]
        if host == self._hosts[self._rank]:
            return value
        info = NodeInfo.decode(value)
        endpoint = msgspec.structs.replace(info.endpoint, unix=None)
        return msgspec.structs.replace(info, endpoint=endpoint, memory_domain=f"host {host}").encode()

    def set(self, key: str, value: bytes) -> None:
        """See :meth:`Store.set`."""
        self._store.set(key, value)

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._store.delete(key)

    def close(self) -> None:
        """See :meth:`Store.close`."""


# what the ranks give, and what must come of it


def _given(rank: int, shape: int | tuple[int, ...], dtype: str = "float32", seed: int = 0) -> _Array:
    """Return a rank's array: small whole numbers, of which every dtype holds every sum exactly, in any order."""
    random = np.random.default_rng((seed, rank))
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(np.bool_)
    return random.integers(-3 if dtype.startswith(("f", "int")) else 0, 4, shape).astype(dtype)


def _reduced(group: Group, op: str, shape: int | tuple[int, ...], dtype: str = "float32", seed: int = 0) -> _Array:
    arrays = [_given(rank, shape, dtype, seed) for rank in range(group.size)]
    if op == "mean":
        total = np.sum([array.astype(np.float64) for array in arrays], axis=0)
        return (total / group.size).astype(arrays[0].dtype)  # type: ignore[no-any-return]
    reduced = arrays[0].copy()
    for array in arrays[1:]:
        reduced = _OPS[op](reduced, array)
    return reduced


def _ops_of(dtype: str) -> Iterator[str]:
    yield from ("sum", "product", "min", "max")
    if dtype.startswith("float"):
        yield "mean"
    else:
        yield from ("bitwise_and", "bitwise_or", "bitwise_xor")


def _same(got: Any, expected: _Array, what: object = "") -> None:
    assert isinstance(got, np.ndarray), (what, type(got))
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (what, got.dtype, got.shape, expected.shape)
    if not np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"):
        wrong = np.flatnonzero((got != expected).ravel())
        raise AssertionError(f"{what}: {len(wrong)} of {got.size} are wrong, from {wrong[0]} on: {got} != {expected}")


def _near(got: Any, expected: _Array, what: object = "") -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (what, got.dtype, got.shape, expected.shape)
    tolerance = 8 * float(np.finfo(expected.dtype).eps)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance, err_msg=str(what))


def _same_everywhere(group: Group, array: _Array) -> None:
    digest = np.frombuffer(hashlib.blake2b(array.tobytes(), digest_size=8).digest(), np.int64)
    told = group.all_gather(digest)
    assert (told == told[0]).all(), f"ranks have different bits: {told}"


def _expect(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was expected, nothing was raised")


def _uneven(group: Group, seed: int = 0, most: int = 40) -> list[int]:
    """Return rows for every rank, the same on all; one of them has none."""
    sizes = [int(rows) for rows in np.random.default_rng(seed).integers(1, most, group.size)]
    sizes[seed % group.size] = 0
    return sizes


def _cut(array: _Array, sizes: Sequence[int], part: int) -> _Array:
    start = sum(sizes[:part])
    return array[start : start + sizes[part]]


# the checks


def check_barrier(group: Group) -> None:
    """Barriers end, alone and among other calls."""
    for number in range(50):
        group.barrier()
        if number % 10 == 0:
            group.barrier_async().wait()
            assert group.all_reduce(np.array([number])).tolist() == [number * group.size]


def check_all_reduce_dtypes(group: Group) -> None:
    """Every dtype with every operation; integers wrap around."""
    for dtype in _DTYPES:
        for op in _ops_of(dtype):
            for size in (7, 1000):
                seed = size
                got = group.all_reduce(_given(group.rank, size, dtype, seed), op)
                expected = _reduced(group, op, size, dtype, size)
                (_near if op == "mean" else _same)(got, expected, (dtype, op, size))
        if dtype in _INTEGERS:
            ends = np.array([np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
            _same(group.all_reduce(ends), ends * np.array(group.size, dtype), dtype)


def check_all_reduce_sizes(group: Group) -> None:
    """Every size, into a fresh array, a given one and in place; the source stays as it was."""
    for size in (*_SIZES, 300_000):
        for op, dtype in (("sum", "float32"), ("max", "float64"), ("min", "int16")):
            given = _given(group.rank, size, dtype, size)
            kept, out = given.copy(), np.full_like(given, 77)
            expected = _reduced(group, op, size, dtype, size)
            _same(group.all_reduce(given, op), expected, (size, op))
            assert group.all_reduce(given, op, out=out) is out
            _same(out, expected, (size, op, "out"))
            _same(given, kept, "source")
            assert group.all_reduce(given, op, out=given) is given
            _same(given, expected, (size, op, "in place"))


def check_all_reduce_large(group: Group) -> None:
    """12 MB, in place and not, several times; random floats are near NumPy's and the same bit by bit on all ranks."""
    for turn, size in enumerate((3_000_000, 2_999_999, 1_000_003)):
        given = _given(group.rank, size, seed=turn)
        expected = _reduced(group, "sum", size, seed=turn)
        _same(group.all_reduce(given), expected, size)
        group.all_reduce(given, out=given)
        _same(given, expected, (size, "in place"))


def check_bits(group: Group) -> None:
    """The result of a reduction of random floats is the same bit by bit on every rank."""
    for dtype in ("float16", "float32", "float64"):
        for size in (5, 3000, 40_001, 400_000):
            arrays = [np.random.default_rng((size, rank)).random(size).astype(dtype) for rank in range(group.size)]
            for op in ("sum", "mean", "product"):
                got = group.all_reduce(arrays[group.rank], op)
                _same_everywhere(group, got)
                wide = np.array([array.astype(np.float64) for array in arrays])
                expected = wide.prod(axis=0) if op == "product" else wide.sum(axis=0)
                expected /= group.size if op == "mean" else 1
                _near(got, expected.astype(dtype), (dtype, size, op))


def check_not_finite(group: Group) -> None:
    """Infinities and NaNs come through: a NaN of any rank makes sums, minima and maxima NaN."""
    for special in range(group.size):
        values = np.array([np.inf, np.nan, 1.0, -np.inf, 0.0])
        given = values if group.rank == special else np.zeros(5)
        for dtype in ("float16", "float32", "float64"):
            for op, expected in (("sum", values), ("max", np.maximum(values, 0)), ("min", np.minimum(values, 0))):
                _same(group.all_reduce(given.astype(dtype), op), expected.astype(dtype), (special, dtype, op))


def check_layouts(group: Group) -> None:
    """0-d and many axes, gaps, Fortran order, read-only sources, lists and numbers, as sources and as results."""
    size, rank = group.size, group.rank
    total = size * (size + 1) // 2
    for value in (rank + 1, float(rank + 1), np.float32(rank + 1), np.array(rank + 1), [[rank + 1]], (rank + 1,)):
        got = group.all_reduce(value)
        _same(got, np.full_like(np.asarray(value), total), value)
    cube = _given(rank, (6, 5, 4))
    expected = _reduced(group, "sum", (6, 5, 4))
    read_only = cube.copy()
    read_only.flags.writeable = False
    for way in (lambda a: a, np.asfortranarray, lambda a: a.T, lambda a: a[::2, :, 1::2], lambda a: a[::-1]):
        _same(group.all_reduce(way(read_only)), np.ascontiguousarray(way(expected)))
        out = way(np.zeros((6, 5, 4), np.float32))
        assert group.all_reduce(way(cube), out=out) is out
        _same(out, way(expected))
        here = way(cube.copy())
        assert group.all_reduce(here, out=here) is here
        _same(here, way(expected))
        there = way(np.full((6, 5, 4), float(rank), np.float32))
        group.broadcast(there, root=size - 1)
        _same(there, np.full_like(there, size - 1))
    last = np.full(3, 9.0)
    last.flags.writeable = rank != size - 1
    _same(group.broadcast(last if rank == size - 1 else np.zeros(3), root=size - 1), np.full(3, 9.0))
    for shape in ((0, 3), (3, 0), (2, 0, 5)):
        _same(group.all_reduce(np.ones(shape)), np.ones(shape))
        _same(group.all_gather(np.ones(shape)), np.ones((size * shape[0], *shape[1:])))
    shifted = np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64)
    shifted[:] = rank
    _same(group.all_reduce(shifted), np.full(4, float(size * (size - 1) // 2)))


def check_reduce(group: Group) -> None:
    """Every root gets the reduction, the others None; their arrays stay as they were."""
    for root in range(group.size):
        for size, op, dtype in zip(_SIZES, ("sum", "max", "mean", "product", "min", "sum"), _DTYPES * 2, strict=False):
            op = "sum" if op == "mean" and not dtype.startswith("f") else op
            given = _given(group.rank, size, dtype, root)
            expected = _reduced(group, op, size, dtype, root)
            got = group.reduce(given, op, root=root)
            _same(given, _given(group.rank, size, dtype, root), "source")
            assert (got is None) == (group.rank != root)
            if got is not None:
                (_near if op == "mean" else _same)(got, expected, (root, size, op))
        mean = group.reduce(
            np.full(3, group.rank + 1.0), "mean", root=root, out=np.zeros(3) if group.rank == root else None
        )
        if mean is not None:
            _near(mean, np.full(3, (group.size + 1) / 2))
        here = np.full(9, 1.0)
        group.reduce(here, root=root, out=here)
        _same(here, np.full(9, float(group.size) if group.rank == root else 1.0), "in place")


def check_reduce_scatter(group: Group) -> None:
    """Every rank gets its part of the reduction, in equal parts and uneven ones."""
    for rows in (0, 1, 7, 1000, 70_000):
        sizes = [rows] * group.size
        for shape in ((rows * group.size,), (rows * group.size, 3)):
            given = _given(group.rank, shape, seed=rows)
            whole = _reduced(group, "sum", shape, seed=rows)
            _same(group.reduce_scatter(given), _cut(whole, sizes, group.rank), shape)
            _same(given, _given(group.rank, shape, seed=rows), "source")
    for seed, most in enumerate((5, 40, 40_000)):
        sizes = _uneven(group, seed, most)
        whole = _reduced(group, "max", (sum(sizes), 2), "int32")
        out = np.zeros((sizes[group.rank], 2), np.int32)
        given = _given(group.rank, (sum(sizes), 2), "int32")
        assert group.reduce_scatter(given, "max", sizes=sizes, out=out) is out
        _same(out, _cut(whole, sizes, group.rank), sizes)
    mean = group.reduce_scatter(np.full(2 * group.size, float(group.rank)), "mean")
    _near(mean, np.full(2, (group.size - 1) / 2))


def check_broadcast(group: Group) -> None:
    """Every root's array comes to all, of every dtype and size."""
    for root in range(group.size):
        for size, dtype in [*((size, "float32") for size in (*_SIZES, 300_000)), *((9, dtype) for dtype in _DTYPES)]:
            array = _given(group.rank, size, dtype, root)
            assert group.broadcast(array, root=root) is array
            _same(array, _given(root, size, dtype, root), (root, size, dtype))


def check_all_gather(group: Group) -> None:
    """The arrays of all ranks lie one behind the other, of one size or of several."""
    for size in (*_SIZES, 300_000):
        got = group.all_gather(_given(group.rank, size))
        _same(got, np.concatenate([_given(rank, size) for rank in range(group.size)]), size)
    for dtype in _DTYPES:
        got = group.all_gather(_given(group.rank, (3, 2), dtype))
        _same(got, np.concatenate([_given(rank, (3, 2), dtype) for rank in range(group.size)]), dtype)
    _same(group.all_gather(np.array(group.rank)), np.arange(group.size))
    for seed, most in enumerate((5, 40, 40_000)):
        sizes = _uneven(group, seed, most)
        own = _given(group.rank, (sizes[group.rank], 3))
        assert group.gather_sizes(own) == sizes
        out = np.zeros((sum(sizes), 3), np.float32)
        expected = np.concatenate([_given(rank, (sizes[rank], 3)) for rank in range(group.size)])
        assert group.all_gather(own, sizes=sizes, out=out) is out
        _same(out, expected, sizes)
    whole = np.zeros((group.size, 5))
    whole[group.rank] = group.rank
    group.all_gather(whole[group.rank : group.rank + 1], out=whole)
    _same(whole, np.repeat(np.arange(group.size), 5).reshape(group.size, 5) * 1.0, "in place")


def check_gather(group: Group) -> None:
    """Every root gets the arrays of all; the others None."""
    for root in range(group.size):
        for size in _SIZES:
            got = group.gather(_given(group.rank, size), root=root)
            assert (got is None) == (group.rank != root)
            if got is not None:
                _same(got, np.concatenate([_given(rank, size) for rank in range(group.size)]), (root, size))
        sizes = _uneven(group, root)
        out = np.zeros((sum(sizes), 2), np.int8) if group.rank == root else None
        assert group.gather(_given(group.rank, (sizes[group.rank], 2), "int8"), root=root, sizes=sizes, out=out) is out
        if out is not None:
            expected = np.concatenate([_given(rank, (sizes[rank], 2), "int8") for rank in range(group.size)])
            _same(out, expected, (root, sizes))


def check_scatter(group: Group) -> None:
    """Every rank gets its part of the root's array."""
    for root in range(group.size):
        for size in _SIZES:
            whole = _given(root, size * group.size)
            out = np.full(size, 77, np.float32)
            assert group.scatter(whole if group.rank == root else None, out, root=root) is out
            _same(out, _cut(whole, [size] * group.size, group.rank), (root, size))
        for most in (20, 50_000):
            sizes = _uneven(group, root, most)
            table = _given(root, (sum(sizes), 2), "uint16")
            part = np.zeros((2, sizes[group.rank]), np.uint16).T
            group.scatter(table if group.rank == root else None, part, root=root, sizes=sizes)
            _same(part, _cut(table, sizes, group.rank), (root, sizes))


def check_all_to_all(group: Group) -> None:
    """Part d of rank s is part s of rank d, in equal parts and uneven ones."""
    ranks, rank = range(group.size), group.rank
    for size in _SIZES:
        for shape in ((size,), (size, 2)):
            given = [_given(source, (group.size, *shape)) for source in ranks]
            got = group.all_to_all(given[rank].reshape(-1, *shape[1:]))
            _same(got, np.concatenate([given[source][rank] for source in ranks]), shape)
    for seed, most in enumerate((4, 30, 20_000)):
        table = np.random.default_rng(seed).integers(0, most, (group.size, group.size))
        parts = [[_given(source, (table[source, to], 2), "int64", to) for to in ranks] for source in ranks]
        own = np.concatenate(parts[rank])
        expected = np.concatenate([parts[source][rank] for source in ranks])
        sends, receives = table[rank].tolist(), table[:, rank].tolist()
        _same(group.all_to_all(own, send_sizes=sends), expected, sends)
        out = np.zeros_like(expected)
        assert group.all_to_all(own, send_sizes=sends, receive_sizes=receives, out=out) is out
        _same(out, expected, (sends, receives))
        _same(group.all_to_all_async(own, send_sizes=sends).result(), expected)


def check_objects(group: Group) -> None:
    """Numbers, texts, bytes, lists and dicts go to all, of different size on every rank."""
    values = [
        {"rank": rank, "text": "ü" * rank, "data": bytes(5000 * rank), "of": [None, 1.5]} for rank in range(group.size)
    ]
    for root in range(group.size):
        assert group.broadcast_object(values[root] if group.rank == root else None, root=root) == values[root]
        gathered = group.gather_objects(values[group.rank], root=root)
        assert gathered == (values if group.rank == root else None)
    assert group.all_gather_objects(values[group.rank]) == values
    assert group.all_gather_objects(None) == [None] * group.size
    _expect(UsageError, lambda: group.all_gather_objects(object()))


def check_send_receive(group: Group) -> None:
    """Messages arrive by tag and source, in order, whoever comes first; also to oneself."""
    rank, size = group.rank, group.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for number in _SIZES:
        ticket = group.send_async(_given(rank, number), after, tag=number)
        out = np.zeros(number, np.float32)
        assert group.recv(out, before, tag=number) == before
        _same(out, _given(before, number))
        ticket.wait()
    tickets = [group.send_async(np.array([rank, tag, turn]), after, tag=tag) for turn in range(5) for tag in range(4)]
    for tag in (2, 0, 3, 1):
        for turn in range(5):
            got = np.zeros(3, np.int64)
            group.recv(got, before, tag=tag)
            assert got.tolist() == [before, tag, turn]
    for ticket in tickets:
        ticket.wait()
    tickets = [group.send_async(np.full(10, rank), to, tag=7) for to in range(size)]
    sources = set()
    for _ in range(size):
        any_one = np.zeros(10, np.int64)
        source = group.recv(any_one, tag=7)
        sources.add(source)
        assert any_one.tolist() == [source] * 10
    assert sources == set(range(size))
    arrays = [np.zeros((2, 700_000)).T for _ in range(size)]
    receives = [group.recv_async(array, source, tag=8) for source, array in enumerate(arrays)]
    for to in range(size):
        group.send(np.full((700_000, 2), float(rank)), to, tag=8)
    for source, ticket in enumerate(receives):
        assert ticket.result() == source
        assert (arrays[source] == source).all()
    group.barrier()


def check_dropped_tickets(group: Group) -> None:
    """A message whose ticket and array nobody keeps is sent all the same."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for turn in range(10):
        group.send_async(np.full(100_000, float(turn)), after)
    got = np.zeros(100_000)
    for turn in range(10):
        group.recv(got, before)
        _same(got, np.full(100_000, float(turn)))
    group.barrier()


def check_async(group: Group) -> None:
    """Calls are carried out in the order in which they are made, synchronous ones among them."""
    finished: list[int] = []
    tickets: list[tuple[Ticket, _Array]] = []
    for turn in range(40):
        size = (3, 5000, 80_000)[turn % 3]
        given = np.full(size, turn + group.rank, np.int64)
        sum_ = np.full(size, turn * group.size + group.size * (group.size - 1) // 2)
        kind = turn % 5
        if kind == 0:
            _same(group.all_reduce(given), sum_, turn)
        elif kind == 1:
            tickets.append((group.all_reduce_async(given, out=given), sum_))
        elif kind == 2:
            root = turn % group.size
            tickets.append((group.broadcast_async(given, root=root), np.full(size, turn + root)))
        elif kind == 3:
            expected = np.repeat(np.arange(group.size) + turn, size)
            tickets.append((group.all_gather_async(given), expected))
        else:
            tickets.append((group.all_reduce_async(given), sum_))
        if kind:
            tickets[-1][0].add_done_callback(lambda _, turn=turn: finished.append(turn))  # type: ignore[misc]
    for ticket, expected in tickets:
        _same(ticket.result(), expected)
        assert ticket.done()
        assert ticket.exception() is None
    group.barrier_async().wait()
    assert finished == [turn for turn in range(40) if turn % 5]


def check_async_does_not_wait(group: Group) -> None:
    """Asynchronous calls return at once, though those before them wait for other ranks."""
    if group.rank == 0:
        tickets = [group.all_reduce_async(np.ones(5)) for _ in range(3)]
        assert not tickets[0].done()  # rank 1 has not called
        group.send(np.zeros(1), 1)
        tickets += [group.all_reduce_async(np.ones(5)) for _ in range(3)]
        for ticket in tickets:
            ticket.wait()
    else:
        if group.rank == 1:
            group.recv(np.zeros(1), 0)
        for _ in range(6):
            _same(group.all_reduce(np.ones(5)), np.full(5, float(group.size)))


def check_programs(group: Group) -> None:
    """A long random program, the same on all ranks: no call leaves anything behind that the next one stumbles over."""
    random = np.random.default_rng(42)
    for turn in range(150):
        size = int(random.choice([0, 1, 5, 900, 9000, 33_000, 70_000]))
        root, kind, has_op = int(random.integers(group.size)), int(random.integers(8)), bool(random.integers(2))
        given = _given(group.rank, size * group.size if kind in (4, 5) else size, seed=turn)
        all_given = [_given(rank, given.size, seed=turn) for rank in range(group.size)]
        op = "max" if has_op else "sum"
        whole = np.max(all_given, axis=0) if has_op else np.sum(all_given, axis=0)
        own = slice(size * group.rank, size * (group.rank + 1))
        if kind == 0:
            group.barrier()
        elif kind == 1:
            _same(group.all_reduce(given, op), whole, (turn, size))
        elif kind == 2:
            _same(group.broadcast(given, root=root), all_given[root], (turn, size))
        elif kind == 3:
            _same(group.all_gather(given), np.concatenate(all_given), (turn, size))
        elif kind == 4:
            _same(group.reduce_scatter(given, op), whole[own], (turn, size))
        elif kind == 5:
            _same(group.all_to_all(given), np.concatenate([each[own] for each in all_given]), (turn, size))
        elif kind == 6:
            got = group.reduce(given, op, root=root)
            _same(whole if got is None else got, whole, (turn, size))
        else:
            got = group.gather(given, root=root)
            _same(np.concatenate(all_given) if got is None else got, np.concatenate(all_given), (turn, size))


def check_subgroups(group: Group) -> None:
    """Parts of the group work as groups, also while the whole one does."""
    size, rank = group.size, group.rank
    backwards = group.subgroup(reversed(range(size)))
    assert backwards is not None
    assert (backwards.rank, backwards.size, backwards.ranks) == (size - 1 - rank, size, group.ranks[::-1])
    _same(backwards.all_gather(np.array(rank)), np.arange(size)[::-1])
    first = group.subgroup([0])
    assert (first is None) == (rank != 0)
    if first is not None:
        _same(first.all_reduce(np.ones(3), "mean"), np.ones(3))
        first.barrier()
        first.close()
    parts = group.split(rank % 2, key=-rank)
    assert parts is not None
    members = [other for other in range(size) if other % 2 == rank % 2][::-1]
    assert parts.ranks == tuple(group.ranks[other] for other in members)
    for turn, number in enumerate((10, 100_000, 3)):
        got = parts.all_reduce(np.full(number, rank + turn))
        _same(got, np.full(number, sum(members) + turn * len(members)))
        group.barrier()
    again = group.split(None if rank == 0 else 5)
    assert (again is None) == (rank == 0)
    if again is not None:
        assert again.ranks == group.ranks[1:]
        _same(again.all_gather(np.array(rank)), np.arange(1, size))
    rest = group.difference([group.ranks[0]])
    both = group.intersection(group.ranks[1:])
    assert (rest is None) == (both is None) == (rank == 0)
    for made in (rest, both):
        if made is not None:
            assert made.ranks == group.ranks[1:]
            made.barrier()
            made.close()
    for made in (again, parts, backwards):
        if made is not None:
            made.close()
    _expect(UsageError, lambda: group.subgroup([0, 0]))
    _expect(UsageError, lambda: group.subgroup([size]))
    _expect(UsageError, lambda: group.subgroup([]))
    group.barrier()


def check_union(group: Group) -> None:
    """Two groups become one though no rank is in both."""
    half = group.split(int(group.rank >= group.size // 2))
    assert half is not None
    others = [rank for rank in group.ranks if rank not in half.ranks]
    union = half.union(others)
    assert union is not None
    assert sorted(union.ranks) == sorted(group.ranks)
    assert union.ranks[union.rank] == group.ranks[group.rank]
    _same(union.all_gather(np.array(group.ranks[group.rank])), np.array(union.ranks))
    union.close()
    half.close()
    group.barrier()


def check_threads(group: Group) -> None:
    """Several groups of the same ranks are used at once, from a thread each."""
    made = [group.subgroup(range(group.size)) for _ in range(3)]
    errors: list[BaseException] = []

    def work(own: Group, number: int) -> None:
        try:
            for turn in range(30):
                given = np.full((10, 20_000, 90_000)[turn % 3], number * turn + own.rank)
                expected = own.size * number * turn + own.size * (own.size - 1) // 2
                assert (own.all_reduce(given) == expected).all()
                after, before = (own.rank + 1) % own.size, (own.rank - 1) % own.size
                ticket = own.send_async(np.array([number, turn]), after)
                got = np.zeros(2, np.int64)
                own.recv(got, before)
                ticket.wait()
                assert got.tolist() == [number, turn]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each, number)) for number, each in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for each in made:
        assert each is not None
        each.close()
    group.barrier()


def check_wrong_use(group: Group) -> None:
    """What one rank can see to be wrong raises UsageError before anything is sent; the group goes on."""
    size, rank = group.size, group.rank
    ones = np.ones(size)
    read_only = np.ones(3)
    read_only.flags.writeable = False
    uneven = [1] * (size + 1)
    calls: tuple[Callable[[], object], ...] = (
        lambda: group.all_reduce(ones, "median"),
        lambda: group.all_reduce(np.ones(3, int), "mean"),
        lambda: group.all_reduce(ones, "bitwise_or"),
        lambda: group.all_reduce(np.ones(3, complex)),
        lambda: group.all_reduce(np.array(["text"])),
        lambda: group.all_reduce(np.ones(3, ">f8")),
        lambda: group.all_reduce(ones, out=np.ones(size + 1)),
        lambda: group.all_reduce(ones, out=np.ones(size, np.float32)),
        lambda: group.all_reduce(read_only, out=read_only),
        lambda: group.reduce(read_only, root=rank, out=read_only),
        lambda: group.reduce(ones, root=size),
        lambda: group.broadcast(ones, root=-1),
        lambda: group.broadcast([1, 2]),
        lambda: group.broadcast(read_only, root=(rank + 1) % size),
        lambda: group.reduce_scatter(np.ones(size + 1)),
        lambda: group.reduce_scatter(np.ones(())),
        lambda: group.reduce_scatter(ones, sizes=uneven),
        lambda: group.all_gather(ones, sizes=[size + 1] * size),
        lambda: group.all_gather(ones, sizes=uneven),
        lambda: group.scatter(np.ones(size + 1), np.ones(1), root=rank),
        lambda: group.scatter(ones, np.ones(1, int), root=rank),
        lambda: group.scatter(ones, np.ones(2), sizes=[1] * size, root=(rank + 1) % size),
        lambda: group.all_to_all(np.ones(size + 1)),
        lambda: group.all_to_all(ones, send_sizes=[-1, *[1] * (size - 1)]),
        lambda: group.all_to_all(ones, send_sizes=[1] * size, receive_sizes=uneven),
        lambda: group.all_to_all(ones, send_sizes=[1] * size, receive_sizes=[2] * size),
        lambda: group.send(ones, size),
        lambda: group.recv(read_only, 0),
        lambda: group.recv(ones, -1),
        lambda: group.union([len(group.ranks) + 1000]),
    )
    for number, call in enumerate(calls):
        try:
            call()
        except UsageError:
            continue
        raise AssertionError(f"call {number} of those that are wrong raised nothing")
    _same(group.all_reduce(ones), np.full(size, float(size)))


def check_explain(group: Group) -> None:
    """The group says how it does things, before and after it has done them."""
    for operation in ("all_reduce", "broadcast", "all_to_all", "barrier"):
        for num_bytes in (0, 1000, 10_000_000):
            text = group.explain(num_bytes, operation)
            assert text.startswith(f"{operation} of {num_bytes:,} bytes on {group.size} ranks: "), text
    group.all_reduce(np.ones(500_000, np.float32))
    text = group.explain(2_000_000)
    chosen = [line.split() for line in text.splitlines() if line.startswith("*")]
    assert len(chosen) == 1, text
    assert chosen[0][1] in text.splitlines()[0], text
    assert "µs" in text or "ms" in text
    _expect(UsageError, lambda: group.explain(5, "dance"))


COLLECTIVE_CHECKS: Final[Mapping[str, Check]] = {
    check.__name__: check
    for check in (
        check_barrier,
        check_all_reduce_dtypes,
        check_all_reduce_sizes,
        check_all_reduce_large,
        check_bits,
        check_not_finite,
        check_layouts,
        check_reduce,
        check_reduce_scatter,
        check_broadcast,
        check_all_gather,
        check_gather,
        check_scatter,
        check_all_to_all,
        check_objects,
        check_send_receive,
        check_dropped_tickets,
        check_async,
        check_async_does_not_wait,
        check_programs,
        check_subgroups,
        check_union,
        check_threads,
        check_wrong_use,
        check_explain,
    )
}
"""The checks by name."""

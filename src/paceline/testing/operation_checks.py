"""Check single operations against NumPy; :mod:`.collectives` lists the checks."""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.collectives import Group
from paceline.testing.group_arrays import (
    DTYPES,
    INTEGERS,
    SIZES,
    cut,
    near,
    ops_of,
    reduced,
    same,
    same_everywhere,
    sample,
    uneven,
)


def check_barrier(group: Group) -> None:
    """Barriers complete, both in sequence and between other calls."""
    for number in range(50):
        group.barrier()
        if number % 10 == 0:
            group.barrier_async().wait()
            assert group.all_reduce(np.array([number])).tolist() == [number * group.size]


def check_all_reduce_dtypes(group: Group) -> None:
    """Every dtype works with every operation; integers wrap around."""
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for size in (7, 1000):
                seed = size
                got = group.all_reduce(sample(group.rank, size, dtype, seed), op)
                expected = reduced(group, op, size, dtype, size)
                (near if op == "mean" else same)(got, expected, (dtype, op, size))
        if dtype in INTEGERS:
            ends = np.array([np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
            same(group.all_reduce(ends), ends * np.array(group.size, dtype), dtype)


def check_all_reduce_sizes(group: Group) -> None:
    """Results of every size are correct in a new array, in a given array and in place; the source does not change."""
    for size in (*SIZES, 300_000):
        for op, dtype in (("sum", "float32"), ("max", "float64"), ("min", "int16")):
            given = sample(group.rank, size, dtype, size)
            source, out = given.copy(), np.full_like(given, 77)
            expected = reduced(group, op, size, dtype, size)
            same(group.all_reduce(given, op), expected, (size, op))
            assert group.all_reduce(given, op, out=out) is out
            same(out, expected, (size, op, "out"))
            same(given, source, "source")
            assert group.all_reduce(given, op, out=given) is given
            same(given, expected, (size, op, "in place"))


def check_all_reduce_large(group: Group) -> None:
    """Sums of 12 MB of random floats, in place or not, are close to NumPy's sums and bit-identical on all ranks."""
    for turn, size in enumerate((3_000_000, 1_000_003)):
        given = sample(group.rank, size, seed=turn)
        expected = reduced(group, "sum", size, seed=turn)
        same(group.all_reduce(given), expected, size)
        group.all_reduce(given, out=given)
        same(given, expected, (size, "in place"))


def check_bits(group: Group) -> None:
    """A reduction of random floats is bit-identical on all ranks."""
    for dtype in ("float16", "float32", "float64"):
        for size in (5, 3000, 40_001, 400_000):
            arrays = [np.random.default_rng((size, rank)).random(size).astype(dtype) for rank in range(group.size)]
            for op in ("sum", "mean", "product"):
                got = group.all_reduce(arrays[group.rank], op)
                same_everywhere(group, got)
                wide = np.array([array.astype(np.float64) for array in arrays])
                expected = wide.prod(axis=0) if op == "product" else wide.sum(axis=0)
                expected /= group.size if op == "mean" else 1
                near(got, expected.astype(dtype), (dtype, size, op))


def check_not_finite(group: Group) -> None:
    """Infinities and NaNs are kept: a NaN of any rank makes sums, minima and maxima NaN."""
    for special in range(group.size):
        values = np.array([np.inf, np.nan, 1.0, -np.inf, 0.0])
        given = values if group.rank == special else np.zeros(5)
        for dtype in ("float16", "float32", "float64"):
            for op, expected in (("sum", values), ("max", np.maximum(values, 0)), ("min", np.minimum(values, 0))):
                same(group.all_reduce(given.astype(dtype), op), expected.astype(dtype), (special, dtype, op))


def check_layouts(group: Group) -> None:
    """0-d and many axes, gaps, Fortran order, read-only sources, lists and numbers work as sources and results."""
    size, rank = group.size, group.rank
    total = size * (size + 1) // 2
    for value in (rank + 1, float(rank + 1), np.float32(rank + 1), np.array(rank + 1), [[rank + 1]], (rank + 1,)):
        got = group.all_reduce(value)
        same(got, np.full_like(np.asarray(value), total), value)
    cube = sample(rank, (6, 5, 4))
    expected = reduced(group, "sum", (6, 5, 4))
    read_only = cube.copy()
    read_only.flags.writeable = False
    for way in (lambda a: a, np.asfortranarray, lambda a: a.T, lambda a: a[::2, :, 1::2], lambda a: a[::-1]):
        same(group.all_reduce(way(read_only)), np.ascontiguousarray(way(expected)))
        out = way(np.zeros((6, 5, 4), np.float32))
        assert group.all_reduce(way(cube), out=out) is out
        same(out, way(expected))
        local = way(cube.copy())
        assert group.all_reduce(local, out=local) is local
        same(local, way(expected))
        filled = way(np.full((6, 5, 4), float(rank), np.float32))
        group.broadcast(filled, root=size - 1)
        same(filled, np.full_like(filled, size - 1))
    last = np.full(3, 9.0)
    last.flags.writeable = rank != size - 1
    same(group.broadcast(last if rank == size - 1 else np.zeros(3), root=size - 1), np.full(3, 9.0))
    for shape in ((0, 3), (3, 0), (2, 0, 5)):
        same(group.all_reduce(np.ones(shape)), np.ones(shape))
        same(group.all_gather(np.ones(shape)), np.ones((size * shape[0], *shape[1:])))
    shifted = np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64)
    shifted[:] = rank
    same(group.all_reduce(shifted), np.full(4, float(size * (size - 1) // 2)))


def check_reduce(group: Group) -> None:
    """Every root gets the reduction, other ranks None; their arrays do not change."""
    for root in range(group.size):
        for size, op, dtype in zip(SIZES, ("sum", "max", "mean", "product", "min", "sum"), DTYPES * 2, strict=False):
            op = "sum" if op == "mean" and not dtype.startswith("f") else op
            given = sample(group.rank, size, dtype, root)
            expected = reduced(group, op, size, dtype, root)
            got = group.reduce(given, op, root=root)
            same(given, sample(group.rank, size, dtype, root), "source")
            assert (got is None) == (group.rank != root)
            if got is not None:
                (near if op == "mean" else same)(got, expected, (root, size, op))
        mean = group.reduce(
            np.full(3, group.rank + 1.0), "mean", root=root, out=np.zeros(3) if group.rank == root else None
        )
        if mean is not None:
            near(mean, np.full(3, (group.size + 1) / 2))
        local = np.full(9, 1.0)
        group.reduce(local, root=root, out=local)
        same(local, np.full(9, float(group.size) if group.rank == root else 1.0), "in place")


def check_reduce_scatter(group: Group) -> None:
    """Every rank gets its part of the reduction, with equal and uneven parts."""
    for rows in (0, 1, 7, 1000, 70_000):
        sizes = [rows] * group.size
        for shape in ((rows * group.size,), (rows * group.size, 3)):
            given = sample(group.rank, shape, seed=rows)
            complete = reduced(group, "sum", shape, seed=rows)
            same(group.reduce_scatter(given), cut(complete, sizes, group.rank), shape)
            same(given, sample(group.rank, shape, seed=rows), "source")
    for seed, most in enumerate((5, 40, 40_000)):
        sizes = uneven(group, seed, most)
        complete = reduced(group, "max", (sum(sizes), 2), "int32")
        out = np.zeros((sizes[group.rank], 2), np.int32)
        given = sample(group.rank, (sum(sizes), 2), "int32")
        assert group.reduce_scatter(given, "max", sizes=sizes, out=out) is out
        same(out, cut(complete, sizes, group.rank), sizes)
    mean = group.reduce_scatter(np.full(2 * group.size, float(group.rank)), "mean")
    near(mean, np.full(2, (group.size - 1) / 2))


def check_broadcast(group: Group) -> None:
    """Every root's array reaches all ranks, in every dtype and size."""
    for root in range(group.size):
        for size, dtype in [*((size, "float32") for size in (*SIZES, 300_000)), *((9, dtype) for dtype in DTYPES)]:
            array = sample(group.rank, size, dtype, root)
            assert group.broadcast(array, root=root) is array
            same(array, sample(root, size, dtype, root), (root, size, dtype))


def check_all_gather(group: Group) -> None:
    """The arrays of all ranks are concatenated, with equal or different sizes."""
    for size in (*SIZES, 300_000):
        got = group.all_gather(sample(group.rank, size))
        same(got, np.concatenate([sample(rank, size) for rank in range(group.size)]), size)
    for dtype in DTYPES:
        got = group.all_gather(sample(group.rank, (3, 2), dtype))
        same(got, np.concatenate([sample(rank, (3, 2), dtype) for rank in range(group.size)]), dtype)
    same(group.all_gather(np.array(group.rank)), np.arange(group.size))
    for seed, most in enumerate((5, 40, 40_000)):
        sizes = uneven(group, seed, most)
        own = sample(group.rank, (sizes[group.rank], 3))
        assert group.gather_sizes(own) == sizes
        out = np.zeros((sum(sizes), 3), np.float32)
        expected = np.concatenate([sample(rank, (sizes[rank], 3)) for rank in range(group.size)])
        assert group.all_gather(own, sizes=sizes, out=out) is out
        same(out, expected, sizes)
    complete = np.zeros((group.size, 5))
    complete[group.rank] = group.rank
    group.all_gather(complete[group.rank : group.rank + 1], out=complete)
    same(complete, np.repeat(np.arange(group.size), 5).reshape(group.size, 5) * 1.0, "in place")


def check_gather(group: Group) -> None:
    """Every root gets the arrays of all ranks; other ranks get None."""
    for root in range(group.size):
        for size in SIZES:
            got = group.gather(sample(group.rank, size), root=root)
            assert (got is None) == (group.rank != root)
            if got is not None:
                same(got, np.concatenate([sample(rank, size) for rank in range(group.size)]), (root, size))
        sizes = uneven(group, root)
        out = np.zeros((sum(sizes), 2), np.int8) if group.rank == root else None
        assert group.gather(sample(group.rank, (sizes[group.rank], 2), "int8"), root=root, sizes=sizes, out=out) is out
        if out is not None:
            expected = np.concatenate([sample(rank, (sizes[rank], 2), "int8") for rank in range(group.size)])
            same(out, expected, (root, sizes))


def check_scatter(group: Group) -> None:
    """Every rank gets its part of the root's array."""
    for root in range(group.size):
        for size in SIZES:
            complete = sample(root, size * group.size)
            out = np.full(size, 77, np.float32)
            assert group.scatter(complete if group.rank == root else None, out, root=root) is out
            same(out, cut(complete, [size] * group.size, group.rank), (root, size))
        for most in (20, 50_000):
            sizes = uneven(group, root, most)
            table = sample(root, (sum(sizes), 2), "uint16")
            part = np.zeros((2, sizes[group.rank]), np.uint16).T
            group.scatter(table if group.rank == root else None, part, root=root, sizes=sizes)
            same(part, cut(table, sizes, group.rank), (root, sizes))


def check_all_to_all(group: Group) -> None:
    """Part d of rank s is part s of rank d, with equal and uneven parts."""
    ranks, rank = range(group.size), group.rank
    for size in SIZES:
        for shape in ((size,), (size, 2)):
            given = [sample(source, (group.size, *shape)) for source in ranks]
            got = group.all_to_all(given[rank].reshape(-1, *shape[1:]))
            same(got, np.concatenate([given[source][rank] for source in ranks]), shape)
    for seed, most in enumerate((4, 30, 20_000)):
        table = np.random.default_rng(seed).integers(0, most, (group.size, group.size))
        parts = [[sample(source, (table[source, to], 2), "int64", to) for to in ranks] for source in ranks]
        own = np.concatenate(parts[rank])
        expected = np.concatenate([parts[source][rank] for source in ranks])
        sends, receives = table[rank].tolist(), table[:, rank].tolist()
        same(group.all_to_all(own, send_sizes=sends), expected, sends)
        out = np.zeros_like(expected)
        assert group.all_to_all(own, send_sizes=sends, receive_sizes=receives, out=out) is out
        same(out, expected, (sends, receives))
        same(group.all_to_all_async(own, send_sizes=sends).result(), expected)


CHECKS: Final = (
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
)

"""Reductions of raw memory equal a NumPy version (the twin), and 16-bit floats equal the results of torch."""

from __future__ import annotations

import ctypes
import functools
import itertools
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.reference.combine import reference
from tests.waiting import in_threads

from paceline.kernels import combine
from paceline.kernels.combine import BITWISE_AND, DTYPES, MAX, MIN, PRODUCT, SUM, combiner

Array = npt.NDArray[Any]

COUNTS = (0, 1, 7, 64, 3001)
FLOATS = ("float32", "float64", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")
CASES = [(dtype, op) for dtype in DTYPES for op in range(7) if dtype not in FLOATS or op < BITWISE_AND]
ALL_BITS = np.arange(1 << 16, dtype=np.uint16)
PROTOTYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_double
)
GUARD = 0xA5


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def as_bfloat16(values: npt.ArrayLike) -> Array:
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def edges(dtype: str) -> Array:
    if dtype == "bool":
        return np.array([False, True])
    kind = numpy_dtype(dtype)
    if dtype not in FLOATS:
        most = np.iinfo(kind)
        return np.array([most.min, most.min + 1, most.max, most.max - 1, 0, 1, 2, 3], kind)
    values = [0.0, -0.0, 1.0, -1.0, 1.5, np.inf, -np.inf, np.nan, -np.nan]
    if dtype == "bfloat16":
        return np.concatenate([as_bfloat16(values), np.array([1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7FFF], "u2")])
    most_float = np.finfo(kind)
    tiny, least, eps = most_float.tiny, most_float.smallest_subnormal, most_float.eps
    values += [float(v) for v in (most_float.max, -most_float.max, tiny, -tiny, least, -least, tiny - least, 1 + eps)]
    return np.array(values, kind)


def make_sources(dtype: str, num_sources: int, count: int, seed: str = "") -> list[Array]:
    """Return sources at unaligned addresses: a third extreme values, a third ordinary values, a third random bits."""
    generator = np.random.default_rng(zlib.crc32(f"{dtype} {num_sources} {count} {seed}".encode()))
    kind, sources = numpy_dtype(dtype), []
    for k in range(num_sources):
        source = np.empty(count + k, kind)[k:]
        source[:] = generator.choice(edges(dtype), count)
        if dtype != "bool":
            places = generator.integers(0, 3, count)
            random_bits = np.frombuffer(generator.bytes(count * kind.itemsize), kind)
            normal = generator.standard_normal(count) * 10
            ordinary = as_bfloat16(normal) if dtype == "bfloat16" else normal.astype(np.int8).astype(kind)
            source[places == 1] = random_bits[places == 1]
            source[places == 2] = (normal.astype(kind) if kind.kind == "f" else ordinary)[places == 2]
        sources.append(source)
    return sources


def run(address: int, target: Array, sources: list[Array], op: int, scale: float = 1.0) -> None:
    table = np.array([source.ctypes.data for source in sources], np.uint64)
    PROTOTYPE(address)(target.ctypes.data, table.ctypes.data, len(sources), len(target), op, scale)


def combined(dtype: str, op: int, sources: list[Array], scale: float = 1.0) -> Array:
    """Run the native function into a new target, and check that it writes nothing else."""
    kind, count = numpy_dtype(dtype), len(sources[0])
    memory = np.full((count + 400) * kind.itemsize, GUARD, np.uint8)
    target = memory[kind.itemsize : (1 + count) * kind.itemsize].view(kind)
    before = [source.copy() for source in sources]
    run(combiner(dtype), target, sources, op, scale)
    assert (memory[: kind.itemsize] == GUARD).all()
    assert (memory[(1 + count) * kind.itemsize :] == GUARD).all()
    for source, copy in zip(sources, before, strict=True):
        assert source.tobytes() == copy.tobytes()
    return target


def is_nan(dtype: str, values: Array) -> npt.NDArray[np.bool_]:
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.isnan(values) if dtype in FLOATS else np.zeros(len(values), np.bool_)


def assert_same(dtype: str, found: Array, expected: Array) -> None:
    """Check that the bits are equal; all NaNs count as equal."""
    nan = is_nan(dtype, expected)
    np.testing.assert_array_equal(is_nan(dtype, found), nan)
    bits = f"u{numpy_dtype(dtype).itemsize}"
    np.testing.assert_array_equal(found.view(bits)[~nan], expected.view(bits)[~nan], strict=True)


@functools.cache
def eight_sources(dtype: str, count: int) -> list[Array]:
    """Return the sources of all operations."""
    return make_sources(dtype, 8, count)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_function_and_twin_agree(dtype: str, op: int) -> None:
    for num_sources, count in itertools.product((1, 2, 3, 4, 5, 8), COUNTS):
        sources = eight_sources(dtype, count)[:num_sources]
        for scale in (1.0, 1 / 3):
            assert_same(dtype, combined(dtype, op, sources, scale), reference(dtype, op, sources, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_sources", [1, 2, 3, 5])
def test_target_may_be_any_source(dtype: str, num_sources: int) -> None:
    for op, position, count in itertools.product((SUM, MAX), range(num_sources), COUNTS):
        sources = make_sources(dtype, num_sources, count, "in place")
        expected = reference(dtype, op, sources, 0.25)
        run(combiner(dtype), sources[position], sources, op, 0.25)
        assert_same(dtype, sources[position], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_source_is_copied_bit_by_bit(dtype: str) -> None:
    (source,) = make_sources(dtype, 1, 3001)
    assert combined(dtype, SUM, [source]).tobytes() == source.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_bitwise_operation_on_floats_writes_nothing(dtype: str) -> None:
    target = combined(dtype, BITWISE_AND, make_sources(dtype, 2, 100))
    assert (target.view(np.uint8) == GUARD).all()


def test_sums_are_computed_in_the_order_of_the_sources() -> None:
    large, one = np.full(100, 2.0**24, np.float32), np.ones(100, np.float32)
    assert (combined("float32", SUM, [one, one, large]) == 2.0**24 + 2).all()
    assert (combined("float32", SUM, [large, one, one]) == 2.0**24).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_sums_are_rounded_once(dtype: str) -> None:
    one, small = (0x3C00, 0x0C00) if dtype == "float16" else (0x3F80, 0x3B00)  # a quarter of an ulp of 1
    sources = [np.full(70, bits, np.uint16).view(numpy_dtype(dtype)) for bits in (one, small, small, small)]
    assert_same(dtype, combined(dtype, SUM, sources), reference(dtype, SUM, sources, 1.0))
    assert (combined(dtype, SUM, sources).view(np.uint16) == one + 1).all()  # not rounded after each addition


@pytest.mark.parametrize("op", [MIN, MAX])
def test_bool_min_and_max_of_all_pairs(op: int) -> None:
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    assert combined("bool", op, [a, b]).tolist() == (a & b if op == MIN else a | b).tolist()


def test_a_sum_of_bools_is_or_and_a_product_is_and() -> None:
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    assert combined("bool", SUM, [a, b]).tolist() == [False, True, True, True]
    assert combined("bool", PRODUCT, [a, b]).tolist() == [False, False, False, True]


@pytest.fixture(scope="module", params=["float16", "float16 without F16C", "bfloat16"])
def half(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Return a 16-bit dtype and its function. float16 has one function with F16C instructions and one without."""
    dtype, *without = request.param.split(maxsplit=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if without:
            monkeypatch.setattr(combine, "_converts_float16", lambda: False)
        return dtype, combine._compiled.__wrapped__(dtype)


def test_every_16_bit_value_is_converted_exactly(half: tuple[str, int]) -> None:
    dtype, address = half
    values = ALL_BITS.view(numpy_dtype(dtype))
    nothing = np.full(1 << 16, 0x8000, np.uint16).view(values.dtype)  # -0, because x + -0 is x for all x
    target = np.empty_like(values)
    run(address, target, [values, nothing], SUM)
    assert_same(dtype, target, values)


@pytest.mark.parametrize("scale", [1 / 3, 3.0, 2.0**-12, 2.0**-13 * 1.1, 2.0**-24, 2.0**-130, 2.0**12, 1e30, np.inf])
def test_every_16_bit_value_is_rounded_to_nearest_even(half: tuple[str, int], scale: float) -> None:
    dtype, address = half
    values = ALL_BITS.view(numpy_dtype(dtype))
    target = np.empty_like(values)
    for size in (len(values), 63):  # a multiple of the vector width, and a remainder
        target[:] = 0
        for start in range(0, len(values), size):
            run(address, target[start : start + size], [values[start : start + size]], SUM, scale)
        assert_same(dtype, target, reference(dtype, SUM, [values], scale))


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_sums_equal_the_sums_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    sources = make_sources(dtype, 4, 3001, "torch")
    tensors = [torch.from_numpy(source.view(np.int16)).view(getattr(torch, dtype)).float() for source in sources]
    total = (((tensors[0] + tensors[1]) + tensors[2]) + tensors[3]) * 0.25
    expected = total.to(getattr(torch, dtype)).view(torch.int16).numpy().view(numpy_dtype(dtype))
    assert_same(dtype, combined(dtype, SUM, sources, 0.25), expected)
    assert_same(dtype, reference(dtype, SUM, sources, 0.25), expected)


def test_all_threads_share_one_function_per_dtype() -> None:
    found = in_threads(*[lambda: [combiner(dtype) for dtype in DTYPES]] * 3)
    assert len(set(found[0])) == len(DTYPES)
    assert found == [found[0]] * 3

"""Create arrays for the checks of groups, computable on every rank, and compare results."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.collectives import Group

Array = npt.NDArray[Any]
INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES: Final = ("float16", "float32", "float64", *INTEGERS, "bool")
OPS: Final[Mapping[str, Any]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
SIZES: Final = (0, 1, 7, 1000, 4097, 70_000)
"""Numbers of items; in float32 they surround every size up to 256 KB at which a group changes its algorithm."""


def sample(rank: int, shape: int | tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Array:
    """Return a rank's array: small whole numbers whose sums are exact in every dtype and order."""
    low, stop = (0, 2) if dtype == "bool" else (-3 if dtype.startswith(("f", "int")) else 0, 4)
    return _numbers(rank, shape, low, stop, seed).astype(dtype)


@functools.lru_cache(maxsize=64)
def _numbers(rank: int, shape: int | tuple[int, ...], low: int, stop: int, seed: int) -> npt.NDArray[np.int8]:
    """Return random numbers (int8), generated once per process."""
    return np.random.default_rng((seed, rank)).integers(low, stop, shape, np.int8)


def reduced(group: Group, op: str, shape: int | tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Array:
    arrays = [sample(rank, shape, dtype, seed) for rank in range(group.size)]
    if op == "mean":
        total = np.sum([array.astype(np.float64) for array in arrays], axis=0)
        return (total / group.size).astype(arrays[0].dtype)  # type: ignore[no-any-return]
    reduced = arrays[0].copy()
    for array in arrays[1:]:
        reduced = OPS[op](reduced, array)
    return reduced


def ops_of(dtype: str) -> Iterator[str]:
    yield from ("sum", "product", "min", "max")
    if dtype.startswith("float"):
        yield "mean"
    else:
        yield from ("bitwise_and", "bitwise_or", "bitwise_xor")


def same(got: Any, expected: Array, context: object = "") -> None:
    """Check that an array is exactly equal to the expected one."""
    assert isinstance(got, np.ndarray), (context, type(got))
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (context, got.dtype, got.shape, expected.shape)
    if not np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"):
        wrong = np.flatnonzero((got != expected).ravel())
        raise AssertionError(
            f"{context}: {len(wrong)} of {got.size} elements are wrong, the first at index {wrong[0]}: "
            f"{got} != {expected}"
        )


def near(got: Any, expected: Array, context: object = "") -> None:
    """Check that an array is equal to the expected one up to rounding."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (context, got.dtype, got.shape, expected.shape)
    tolerance = 8 * float(np.finfo(expected.dtype).eps)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance, err_msg=str(context))


def same_everywhere(group: Group, array: Array) -> None:
    digest = np.frombuffer(hashlib.blake2b(array.tobytes(), digest_size=8).digest(), np.int64)
    digests = group.all_gather(digest)
    assert (digests == digests[0]).all(), f"ranks have different bits: {digests}"


def expect(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> Exception:
    """Check that a call raises an error of this type, and return the error."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind}, but nothing was raised")


def uneven(group: Group, seed: int = 0, most: int = 40) -> list[int]:
    """Return a random number of rows for each rank, one of them 0. The result is the same on every rank."""
    sizes = [int(rows) for rows in np.random.default_rng(seed).integers(1, most, group.size)]
    sizes[seed % group.size] = 0
    return sizes


def cut(array: Array, sizes: Sequence[int], part: int) -> Array:
    start = sum(sizes[:part])
    return array[start : start + sizes[part]]

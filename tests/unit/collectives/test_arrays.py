from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.collectives.arrays import ArrayMemory, as_array, empty_like, view_bytes
from paceline.errors import UsageError
from paceline.kernels.combine import DTYPES


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_every_dtype_has_a_name(dtype: str) -> None:
    memory = ArrayMemory(np.zeros((2, 3), dtype))
    assert (memory.dtype, memory.shape, memory.count) == (dtype, (2, 3), 6)
    assert memory.num_bytes == 6 * memory.item_bytes == 6 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("character", "bBhHiIlLqQpefd?")
def test_every_notation_of_a_dtype_is_accepted(character: str) -> None:
    assert ArrayMemory(np.zeros(2, character)).dtype == np.dtype(character).name


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(6.0)
    memory = ArrayMemory(array, target=True)
    assert memory.address == array.ctypes.data
    view_bytes(memory.address, memory.num_bytes)[:8] = np.array([7.0]).tobytes()
    memory.copy_back()
    assert array.tolist() == [7, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("way", [lambda a: a.T, lambda a: a[::2], lambda a: a[:, ::-1]], ids=["T", "rows", "backwards"])
def test_arrays_with_gaps_are_copied_and_written_back(way: object) -> None:
    assert callable(way)
    whole = np.zeros((4, 3), np.float32)
    array = way(whole)
    memory = ArrayMemory(array, target=True)
    view_bytes(memory.address, memory.num_bytes)[:] = np.arange(array.size, dtype=np.float32).tobytes()
    assert not whole.any()
    memory.copy_back()
    assert array.tolist() == np.arange(array.size).reshape(array.shape).tolist()


def test_an_array_without_target_is_never_written() -> None:
    array = np.arange(6)[::2]
    memory = ArrayMemory(array)
    view_bytes(memory.address, memory.num_bytes)[:] = bytes(memory.num_bytes)
    memory.copy_back()
    assert array.tolist() == [0, 2, 4]


def test_memory_mapped_files_are_accepted(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "numbers", np.float32, "w+", shape=4)
    memory = ArrayMemory(mapped, target=True)
    view_bytes(memory.address, memory.num_bytes)[:] = np.ones(4, np.float32).tobytes()
    assert mapped.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(2, complex), "pairs of floats"),
        (np.zeros(2, ">f4"), "expected one of"),
        (np.array(["text"]), "expected one of"),
        (np.zeros(2, "M8[s]"), "expected one of"),
        (np.zeros(2, [("a", "i4")]), "expected one of"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "masked|MaskedArray"),
        ([1, 2], "got list, expected a NumPy array"),
        (None, "got NoneType"),
    ],
)
def test_non_numeric_arrays_are_rejected(array: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ArrayMemory(array)


def test_a_read_only_target_is_rejected() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    ArrayMemory(array)
    with pytest.raises(UsageError, match="read-only"):
        ArrayMemory(array, target=True)


def _strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> object:
    return np.lib.stride_tricks.as_strided(np.zeros(100, np.float32), shape, strides)


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (0, 4)), ((3, 2), (4, 4)), ((4,), (2,)), ((3, 3), (16, 8)), ((2, 1, 5), (12, 0, 4))]
)
def test_a_target_whose_items_share_memory_is_rejected(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    ArrayMemory(_strided(shape, strides))
    with pytest.raises(UsageError, match="share memory"):
        ArrayMemory(_strided(shape, strides), target=True)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (4, 8)), ((2, 3), (12, 8)), ((3, 1), (8, 0)), ((3, 2, 2), (4, 24, 12)), ((0, 3), (0, 4))],
)
def test_a_target_may_have_gaps_and_interleaved_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    array = _strided(shape, strides)
    memory = ArrayMemory(array, target=True)
    values = np.arange(memory.count, dtype=np.float32)
    view_bytes(memory.address, memory.num_bytes)[:] = values.tobytes()
    memory.copy_back()
    assert isinstance(array, np.ndarray)
    assert array.ravel().tolist() == values.tolist()


def test_numbers_and_lists_become_arrays() -> None:
    array = np.zeros(3)
    assert as_array(array) is array
    for value, shape in ((3, ()), (np.float32(2), ()), ([1, 2], (2,)), (((1.0,),), (1, 1))):
        assert as_array(value).shape == shape


def test_a_new_array_has_the_dtype_of_its_model() -> None:
    made = empty_like(np.zeros(3, np.int16), (2, 0))
    assert (made.shape, made.dtype) == ((2, 0), np.int16)


def test_a_view_of_zero_bytes_is_empty() -> None:
    assert view_bytes(0, 0).nbytes == 0

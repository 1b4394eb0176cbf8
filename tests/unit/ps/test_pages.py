"""Memory that grows in place, with and without mremap."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paceline.tables.memory.pages import LazyFloats, Pages
from paceline.tables.rules import Adagrad
from paceline.tables.sparse_store import SparseStore

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT


class MapWithoutRemap(mmap.mmap):
    """A memory map like on a system without mremap."""

    resized = 0

    def resize(self, newsize: int) -> None:
        type(self).resized += 1
        raise SystemError("mmap: resizing not available--no mremap()")


@pytest.fixture(params=["mremap", "copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "copy":
        MapWithoutRemap.resized = 0
        monkeypatch.setattr("paceline.tables.memory.pages.mmap.mmap", MapWithoutRemap)
    name: str = request.param
    return name


def view(pages: Pages) -> npt.NDArray[np.uint8]:
    memory = (ctypes.c_uint8 * pages.num_bytes).from_address(pages.address)
    array: npt.NDArray[np.uint8] = np.ctypeslib.as_array(memory)
    return array


def test_growth_keeps_existing_rows(way: str) -> None:
    pages = Pages(1000)
    assert pages.address % mmap.PAGESIZE == 0
    assert not view(pages).any()
    expected = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    view(pages)[:] = expected
    for num_bytes in (1001, 5000, 1_000_003):
        pages.resize(num_bytes)
        assert pages.num_bytes == num_bytes
        assert pages.address % mmap.PAGESIZE == 0
        np.testing.assert_array_equal(view(pages)[:1000], expected)
        assert not view(pages)[1000:].any()
        view(pages)[-1] = 0
    assert way == "mremap" or MapWithoutRemap.resized == 3


def test_a_table_grows_with_and_without_mremap(way: str) -> None:
    store, keys = SparseStore(dim=16, rule=Adagrad(lr=1.0)), np.arange(20_000, dtype=np.uint64)
    grads = np.repeat(np.where(keys % 2, -1, 1), 16).astype(np.float32)
    for start in range(0, len(keys), 500):
        store.push(keys[start : start + 500], grads[start * 16 : (start + 500) * 16])
    out = np.empty_like(grads)
    store.pull(keys, out)
    np.testing.assert_allclose(out, -grads, rtol=1e-6)
    assert way == "mremap" or MapWithoutRemap.resized > 512


def test_a_push_fails_without_changes_if_memory_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    store, keys = SparseStore(dim=16, rule=Adagrad(lr=1.0)), np.arange(5000, dtype=np.uint64)
    ones = np.ones(16 * len(keys), np.float32)
    store.push(keys, ones)
    before = np.empty_like(ones)
    store.pull(keys, before)

    def no_memory(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    more = keys + np.uint64(10_000)
    with monkeypatch.context() as patch:
        patch.setattr(Pages, "resize", no_memory)
        with pytest.raises(OSError, match="Cannot allocate"):
            store.push(more, ones)
    after = np.empty_like(ones)
    store.pull(keys, after)
    np.testing.assert_array_equal(after, before)
    store.push(more, ones)  # memory is available again
    assert len(store) == 10_000


def test_pages_written_in_parts() -> None:
    length = 1 << 22
    lazy = LazyFloats(length, used=length // 2)
    assert lazy.array.dtype == np.float32
    assert len(lazy.array) == length
    lazy.expect(0, length // 2)
    lazy.array[: length // 2] = 1.0
    assert not lazy.array[length // 2 :].any()
    lazy.forget(1, length // 4 + 1)  # the first and the last page are only partly in the range
    assert (lazy.array[0], lazy.array[length // 4 + 1]) == (1.0, 1.0)
    assert (lazy.array[length // 4 + 1 : length // 2] == 1.0).all()
    lazy.forget(5, 6)
    assert lazy.array[length // 2 - 1] == 1.0


def test_impossible_amounts_of_memory_are_refused() -> None:
    with pytest.raises(MemoryError):
        LazyFloats(1 << 50, used=1 << 50)
    with pytest.raises(MemoryError):
        LazyFloats(1 << 70, used=1 << 70)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reserves address space without memory")
def test_a_table_may_be_larger_than_the_memory_of_a_server() -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this system reserves memory for all that is mapped")
    lazy = LazyFloats(1 << 40, used=10)
    lazy.array[-1] = 2.0
    assert (lazy.array[0], lazy.array[-1]) == (0.0, 2.0)

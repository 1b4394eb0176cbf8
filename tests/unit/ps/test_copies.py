"""Copies of arrays in reused memory."""

from __future__ import annotations

import numpy as np

from paceline.ps.client.exchange import Copies


def test_copies_do_not_change_with_the_source() -> None:
    keys, grads = np.arange(5, dtype=np.uint64), np.arange(7, dtype=np.float32)
    (first, second), memory = Copies().copy([keys, grads])
    keys[:], grads[:] = 0, 0
    assert first.tolist() == list(range(5))
    assert second.tolist() == list(range(7))
    assert first.dtype == np.dtype(np.uint64)
    assert second.dtype == np.dtype(np.float32)
    assert first.base is not None
    assert len(memory) == 4096


def test_returned_memory_is_reused_if_it_is_large_enough() -> None:
    copies = Copies()
    small, large = np.zeros(100, np.float32), np.zeros(100_000, np.float32)
    _, one = copies.copy([small])
    _, other = copies.copy([small])
    assert one is not other
    copies.give_back(one)
    assert copies.copy([large])[1] is not one
    assert copies.copy([small[:3]])[1] is one
    assert copies.copy([small])[1] is not one
    for _ in range(200):
        copies.give_back(np.empty(4096, np.uint8))
    assert copies.num_free == 64

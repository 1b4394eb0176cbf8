"""Map the block numbers of a schedule to memory.

The input and output buffers of a call may share memory, so this module compares addresses to find blocks that overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from paceline.collectives.schedules.base import Spans

Ranges: TypeAlias = list[tuple[int, int]]
"""Non-empty, half-open ranges of addresses, in the order in which a message contains their bytes."""


class Blocks:
    """The memory that a schedule reads and writes, in parts (for example input, output and scratch memory).

    A part is a writable buffer and the sizes of its blocks. The first block of a part has the number after the last
    block of the previous part.
    """

    def __init__(self, parts: Sequence[tuple[memoryview, Sequence[int]]]) -> None:
        self._views = [view.cast("B") for view, _ in parts]
        self._addresses = [_address_of(view) for view in self._views]
        # The offsets count the bytes of all previous parts too, as if the parts were one buffer.
        self._offsets = list(accumulate((size for _, sizes in parts for size in sizes), initial=0))
        self._starts = [0]
        num_blocks = 0
        for view, sizes in parts:
            num_blocks += len(sizes)
            self._starts.append(self._offsets[num_blocks])
            if self._starts[-1] - self._starts[-2] > view.nbytes:
                raise ValueError(
                    f"a part of {view.nbytes} bytes cannot hold blocks of {self._starts[-1] - self._starts[-2]} bytes"
                )

    @classmethod
    def even(cls, buffer: memoryview, num_blocks: int, item_bytes: int) -> Blocks:
        """Divide a buffer of whole items into ``num_blocks`` blocks. The first blocks may have one item more."""
        num_items, remainder = divmod(buffer.nbytes, item_bytes)
        if remainder:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes does not hold whole items of {item_bytes} bytes")
        small, num_large = divmod(num_items, num_blocks)
        sizes = [(small + 1) * item_bytes] * num_large + [small * item_bytes] * (num_blocks - num_large)
        return cls([(buffer, sizes)])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def views(self, spans: Spans) -> list[memoryview]:
        """Return the memory of ``spans``, in order. Adjacent blocks share a view; empty ones have none."""
        return self.locate(spans)[0]

    def locate(self, spans: Spans) -> tuple[list[memoryview], Ranges]:
        offsets = self._offsets
        pieces: list[tuple[int, int]] = []
        for first, last in spans:
            start, end = offsets[first], offsets[last]
            if start == end:
                continue
            if pieces and pieces[-1][1] == start:
                start = pieces.pop()[0]
            pieces.append((start, end))
        if len(self._views) > 1:
            return self._locate_in_parts(pieces)
        view, address = self._views[0], self._addresses[0]
        return [view[start:end] for start, end in pieces], [(address + start, address + end) for start, end in pieces]

    def _locate_in_parts(self, pieces: Ranges) -> tuple[list[memoryview], Ranges]:
        views: list[memoryview] = []
        ranges: Ranges = []
        for start, end in pieces:
            for part, view in enumerate(self._views):
                base = self._starts[part]
                low, high = max(start, base) - base, min(end, self._starts[part + 1]) - base
                if low < high:
                    views.append(view[low:high])
                    ranges.append((self._addresses[part] + low, self._addresses[part] + high))
        return views, ranges


def collide(written: Iterable[tuple[int, int]], read: Iterable[tuple[int, int]]) -> bool:
    """Return whether any byte of the address ranges is written twice, or both written and read."""
    reach_written = reach = 0
    for start, end, is_written in sorted([(*span, True) for span in written] + [(*span, False) for span in read]):
        if start < (reach if is_written else reach_written):
            return True
        reach = max(reach, end)
        if is_written:
            reach_written = max(reach_written, end)
    return False


def remaining_overlaps(ranges: Ranges, done: int, low: int, high: int) -> bool:
    """Return whether ``ranges``, without their first ``done`` bytes, overlap the addresses from ``low`` to ``high``."""
    for start, end in ranges:
        if done >= end - start:
            done -= end - start
            continue
        if start + done < high and low < end:
            return True
        done = 0
    return False


def scatter(targets: Sequence[memoryview], source: memoryview) -> None:
    at = 0
    for target in targets:
        target[:] = source[at : at + len(target)]
        at += len(target)


def _address_of(view: memoryview) -> int:
    address: int = np.asarray(view).__array_interface__["data"][0]
    return address

"""Choose the parts of a training's state that newcomers receive while the other ranks train.

The state is divided into *chunks*. All ranks number the chunks in the same order. These are the rules:

1. A newcomer takes part in every step, but its gradients have no effect. It receives the mean gradients, and makes the
   same updates as the *ready* ranks, which have the state.
2. Between two steps, rank 0 copies the next chunks, and sends them in the background while all ranks compute. The
   newcomer loads these chunks before the mean gradients arrive, and updates them itself from then on.
3. After the last chunk, all ranks wait between two steps. The newcomers compare checksums of all chunks with rank 0's,
   and receive the chunks that differ. A chunk differs if its update depends on a chunk that the newcomer received
   later. The newcomers are then ready.
4. If the state is small, or if a newcomer must be ready at once, rule 3 applies immediately. Chunks that a newcomer
   has not received are sent like chunks that differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from paceline.protocol.bounds import Number

CHUNK_BYTES: Final = 1 << 20
"""The largest number of bytes of one tensor in a chunk."""
MOST_BYTES: Final = 64 << 20
"""The largest number of bytes in a part: the chunks that rank 0 sends between two steps. The limit bounds memory."""
SMALL_BYTES: Final = 16 << 20
"""A state with at most this number of bytes is small: all ranks wait until it is sent."""
_FIRST_BYTES: Final = 8 << 20
"""The largest size of the first part, before the speed of the network is known."""
_WAIT_S: Final = 0.03
"""The accepted delay of a step because a newcomer still receives its part."""


class Chunk(NamedTuple):
    """A range of the elements of a family: tensors with equal numbers of elements, such as a parameter's moments."""

    family: int
    first: int
    end: int


def divide_state(families: Sequence[tuple[int, int]]) -> Iterator[Chunk]:
    """Yield the chunks of a state.

    A family is given by its number of elements, and the largest number of bytes of an element.
    """
    for family, (num_elements, item_bytes) in enumerate(families):
        size = CHUNK_BYTES // item_bytes
        for first in range(0, num_elements, size):
            yield Chunk(family, first, min(first + size, num_elements))


class HealingProgress(Struct, frozen=True, array_like=True):
    """The progress of a newcomer."""

    num_received: Number | None = None
    """Number of received chunks; None before the newcomer has the description of the state."""
    most_bytes: float = _FIRST_BYTES
    """The largest size of the next part."""

    def after_part(self, end: int, num_bytes: int, waited_s: float) -> HealingProgress:
        """Return the progress after a part that ends before chunk `end`, and that delayed the step by `waited_s`."""
        most_bytes = min(num_bytes * min(2.0, _WAIT_S / max(waited_s, 1e-9)), MOST_BYTES)
        return HealingProgress(max(end, self.num_received or 0), most_bytes)


def next_part(progress: Sequence[HealingProgress], sizes: Sequence[int], *, is_urgent: bool) -> range | None:
    """Return the chunks of the next part; None if the newcomers must become ready now.

    `sizes` are the numbers of bytes of all chunks.
    """
    first = min(newcomer.num_received or 0 for newcomer in progress)
    if is_urgent or first >= len(sizes) or sum(sizes) <= SMALL_BYTES:
        return None
    most_bytes = min(MOST_BYTES, *(newcomer.most_bytes for newcomer in progress))
    return range(first, _end_of_part(sizes, first, most_bytes))


def split_into_parts(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide the `numbers` of chunks into parts of at most `MOST_BYTES`."""
    selected_sizes = [sizes[number] for number in numbers]
    first = 0
    while first < len(numbers):
        end = _end_of_part(selected_sizes, first, MOST_BYTES)
        yield numbers[first:end]
        first = end


def _end_of_part(sizes: Sequence[int], first: int, num_bytes: float) -> int:
    """Return the end of the part of at most `num_bytes` that begins with chunk `first`. A part has a chunk or more."""
    totals = itertools.accumulate(sizes[first:])
    return first + max(sum(1 for _ in itertools.takewhile(lambda total: total <= num_bytes, totals)), 1)

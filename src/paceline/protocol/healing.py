"""Choose the parts of a training's state that newcomers receive while the other ranks train.

The state is divided into *chunks*, in an order that is equal on all ranks. These are the rules:

1. A newcomer takes part in every step, but its gradients have no effect. It receives the mean gradients, and makes the
   same updates as the ready ranks, which have the state.
2. Between two steps, rank 0 copies the next chunks, and sends them in the background while all ranks compute. The
   newcomer loads them before the mean gradients arrive. From then on it updates these chunks itself.
3. After the last chunk, all ranks wait between two steps. The newcomers compare checksums of all chunks with rank 0's,
   and receive the chunks that differ. A chunk differs if its update depends on something that the newcomer received
   later. The newcomers are then ready.
4. If the state is small, or if a newcomer must be ready at once, rule 3 applies immediately. All chunks that a newcomer
   has not received count as different.
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
"""The largest number of bytes in one part, which rank 0 and each newcomer hold in memory."""
SMALL_BYTES: Final = 16 << 20
"""A state with at most this number of bytes is sent at once."""
_FIRST_BYTES: Final = 8 << 20
"""The size of the first part, because the speed is unknown."""
_WAIT_S: Final = 0.03
"""The time that ranks may wait in a step for a newcomer, because it has not received its part."""


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
    """Number of chunks that it has received; None if it does not know the chunks yet."""
    most_bytes: float = _FIRST_BYTES
    """The largest size of its next part."""

    def after_part(self, end: int, num_bytes: int, waited_s: float) -> HealingProgress:
        """Return the progress after a part that ends before chunk `end`. The newcomer waited for it in the exchange."""
        most_bytes = min(num_bytes * min(2.0, _WAIT_S / max(waited_s, 1e-9)), MOST_BYTES)
        return HealingProgress(max(end, self.num_received or 0), most_bytes)


def next_part(progress: Sequence[HealingProgress], sizes: Sequence[int], *, is_urgent: bool) -> range | None:
    """Return the chunks of the next part; None if the newcomers must become ready now.

    `sizes` are the numbers of bytes of all chunks.
    """
    first = min(each.num_received or 0 for each in progress)
    if is_urgent or first >= len(sizes) or sum(sizes) <= SMALL_BYTES:
        return None
    return range(first, _end_of_part(sizes, first, min(MOST_BYTES, *(each.most_bytes for each in progress))))


def split_into_parts(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide the `numbers` of chunks into parts of at most `MOST_BYTES`."""
    own = [sizes[number] for number in numbers]
    first = 0
    while first < len(own):
        end = _end_of_part(own, first, MOST_BYTES)
        yield numbers[first:end]
        first = end


def _end_of_part(sizes: Sequence[int], first: int, num_bytes: float) -> int:
    """Return the end of the part that begins with chunk `first`: at least one chunk."""
    totals = itertools.accumulate(sizes[first:])
    return first + max(sum(1 for _ in itertools.takewhile(lambda total: total <= num_bytes, totals)), 1)

"""Choose the parts of a training's state that newcomers receive while the other ranks train.

The state is divided into *chunks*. All ranks number the chunks in the same order. These are the rules:

1. A newcomer takes part in every step, but its gradients have no effect. It receives the mean gradients, and makes the
   same updates as the *ready* ranks, which have the state.
2. Between two steps, rank 0 copies the next chunks, and sends them in the background while all ranks compute. The
   newcomer loads these chunks before the mean gradients arrive, and updates them itself from then on.
3. After the last chunk, the newcomers compare checksums of the chunks with rank 0's, some chunks between any two steps.
   A chunk differs if its update depends on a chunk that the newcomer received later. Equal chunks remain equal, because
   all ranks make the same updates.
4. Then all ranks wait between two steps, and the newcomers compare the remaining chunks: those that other code than the
   updates may change or, if any chunk was different, all chunks. They receive the chunks that differ, and are ready.
   The same applies if the state is small, or if a newcomer must be ready at once. Chunks that a newcomer has not
   received are sent like chunks that differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from paceline.protocol.bounds import Number

CHUNK_BYTES: Final = 1 << 20
"""The largest number of bytes of one tensor in a chunk."""
MOST_BYTES: Final = 64 << 20
"""The largest number of bytes in a part: the chunks that rank 0 sends between two steps. The limit bounds memory."""
SMALL_BYTES: Final = 16 << 20
"""A state with at most this number of bytes is small: all ranks wait until it is sent."""
COMPARED_BYTES: Final = 64 << 20
"""The largest number of bytes that are compared between two steps."""
_FIRST_BYTES: Final = 8 << 20
"""The largest size of the first part, before the speed of the network is known."""
_WAIT_S: Final = 0.03
"""The accepted delay of a step because a newcomer still receives its part."""


class Chunk(NamedTuple):
    """A range of the elements of a family: a set of tensors with equal numbers of elements, such as a parameter and its
    moments."""

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
    num_compared: Number = 0
    """Number of chunks that were compared with rank 0's."""
    differs: bool = False
    """Whether a compared chunk was different."""

    def after_part(self, end: int, num_bytes: int, waited_s: float) -> HealingProgress:
        """Return the progress after a part that ends before chunk `end`, and that delayed the step by `waited_s`."""
        most_bytes = min(num_bytes * min(2.0, _WAIT_S / max(waited_s, 1e-9)), MOST_BYTES)
        return replace(self, num_received=max(end, self.num_received or 0), most_bytes=most_bytes)

    def after_comparison(self, end: int, *, is_equal: bool) -> HealingProgress:
        """Return the progress after a comparison of chunks that ends before chunk `end`."""
        return replace(self, num_compared=max(end, self.num_compared), differs=self.differs or not is_equal)


class HealingStep(NamedTuple):
    """The transfer between two steps of the training."""

    part: range = range(0)
    """Chunks that rank 0 sends in the background."""
    compared: range = range(0)
    """Chunks that are compared now."""
    is_last: bool = False
    """Whether newcomers receive missing and differing chunks now, and are ready then."""


def next_step(
    progress: Sequence[HealingProgress], sizes: Sequence[int], num_updated: int, *, is_urgent: bool
) -> HealingStep:
    """Choose the next transfer. `sizes` are the numbers of bytes of all chunks.

    Only updates change the first `num_updated` chunks. The other chunks are compared in the last transfer.
    """
    first = min(newcomer.num_received or 0 for newcomer in progress)
    differs = any(newcomer.differs for newcomer in progress)
    num_compared = 0 if differs else min(newcomer.num_compared for newcomer in progress)
    has_all = first >= len(sizes)
    if is_urgent or sum(sizes) <= SMALL_BYTES or (has_all and (differs or num_compared >= num_updated)):
        end = max(newcomer.num_received or 0 for newcomer in progress)
        return HealingStep(compared=range(num_compared, min(end, len(sizes))), is_last=True)
    if has_all:
        end = min(_end_of_part(sizes, num_compared, COMPARED_BYTES), num_updated)
        return HealingStep(compared=range(num_compared, end))
    most_bytes = min(MOST_BYTES, *(newcomer.most_bytes for newcomer in progress))
    return HealingStep(part=range(first, _end_of_part(sizes, first, most_bytes)))


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

"""Average the gradients of all ranks with filters. This module computes on one rank and does not use the network.

A :class:`GradientMean` handles one bucket: float32 [n], with the same n on every rank. :meth:`GradientMean.average` is
a coroutine: it yields the bytes to send, and its caller sends it the bytes of all ranks.

- With a :class:`~paceline.filters.base.ValueFilter`, each rank sends its part i to rank i. Rank i sends the mean of
part i to all ranks. Both messages are rounded. Each rank keeps its rounding error and adds
  it to the next gradient (Tang et al., "1-bit Adam", ICML 2021, section 4).
- :class:`~paceline.filters.TopK` sends each rank's largest values and their positions to all ranks.
- :class:`~paceline.filters.RandomK` chooses the same positions on all ranks. These values are averaged in parts, as
above. A fixed rank averages each position and keeps the rounding error of the mean.

Each rank also keeps its unsent values. Every rank decodes the same bytes, so the replicas stay bit-identical.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.filters.base import Bytes, Filter, RowFilter, ValueFilter
from paceline.filters.calls import num_bytes_of, read_values, rows_chosen_by, write_values
from paceline.filters.chain import FilterChain, chain_of
from paceline.filters.chance import seed_of
from paceline.filters.random_k import RandomK
from paceline.filters.rows import forget_non_finite, quiet
from paceline.filters.top_k import TopK
from paceline.kernels.filters import BLOCK
from paceline.tables.types import Floats

Positions: TypeAlias = npt.NDArray[np.int64]
_ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Bytes to send: uint8 [ranks, m] with row i for rank i, or uint8 [m] for all ranks. The reply is [ranks, m]."""

    data: Bytes

    @property
    def is_for_all(self) -> bool:
        return self.data.ndim == 1


Averaging: TypeAlias = Generator[RankExchange, Bytes, Floats]


def are_for_gradients(chosen: Filter) -> bool:
    return isinstance(chosen, (TopK, RandomK, ValueFilter))


def gradient_filters(filters: Sequence[Filter] | str) -> FilterChain:
    """Create the chain of filters for gradients. Raises UsageError for unsuitable filters."""
    chain = chain_of(filters)
    for chosen in chain.filters:
        if are_for_gradients(chosen):
            continue
        if isinstance(chosen, RowFilter):
            raise UsageError(f"filter {chosen} is not for gradients that all ranks average. Use top-k or random-k")
        reason = (
            "they have no keys" if chosen.stage < ValueFilter.stage else "all ranks must send equal numbers of bytes"
        )
        raise UsageError(
            f"filter {chosen} is not for gradients that all ranks average, because {reason}. Use float16, bfloat16, "
            "quantize, top-k or random-k"
        )
    if len(chain.rows) > 1:
        raise UsageError(f"filters {chain}: {chain.rows[0]} and {chain.rows[1]} both choose values. Use one of them")
    if not chain:
        raise UsageError("the list of filters is empty. Leave it out")
    return chain


class GradientMean:
    """Averages one bucket over the ranks in each step, and keeps the unsent residual for the next step."""

    def __init__(self, chain: FilterChain, rank: int, size: int, residual: Floats, *, number: int = 0) -> None:
        self._choice = chain.rows[0] if chain.rows else None
        self._values = chain.values
        self._rank, self._size, self._number = rank, size, number
        self.residual = residual
        """Unsent values, float32 [n], to add to the next gradient."""
        part = -(-len(residual) // (size * BLOCK)) * BLOCK
        self._bounds = np.minimum(np.arange(size + 1) * part, len(residual))
        """Rank i averages positions [bounds[i], bounds[i + 1])."""
        own = slice(self._bounds[rank], self._bounds[rank + 1])
        self.mean_residual = np.zeros(0 if isinstance(self._choice, TopK) else own.stop - own.start, np.float32)
        """The rounding error of the mean in the part that this rank averages."""
        self._count = 0
        self._keys = np.arange(len(residual) if self._choice is not None else 0, dtype=np.uint64)

    def average(self, grads: Floats) -> Averaging:
        """Return the mean of the ranks' sent values, which are a part of `grads` (float32 [n]) plus
        :attr:`residual`."""
        if self._size == 1:
            return grads
        self._count += 1
        with quiet():
            values: Floats = grads + self.residual
        if self._choice is None:
            found, read = yield from self._average_all(values, self._bounds, slice(None))
            self.residual[:] = _left(values, read)
            return found
        chosen = self._choose(self._choice, values)
        part = values[chosen]
        out = np.zeros_like(values)
        if isinstance(self._choice, TopK):
            read = yield from self._add_up(chosen, part, out)
        else:
            if not np.isfinite(values).all():
                part[:1] = np.nan  # all ranks must detect a non-finite value, even at a position that is not chosen
            bounds = np.searchsorted(chosen, self._bounds)
            start = self._bounds[self._rank]
            own = chosen[bounds[self._rank] : bounds[self._rank + 1]] - start
            out[chosen], read = yield from self._average_all(part, bounds, own)
        sent = np.zeros_like(values)
        sent[chosen] = read
        self.residual[:] = _left(values, sent)
        return out

    def fold_into_residual(self) -> None:
        """Add :attr:`mean_residual` to :attr:`residual`, from which a later :class:`GradientMean` can continue."""
        if len(self.mean_residual):
            start = self._bounds[self._rank]
            self.residual[start : start + len(self.mean_residual)] += np.float32(self._size) * self.mean_residual
            self.mean_residual[:] = 0

    def _choose(self, choice: RowFilter, values: Floats) -> Positions:
        """Return the positions to send. There is at least one, so that a rank can always report a non-finite value."""
        seed = seed_of(self._number, self._count)
        chosen = rows_chosen_by(choice, self._keys, values.reshape(-1, 1), self._count, seed)
        return np.flatnonzero(chosen) if chosen.any() else np.arange(min(1, len(values)))

    def _average_all(
        self, values: Floats, bounds: Positions, own: Positions | slice
    ) -> Generator[RankExchange, Bytes, tuple[Floats, Floats]]:
        """Return the mean of all ranks' values, and this rank's values after encoding and decoding.

        Rank i averages ``values[bounds[i] : bounds[i + 1]]``. `own` selects this rank's part of :attr:`mean_residual`.
        """
        parts = [slice(start, stop) for start, stop in pairwise(bounds.tolist())]
        width = self._num_bytes(int(np.diff(bounds).max()))
        sent, read = np.zeros((self._size, width), np.uint8), np.empty_like(values)
        for row, part in zip(sent, parts, strict=True):
            self._write(values[part], row, read[part])
        received = yield RankExchange(sent)
        count = len(self.mean_residual[own])
        mean, other = np.zeros(count, np.float32), np.empty(count, np.float32)
        with quiet():
            for row in received:
                self._read(row, other)
                mean += other
            mean /= np.float32(self._size)
            mean += self.mean_residual[own]
        row = np.zeros(width, np.uint8)
        self._write(mean, row, other)
        self.mean_residual[own] = _left(mean, other)
        gathered = yield RankExchange(row)
        found = np.empty_like(values)
        for row, part in zip(gathered, parts, strict=True):
            self._read(row, found[part])
        return found, read

    def _add_up(self, chosen: Positions, values: Floats, out: Floats) -> Generator[RankExchange, Bytes, Floats]:
        """Exchange the chosen values. At each chosen position, `out` gets the sum divided by the number of ranks.

        Return this rank's values after encoding and decoding.
        """
        count = len(chosen)
        width = self._num_bytes(count)
        row, read = np.zeros(width + 4 * count, np.uint8), np.empty_like(values)
        self._write(values, row[:width], read)
        row[width:].view(np.uint32)[:] = chosen
        other = np.empty_like(values)
        gathered = yield RankExchange(row)
        with quiet():
            for message in gathered:
                self._read(message[:width], other)
                out[message[width:].view(np.uint32)] += other
            out /= np.float32(self._size)
        return read

    def _num_bytes(self, count: int) -> int:
        return -(-num_bytes_of(self._values, count) // _ALIGNMENT) * _ALIGNMENT

    def _write(self, values: Floats, row: Bytes, read: Floats) -> None:
        """Encode `values` at the start of `row`, and decode them into `read`.

        Values are rounded to nearest, not at random, because the error of this encoding is added to the next values.
        """
        row = row[: num_bytes_of(self._values, len(values))]
        write_values(self._values, values, None, row)
        read_values(self._values, row, read)

    def _read(self, row: Bytes, out: Floats) -> None:
        read_values(self._values, row[: num_bytes_of(self._values, len(out))], out)


def _left(values: Floats, read: Floats) -> Floats:
    """Return the encoding's error, to be added to the next values: `values` minus the decoded values `read`.

    The error is 0 where the difference is not finite.
    """
    with quiet():
        return forget_non_finite(values - read)

"""The mean of all ranks' gradients behind filters, in fewer bytes: what each rank does, without the network.

A :class:`GradientMean` is of one bucket: float32 [n], the same n on every rank. :meth:`GradientMean.average` says which
bytes go where, and is sent what came (a coroutine): so whoever has a network drives it, and a test without one.

- Values behind a :class:`~paceline.filters.base.ValueFilter` go as in an all-reduce: of each rank's, part i goes to
  rank i, which sends the mean of these to all. Both are rounded; each rank keeps the error of what it has rounded and
  adds it to the next gradient (Tang et al., "1-bit Adam", ICML 2021, section 4).
- :class:`~paceline.filters.TopK` sends each rank's largest values and their positions to all.
- :class:`~paceline.filters.RandomK` takes the same positions on all ranks, whose values go as in an all-reduce. They
  are others each time: the mean is rounded by chance, and no error of it kept.

What is not sent is kept too. Every rank reads the same bytes: replicas stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.filters.base import Bytes, Filter, RowFilter, ValueFilter
from paceline.filters.chain import FilterChain, parse_filters
from paceline.filters.chance import seed_of
from paceline.filters.random_k import RandomK
from paceline.filters.rows import forget_non_finite
from paceline.filters.top_k import TopK
from paceline.kernels.filters import BLOCK
from paceline.tables.types import Floats

Positions: TypeAlias = npt.NDArray[np.int64]
_ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Bytes that go out, uint8 [ranks, m] (row i to rank i), or uint8 [m] to all; [ranks, m] come back, by rank."""

    data: Bytes

    @property
    def is_for_all(self) -> bool:
        """Whether all ranks get the same."""
        return self.data.ndim == 1


Averaging: TypeAlias = Generator[RankExchange, Bytes, Floats]


def gradient_filters(filters: Sequence[Filter] | str) -> FilterChain:
    """Return the chain if gradients can go behind it. Raises UsageError."""
    chain = parse_filters(filters) if isinstance(filters, str) else FilterChain(filters)
    for each in chain.filters:
        if isinstance(each, RowFilter) and not isinstance(each, (TopK, RandomK)):
            raise UsageError(f"filter {each} is not for gradients that all ranks average: top-k and random-k are")
        if not isinstance(each, (RowFilter, ValueFilter)):
            reason = "they have no keys" if each.stage < ValueFilter.stage else "each rank sends as many bytes"
            raise UsageError(
                f"filter {each} is not for gradients that all ranks average, since {reason}: take float16, bfloat16, "
                "quantize, top-k or random-k"
            )
    if len(chain.rows) > 1:
        raise UsageError(f"filters {chain}: {chain.rows[0]} and {chain.rows[1]} both choose values; take one of them")
    if not chain:
        raise UsageError("filters are empty: leave them out")
    return chain


class GradientMean:
    """Averages one bucket over the ranks, time after time, and keeps what has not been sent of it."""

    def __init__(self, chain: FilterChain, rank: int, size: int, rest: Floats, *, number: int = 0) -> None:
        self._choice = chain.rows[0] if chain.rows else None
        self._values = chain.values
        self._rank, self._size, self._number = rank, size, number
        self.rest = rest
        """What was not sent so far, float32 [n]; to be added to the next gradient."""
        self.mean_rest = np.zeros(0, np.float32)
        """What was not sent of the mean of the part that this rank averages."""
        self._count = 0
        self._keys = np.arange(len(rest) if self._choice is not None else 0, dtype=np.uint64)

    def average(self, grads: Floats) -> Averaging:
        """Return the mean over all ranks of their `grads` (float32 [n]) and rests, as far as it was sent."""
        if self._size == 1:
            return grads
        self._count += 1
        values: Floats = grads + self.rest
        if self._choice is None:
            found, read = yield from self._average_all(values)
            np.subtract(values, read, out=self.rest)
            forget_non_finite(self.rest)
            return found
        chosen = self._choose(values)
        part = values[chosen]
        out = np.zeros_like(values)
        if isinstance(self._choice, TopK):
            read = yield from self._add_up(chosen, part, out)
        else:
            if not np.isfinite(values).all():
                part[:1] = np.nan  # all ranks see that there is one, whatever chance has chosen
            out[chosen], read = yield from self._average_all(part)
        self.rest[:] = values
        self.rest[chosen] -= read
        forget_non_finite(self.rest)
        return out

    def _choose(self, values: Floats) -> Positions:
        assert self._choice is not None
        seed = seed_of(self._number, self._count)
        return np.flatnonzero(self._choice.choose(self._keys, values.reshape(-1, 1), self._count, seed))

    def _average_all(self, values: Floats) -> Generator[RankExchange, Bytes, tuple[Floats, Floats]]:
        """Return the mean of all ranks' values, and of this rank's what the others have read."""
        part = -(-len(values) // (self._size * BLOCK)) * BLOCK
        parts = [values[rank * part : (rank + 1) * part] for rank in range(self._size)]
        width = self._num_bytes(part)
        sent, read = np.zeros((self._size, width), np.uint8), np.empty_like(values)
        for rank, each in enumerate(parts):
            self._write(each, sent[rank], read[rank * part : rank * part + len(each)])
        received = yield RankExchange(sent)
        own = len(parts[self._rank])
        mean, other = np.zeros(own, np.float32), np.empty(own, np.float32)
        for row in received:
            self._read(row, other)
            mean += other
        mean /= np.float32(self._size)
        row = np.zeros(width, np.uint8)
        if self._choice is None:
            mean += self.mean_rest if self._count > 1 else 0
            self._write(mean, row, other)
            self.mean_rest = mean - other
            forget_non_finite(self.mean_rest)
        else:
            self._write(mean, row, other, seed_of(self._number, self._count, self._rank))
        gathered = yield RankExchange(row)
        found = np.empty_like(values)
        for rank, each in enumerate(parts):
            self._read(gathered[rank], found[rank * part : rank * part + len(each)])
        return found, read

    def _add_up(self, chosen: Positions, values: Floats, out: Floats) -> Generator[RankExchange, Bytes, Floats]:
        """Write the mean of what all ranks have chosen to `out`; return what is read of this rank's."""
        count = len(chosen)
        width = self._num_bytes(count)
        row, read = np.zeros(width + 4 * count, np.uint8), np.empty_like(values)
        self._write(values, row[:width], read)
        row[width:].view(np.uint32)[:] = chosen
        other = np.empty_like(values)
        for each in (yield RankExchange(row)):
            self._read(each[:width], other)
            out[each[width:].view(np.uint32)] += other
        out /= np.float32(self._size)
        return read

    def _num_bytes(self, count: int) -> int:
        num_bytes = 4 * count if self._values is None else self._values.num_bytes(count)
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def _write(self, values: Floats, row: Bytes, read: Floats, seed: int | None = None) -> None:
        """Write values to the head of a row; `read` gets what is read of them. Without a seed the error is kept."""
        if self._values is None:
            row[: values.nbytes].view(np.float32)[:] = read[:] = values
            return
        row = row[: self._values.num_bytes(len(values))]
        self._values.encode(values, seed, row)
        self._values.decode(row, read)

    def _read(self, row: Bytes, out: Floats) -> None:
        if self._values is None:
            out[:] = row[: out.nbytes].view(np.float32)
        else:
            self._values.decode(row[: self._values.num_bytes(len(out))], out)

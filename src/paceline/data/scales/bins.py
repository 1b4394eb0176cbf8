"""Numeric columns as categories: the bins that numbers fall into, each a feature of its own, with value 1.

A line through a column says little where its effect is bent. Bins are found from rows spread over the files, as scales
are, and are a part of these (:class:`paceline.data.scales.scaling.Scale`): readers know them by the columns.

Two ways to find them are offered: quantiles of the numbers, so that about as many rows fall into each, and logarithms,
floor(ln(x)^2), as in the transformation of the winners of Criteo's challenge of 2014 (Juan, Zhuang, Chin, "3 Idiots'
approach for display advertising challenge", github.com/guestwalk/kaggle-2014-criteo), which Criteo's own format has
here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from paceline.data.batch import Batch
from paceline.kernels.hashing import field_of, hash_bytes, name_seed

MAX_BINS = 1024

Doubles = npt.NDArray[np.float64]


def quantile_edges(numbers: Doubles, num_bins: int) -> tuple[float, ...]:
    """Return where bins after the first begin (rising, float32 all), so that as many of the numbers are in each.

    There are fewer where many are alike.
    """
    if not len(numbers):
        return ()
    found = np.quantile(numbers, np.arange(1, num_bins) / num_bins, method="lower")
    return _distinct_edges(found, numbers)


def log_edges(numbers: Doubles, unit: float) -> tuple[float, ...]:
    """Return where bins of floor(ln(x)^2) begin, of x = number / unit up to 2 those of its integers.

    Negative numbers have the same bins as those of their size. Bins reach as far as the numbers do.
    """
    if not len(numbers):
        return ()
    largest = math.log(max(float(np.abs(numbers).max()) / unit, 1.0)) ** 2
    thresholds = np.exp(np.sqrt(np.arange(1, min(int(largest), 8 * MAX_BINS) + 1)))
    sizes = unit * np.concatenate([[1.0, 2.0], thresholds])
    return _distinct_edges(np.concatenate([-sizes, [0.0], sizes]), numbers)


def _distinct_edges(edges: Doubles, numbers: Doubles) -> tuple[float, ...]:
    """Return those edges, as float32, that have numbers on both sides."""
    kept = np.unique(edges.astype(np.float32))
    low, high = np.float32(numbers.min()), np.float32(numbers.max())
    return tuple(kept[(kept > low) & (kept <= high)].tolist())


def bins_of(numbers: Doubles, edges: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the bin of each number, from 0 up: as many as there are edges at or below it as float32."""
    return np.searchsorted(np.array(edges, np.float32), numbers.astype(np.float32), side="right").astype(np.int64)


def bin_key(name: str, number: int) -> int:
    """Return the key of a bin of the column `name`."""
    return hash_bytes(number.to_bytes(8, "little"), name_seed(name))


def key_bin_key(key: int, number: int) -> int:
    """Return the key of a bin of the numbers of the feature `key`, which is mixed first: it may be a small number."""
    return hash_bytes(number.to_bytes(8, "little"), hash_bytes(key.to_bytes(8, "little"), 0))


def bin_names(name: str, edges: Sequence[float], centre: float = 0.0, key: int | None = None) -> dict[int, str]:
    """Return the names of bins by their keys, such as ``age=18..25``: from 18, and below 25.

    They are those of a column, or of the feature `key`.
    """
    shown = ["", *(f"{edge + centre:.6g}" for edge in edges), ""]
    return {
        bin_key(name, at) if key is None else key_bin_key(key, at): f"{name}={shown[at]}..{shown[at + 1]}"
        for at in range(len(edges) + 1)
    }


class ColumnBins:
    """The bins of some of the numeric columns of rows, which have a pair for each of the `categorical` first.

    `edges` are those of each numeric column; of one that has none numbers stay.
    """

    def __init__(self, categorical: Sequence[str], numeric: Sequence[str], edges: Sequence[Sequence[float]]) -> None:
        self._num_categorical = len(categorical)
        self._seeds = np.array([name_seed(name) for name in numeric], np.uint64)
        self._hashes = np.array([field_of(name) for name in (*categorical, *numeric)], np.uint32)
        self._firsts = np.cumsum([0, *map(len, edges)])
        self._edges = np.array([edge for each in edges for edge in each], np.float32)
        self._keys = np.array(
            [bin_key(name, at) for name, each in zip(numeric, edges, strict=True) for at in range(len(each) + 1)],
            np.uint64,
        )
        self._all_are_binned = all(map(len, edges))

    def apply(self, batch: Batch) -> Batch:
        """Return the rows with bins in place of numbers; the batch's own arrays are written.

        Each pair says of which column it is, for keys do not tell that any more.
        """
        from paceline.kernels.features.scaling import bin_columns

        assert batch.values is not None
        fields, num_categorical = batch.fields, self._num_categorical
        if fields is None:
            fields = np.empty(len(batch.keys), np.uint32)
        else:
            num_categorical = 0  # which have theirs, and need not be one in each row
        bin_columns(
            *(batch.indptr, batch.keys, batch.values, fields, self._hashes[self._num_categorical - num_categorical :]),
            *(num_categorical, self._seeds, self._firsts, self._edges, self._keys),
        )
        return replace(batch, values=None if self._all_are_binned else batch.values, fields=fields)


class KeyBins:
    """The bins of numbers that are told apart by their keys: `keys` (uint64 [n]), with the `edges` of each."""

    def __init__(self, keys: npt.NDArray[np.uint64], edges: Sequence[Sequence[float]]) -> None:
        of_edges = np.repeat(np.arange(len(edges)), [len(each) for each in edges])
        self._edges = _ordered(of_edges, np.array([edge for each in edges for edge in each], np.float32))
        self.keys = np.array(
            [
                key_bin_key(key, at)
                for key, each in zip(keys.tolist(), edges, strict=True)
                for at in range(len(each) + 1)
            ],
            np.uint64,
        )
        """Those of all bins (uint64)."""

    def find(self, at: npt.NDArray[np.int64], numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
        """Return the key of the bin of each number (float32 [m]); ``at[i]`` says which of the keys it has."""
        found: npt.NDArray[np.uint64] = self.keys[
            np.searchsorted(self._edges, _ordered(at, numbers), side="right") + at
        ]
        return found


def _ordered(at: npt.NDArray[np.int64], numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """Return integers that are ordered as the pairs of `at` and `numbers` are: so one search serves all keys."""
    bits = (numbers + np.float32(0)).view(np.uint32)  # -0.0 is 0.0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    found: npt.NDArray[np.uint64] = (at.astype(np.uint64) << np.uint64(32)) | ordered
    return found

"""Bins of numeric columns. Each bin is a feature with value 1, so a linear model learns a nonlinear effect.

Bins are fitted to rows spread over the files and stored in the column's scale
(:class:`paceline.data.scales.scaling.Scale`). There are two methods. Quantiles of the numbers give bins with about
equal numbers of rows. Logarithms give the bins floor(ln(x)^2), as in the winning entry of Criteo's challenge of 2014
(Juan, Zhuang, Chin, "3 Idiots' approach for display advertising challenge", github.com/guestwalk/kaggle-2014-criteo)
and in :mod:`paceline.data.formats.criteo`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.batch import Batch
from paceline.kernels.hashing import field_of, hash_bytes, name_seed

MAX_BINS = 1024

Doubles = npt.NDArray[np.float64]


def quantile_edges(numbers: Doubles, num_bins: int) -> tuple[float, ...]:
    """Return the lower bounds of all bins except the first (float32, ascending).

    All bins have about the same number of values. If many numbers are equal, there are fewer bins.
    """
    if not len(numbers):
        return ()
    found = np.quantile(numbers, np.arange(1, num_bins) / num_bins, method="lower")
    return _distinct_edges(found, numbers)


def log_edges(numbers: Doubles, unit: float) -> tuple[float, ...]:
    """Return the lower bounds of bins. For x = number / unit, bins start at 0, 1, 2 and at each new floor(ln(x)^2).

    The bins of negative numbers mirror those of positive numbers. The last bin contains the largest number.
    """
    if not len(numbers):
        return ()
    largest = math.log(max(float(np.abs(numbers).max()) / unit, 1.0)) ** 2
    thresholds = np.exp(np.sqrt(np.arange(1, min(int(largest), 8 * MAX_BINS) + 1)))
    sizes = unit * np.concatenate([[1.0, 2.0], thresholds])
    return _distinct_edges(np.concatenate([-sizes, [0.0], sizes]), numbers)


def _distinct_edges(edges: Doubles, numbers: Doubles) -> tuple[float, ...]:
    distinct = np.unique(edges.astype(np.float32))
    low, high = np.float32(numbers.min()), np.float32(numbers.max())
    return tuple(distinct[(distinct > low) & (distinct <= high)].tolist())


def bins_of(numbers: Doubles, edges: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return each number's bin, from 0: the count of edges that are at most the number in float32."""
    return np.searchsorted(np.array(edges, np.float32), numbers.astype(np.float32), side="right").astype(np.int64)


def bin_key(name: str, number: int) -> int:
    return hash_bytes(number.to_bytes(8, "little"), name_seed(name))


def key_bin_key(key: int, number: int) -> int:
    """Return the key of a bin of feature `key`. It is hashed first, because it may be a small number."""
    return hash_bytes(number.to_bytes(8, "little"), hash_bytes(key.to_bytes(8, "little"), 0))


def bin_names(name: str, edges: Sequence[float], centre: float = 0.0, key: int | None = None) -> dict[int, str]:
    """Return the names, by key, of the bins of a column or of the feature `key`.

    A name such as ``age=18..25`` means at least 18 and below 25.
    """
    shown = ["", *(f"{edge + centre:.6g}" for edge in edges), ""]
    return {
        bin_key(name, at) if key is None else key_bin_key(key, at): f"{name}={shown[at]}..{shown[at + 1]}"
        for at in range(len(edges) + 1)
    }


def _keys_of_bins(
    key_of: Callable[[Any, int], int], names: Sequence[Any], edges: Sequence[Sequence[float]]
) -> npt.NDArray[np.uint64]:
    numbered = ((name, at) for name, bounds in zip(names, edges, strict=True) for at in range(len(bounds) + 1))
    return np.array([key_of(name, at) for name, at in numbered], np.uint64)


class ColumnBins:
    """Bins of numeric columns, for rows that begin with one pair per `categorical` column.

    `edges` has the edges of each numeric column. Numbers of a column without edges do not change.
    """

    def __init__(self, categorical: Sequence[str], numeric: Sequence[str], edges: Sequence[Sequence[float]]) -> None:
        self._num_categorical = len(categorical)
        self._seeds = np.array([name_seed(name) for name in numeric], np.uint64)
        self._hashes = np.array([field_of(name) for name in (*categorical, *numeric)], np.uint32)
        self._firsts = np.cumsum([0, *map(len, edges)])
        self._edges = np.array(list(itertools.chain.from_iterable(edges)), np.float32)
        self._keys = _keys_of_bins(bin_key, numeric, edges)
        self._all_are_binned = all(map(len, edges))

    def apply(self, batch: Batch) -> Batch:
        """Return the rows with bins instead of numbers, and with fields. The batch's arrays are overwritten."""
        from paceline.kernels.features.scaling import bin_columns

        assert batch.values is not None
        fields, num_categorical = batch.fields, self._num_categorical
        if fields is None:
            fields = np.empty(len(batch.keys), np.uint32)
        else:
            num_categorical = 0  # these pairs have fields already, so the kernel must not write the categories' fields
        bin_columns(
            *(batch.indptr, batch.keys, batch.values, fields, self._hashes[self._num_categorical - num_categorical :]),
            *(num_categorical, self._seeds, self._firsts, self._edges, self._keys),
        )
        return replace(batch, values=None if self._all_are_binned else batch.values, fields=fields)


class KeyBins:
    """Bins for the numbers of features. `edges` has the edges for each of the features' `keys` (uint64 [n])."""

    def __init__(self, keys: npt.NDArray[np.uint64], edges: Sequence[Sequence[float]]) -> None:
        of_edges = np.repeat(np.arange(len(edges)), list(map(len, edges)))
        self._edges = _ordered(of_edges, np.array(list(itertools.chain.from_iterable(edges)), np.float32))
        self.keys = _keys_of_bins(key_bin_key, keys.tolist(), edges)
        """The keys of all bins (uint64)."""

    def find(self, at: npt.NDArray[np.int64], numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
        """Return the key of each number's bin. Number i (float32 [m]) belongs to the key with index ``at[i]``."""
        found: npt.NDArray[np.uint64] = self.keys[
            np.searchsorted(self._edges, _ordered(at, numbers), side="right") + at
        ]
        return found


def _ordered(at: npt.NDArray[np.int64], numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """Return integers that sort like the pairs (`at`, `numbers`), so that one search finds the bins of all keys."""
    bits = (numbers + np.float32(0)).view(np.uint32)  # adding 0 turns -0.0 into 0.0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    found: npt.NDArray[np.uint64] = (at.astype(np.uint64) << np.uint64(32)) | ordered
    return found

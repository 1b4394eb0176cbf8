"""Interactions: features that stand for values of two or three columns together, such as `country^device`.

They are made of the columns' keys while a minibatch is prepared, for training, evaluation and prediction alike; data
and caches do not hold them. A model keeps what it needs for that in its settings: the text that a user wrote, and where
the columns stand in rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.data import Batch, Columns
from paceline.errors import UsageError
from paceline.kernels.reference import MAX_ORDER
from paceline.models.features.layout import RowLayout

MAX_CROSSES: Final = 10_000
_ANY = "*"
_NO_VALUES = np.empty(0, np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interactions:
    """Which columns are crossed. Raises UsageError for a text that means none, and for columns that are not there."""

    text: str
    """``C1:C2,C3:*``: crosses of two or three columns; ``*`` stands for every column."""
    layout: RowLayout | None = None
    """The columns of the data; None until they are known (:meth:`of_columns`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", RowLayout.of(self.layout))
        for cross in self.text.split(","):
            parts = cross.split(":")
            if not 2 <= len(parts) <= MAX_ORDER or not all(parts):
                raise UsageError(
                    f"--interactions {self.text}: expected two or three columns as in C1:C2,C3:*, and {cross!r} is none"
                )
        if self.layout is not None:
            _ = self.crosses  # which are checked

    @classmethod
    def of(cls, settings: Any) -> Interactions | None:
        """Return the interactions that `settings` are, or are the fields of, as JSON has them."""
        return settings if settings is None or isinstance(settings, cls) else cls(**settings)

    def of_columns(self, format: str, columns: Columns | None) -> Interactions:
        """Return these interactions of the columns of some data."""
        layout = RowLayout.of_data(format, columns)
        if layout is None:
            raise UsageError(f"--interactions {self.text}: {format} has no columns to cross; leave it out")
        return dataclasses.replace(self, layout=layout)

    @property
    def _columns(self) -> RowLayout:
        assert self.layout is not None, "columns are known once there is data"
        return self.layout

    @cached_property
    def crosses(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the columns that are crossed, rising, each set of them once."""
        names = self._columns.names
        numbers = {name: number for number, name in enumerate(names)}
        found: dict[tuple[int, ...], None] = {}
        for cross in self.text.split(","):
            choices: list[Iterable[int]] = []
            for name in cross.split(":"):
                if name != _ANY and name not in numbers:
                    raise UsageError(
                        f"--interactions {self.text}: there is no column {name!r}; the columns are {', '.join(names)}"
                    )
                choices.append(range(len(numbers)) if name == _ANY else (numbers[name],))
            before = len(found)
            for chosen in itertools.product(*choices):
                if len(set(chosen)) == len(chosen):
                    found[tuple(sorted(chosen))] = None
                if len(found) > MAX_CROSSES:
                    raise UsageError(f"--interactions {self.text}: more than {MAX_CROSSES:,} crosses; name fewer")
            if len(found) == before and _ANY not in cross and len(set(cross.split(":"))) < len(cross.split(":")):
                raise UsageError(f"--interactions {self.text}: {cross!r} crosses a column with itself")
        if not found:
            raise UsageError(f"--interactions {self.text}: there are too few columns to cross: {', '.join(names)}")
        return tuple(found)

    @cached_property
    def _terms(self) -> npt.NDArray[np.int64]:
        """The columns of each cross, and -1 in place of a third that it does not have."""
        return np.array([(*cross, *([-1] * (MAX_ORDER - len(cross)))) for cross in self.crosses], np.int64)

    def apply(self, batch: Batch) -> Batch:
        """Return the rows with the pairs of their crosses behind their own."""
        from paceline.kernels.interactions import cross_features

        terms, layout = self._terms, self._columns
        most = len(batch.keys) + batch.num_examples * len(terms)
        indptr, keys = np.empty(batch.num_examples + 1, np.int64), np.empty(most, np.uint64)
        values = _NO_VALUES if batch.values is None else batch.values
        out_values = np.empty(most if len(values) else 0, np.float32)
        num_pairs = cross_features(
            *(batch.indptr, batch.keys, values, len(layout.categorical), layout.numeric_keys, terms),
            *(indptr, keys, out_values),
        )
        crossed = None if batch.values is None else out_values[:num_pairs]
        return Batch(batch.labels, indptr, keys[:num_pairs], crossed, batch.weights)

    def parts_of(self, batch: Batch) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the key of each cross of each row, and the keys that it was made of."""
        rows, own = self.apply(batch), np.diff(batch.indptr)
        for row in range(batch.num_examples):
            start = int(rows.indptr[row])
            first = rows.keys[start : start + own[row]].tolist()
            crossed = iter(rows.keys[start + own[row] : rows.indptr[row + 1]].tolist())
            by_column = self._by_column(first)
            for cross in self.crosses:
                if all(column in by_column for column in cross):
                    yield next(crossed), tuple(by_column[column] for column in cross)

    def _by_column(self, keys: Sequence[int]) -> dict[int, int]:
        """Return a row's own keys by the number of the column."""
        num_categorical = len(self._columns.categorical)
        found = dict(enumerate(keys[:num_categorical]))
        numbers = {key: number for number, key in enumerate(self._columns.numeric_keys.tolist(), num_categorical)}
        return found | {numbers[key]: key for key in keys[num_categorical:]}

"""Interactions: features for combined values of two or three columns, such as `country^device`.

If columns have several values in a row, as namespaces of Vowpal Wabbit and lists do, all pairs (triples) of values are
crossed. A namespace crossed with itself gives all pairs of its features.

Interactions are computed from the column keys of each minibatch, in training, evaluation and prediction. Data and
caches do not contain interactions. A model's settings store the user's text and the positions of the columns.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.data import Batch, Columns
from paceline.errors import DataError, UsageError
from paceline.kernels.features.interactions import MAX_ORDER
from paceline.models.features.layout import RowLayout

MAX_CROSSES: Final = 10_000
_MOST_PAIRS: Final = 1 << 28
_ANY = "*"
_NO_VALUES = np.empty(0, np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interactions:
    """The crossed columns. Raises UsageError for an invalid text or an unknown column."""

    text: str
    """``C1:C2,C3:*``: crosses of two or three columns; ``*`` means every column."""
    layout: RowLayout | None = None
    """The columns of the data; None while unknown (:meth:`of_columns`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", RowLayout.of(self.layout))
        for cross in self.text.split(","):
            parts = cross.split(":")
            if not 2 <= len(parts) <= MAX_ORDER or not all(parts):
                raise UsageError(
                    f"--interactions {self.text}: {cross!r} is invalid; expected two or three columns, as in C1:C2,C3:*"
                )
        if self.layout is not None:
            _ = self.crosses  # raises UsageError for invalid crosses

    @classmethod
    def of(cls, settings: Any) -> Interactions | None:
        """Return the interactions for `settings`: Interactions, their fields as read from JSON, or None."""
        return settings if settings is None or isinstance(settings, cls) else cls(**settings)

    def of_columns(self, format: str, columns: Columns | None, fields: Sequence[str] = ()) -> Interactions:
        """Return these interactions for the columns of the data, or for its `fields` if its format has no columns."""
        layout = RowLayout.of_data(format, columns, fields)
        if layout is None:
            raise UsageError(f"--interactions {self.text}: {format} has no columns to cross. Leave the option out")
        return dataclasses.replace(self, layout=layout)

    @property
    def _columns(self) -> RowLayout:
        assert self.layout is not None, "of_columns() was not called"
        return self.layout

    @cached_property
    def crosses(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the crossed columns. Each cross is sorted and occurs once."""
        layout = self._columns
        found: dict[tuple[int, ...], None] = {}
        for cross in self.text.split(","):
            parts, choices = cross.split(":"), []
            for name in parts:
                numbers = tuple(range(len(layout.names))) if name == _ANY else layout.find(name)
                if not numbers:
                    raise UsageError(
                        f"--interactions {self.text}: unknown column {name!r}; the columns are {layout.shown_names}"
                    )
                choices.append(numbers)
            before = len(found)
            may_repeat = layout.is_open and _ANY not in parts  # all pairs of a namespace's features, as -q aa does
            for chosen in itertools.product(*choices):
                if may_repeat or len(set(chosen)) == len(chosen):
                    found[tuple(sorted(chosen))] = None
                if len(found) > MAX_CROSSES:
                    raise UsageError(f"--interactions {self.text}: more than {MAX_CROSSES:,} crosses. Name fewer")
            if len(found) == before and _ANY not in cross and len(set(cross.split(":"))) < len(cross.split(":")):
                raise UsageError(f"--interactions {self.text}: {cross!r} crosses a column with itself")
        if not found:
            raise UsageError(f"--interactions {self.text}: too few columns to cross: {layout.shown_names}")
        return tuple(found)

    @cached_property
    def _terms(self) -> npt.NDArray[np.int64]:
        """The columns of each cross, with -1 for a missing third column."""
        return np.array([(*cross, *([-1] * (MAX_ORDER - len(cross)))) for cross in self.crosses], np.int64)

    def apply(self, batch: Batch) -> Batch:
        from paceline.kernels.features.interactions import cross_features

        if batch.fields is not None or self._columns.is_open:
            return self._apply_to_fields(batch)
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

    def _apply_to_fields(self, batch: Batch) -> Batch:
        """Return the rows with their crosses added. Each feature of the rows must have a field."""
        from paceline.kernels.features.interactions import count_crosses, cross_fields

        starts, order = self._group(batch)
        num_pairs = len(batch.keys) + int(count_crosses(starts, self._terms))
        if num_pairs > _MOST_PAIRS:
            raise DataError(
                f"--interactions {self.text} makes {num_pairs:,} features of {batch.num_examples:,} rows. Cross fewer "
                "fields, or fields with fewer features"
            )
        indptr, keys = np.empty(batch.num_examples + 1, np.int64), np.empty(num_pairs, np.uint64)
        values = _NO_VALUES if batch.values is None else batch.values
        crossed = np.empty(num_pairs if len(values) else 0, np.float32)
        cross_fields(batch.indptr, batch.keys, values, starts, order, self._terms, indptr, keys, crossed)
        return Batch(batch.labels, indptr, keys, None if batch.values is None else crossed, batch.weights)

    def _group(self, batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the start of each field in each row, and the positions of keys by field (:func:`group_fields`)."""
        from paceline.kernels.features.interactions import group_fields

        layout = self._columns
        are_sorted = np.zeros(len(layout), np.uint8)
        are_sorted[[a for cross in self.crosses for a, b in itertools.pairwise(cross) if a == b]] = 1
        starts = np.empty((batch.num_examples, len(layout) + 1), np.int64)
        order = np.empty(len(batch.keys), np.int64)
        group_fields(batch.indptr, batch.keys, layout.fields_of(batch), are_sorted, starts, order)
        return starts, order

    def parts_of(self, batch: Batch) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the key of each cross in each row, with the keys of the crossed values."""
        rows, own = self.apply(batch), np.diff(batch.indptr)
        starts, order = self._group(batch)
        for row in range(batch.num_examples):
            crossed = iter(rows.keys[rows.indptr[row] + own[row] : rows.indptr[row + 1]].tolist())
            ends = starts[row].tolist()
            for cross in self.crosses:
                fields = [batch.keys[order[ends[field] : ends[field + 1]]].tolist() for field in cross]
                for places in itertools.product(*(range(len(values)) for values in fields)):
                    repeated = zip(itertools.pairwise(cross), itertools.pairwise(places), strict=True)
                    if all(a != b or i < j for (a, b), (i, j) in repeated):
                        yield next(crossed), tuple(field[place] for field, place in zip(fields, places, strict=True))

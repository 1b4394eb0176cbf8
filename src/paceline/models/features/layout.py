"""The positions of columns in a row, and the fields of features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.data import FORMATS, Batch, Columns
from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import field_of, name_seed

_SEVERAL: Final = (
    "a row has several values of a category, or none, and its converted data does not name their columns. "
    "Convert the data again, or read it from its source"
)
_UNNAMED = "(no name)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The columns of data. A row has a pair per categorical column, then a pair per number that is not missing.

    If features have fields (``batch.fields``), a row may have any number of features per column, in any order.
    """

    categorical: tuple[str, ...]
    numeric: tuple[str, ...] = ()
    is_open: bool = False
    """Whether rows may have additional fields (vw, JSON lines). All of them together are one additional column."""

    def __post_init__(self) -> None:
        for name in ("categorical", "numeric"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(cls, settings: Any) -> RowLayout | None:
        """Return the layout for `settings`: a RowLayout, its fields as read from JSON, or None."""
        return settings if settings is None or isinstance(settings, cls) else cls(**settings)

    @classmethod
    def of_data(cls, format: str, columns: Columns | None, fields: Sequence[str] = ()) -> RowLayout | None:
        """Return the layout of data; None if it has no columns. `fields`: namespaces of vw or fields of JSON lines."""
        if columns is not None and not columns.is_open:
            return cls(categorical=(*columns.categorical, *columns.text), numeric=columns.numeric)
        if fields:
            return cls(categorical=tuple(fields), is_open=True)
        fixed = FORMATS[format].fixed_columns if format in FORMATS else ()
        return cls(categorical=fixed) if fixed else None

    def __len__(self) -> int:
        return len(self.fields)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.categorical, *self.numeric)

    @property
    def fields(self) -> tuple[str | None, ...]:
        """The names of the columns, in the order of their numbers; the last is None if `is_open`."""
        return (*self.names, None) if self.is_open else self.names

    @property
    def shown_names(self) -> str:
        return ", ".join(name or _UNNAMED for name in self.names)

    def find(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the columns with this name; empty for an unknown name.

        As in Vowpal Wabbit, a single letter means all namespaces with this initial, unless a namespace has this name.
        """
        if name == _UNNAMED:
            name = ""
        if name in self.names:
            return (self.names.index(name),)
        is_letter = self.is_open and len(name) == 1
        return tuple(number for number, column in enumerate(self.names) if is_letter and column.startswith(name))

    @cached_property
    def numeric_keys(self) -> npt.NDArray[np.uint64]:
        return np.array([name_seed(name) for name in self.numeric], np.uint64)

    def fields_of(self, batch: Batch) -> npt.NDArray[np.int32]:
        """Return the column number of each pair in a batch: int32 [pairs].

        Raises DataError for a row without fields that has no value, or several, in a categorical column.
        """
        if batch.fields is not None:
            return self._numbers_of(batch.fields)
        lengths, num_categorical = np.diff(batch.indptr), len(self.categorical)
        if self.is_open and len(batch.keys):
            raise DataError(_SEVERAL)
        if lengths.min(initial=num_categorical) < num_categorical:
            raise DataError(_SEVERAL)
        fields = np.arange(len(batch.keys)) - np.repeat(batch.indptr[:-1], lengths)
        are_numeric = np.flatnonzero(fields >= num_categorical)
        if len(are_numeric):
            keys, order = self._sorted_numeric
            found = np.searchsorted(keys, batch.keys[are_numeric])
            if not np.isin(batch.keys[are_numeric], keys).all():
                raise DataError(_SEVERAL)
            fields[are_numeric] = order[found] + num_categorical
        return fields.astype(np.int32)

    def _numbers_of(self, fields: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the number of each field; an unknown field gets the number of the additional column."""
        hashes, order = self._sorted_fields
        found = np.minimum(np.searchsorted(hashes, fields), len(hashes) - 1)
        is_known = hashes[found] == fields
        if not self.is_open and not is_known.all():
            raise DataError(
                f"a row has a feature of a column that the model lacks; its columns are {self.shown_names}. Train "
                "again with this column, or remove it from the data"
            )
        return np.where(is_known, order[found], len(self.names)).astype(np.int32)

    @cached_property
    def _sorted_fields(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The hashes of the column names in ascending order, and the column's number for each hash."""
        hashes = np.array([field_of(name) for name in self.names], np.uint32)
        if len(np.unique(hashes)) < len(hashes):
            raise UsageError(f"two of the fields {self.shown_names} have the same hash. Rename one field")
        order = np.argsort(hashes)
        return hashes[order], order

    @cached_property
    def _sorted_numeric(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        order = np.argsort(self.numeric_keys)
        return self.numeric_keys[order], order

"""Where the features of each column stand in a row."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.data import Batch, Columns
from paceline.data.feature_names import CRITEO_NAMES
from paceline.errors import DataError
from paceline.kernels.text.reference import name_seed

_SEVERAL: Final = (
    "a row has several values of a category, or none, as columns of lists do: models with factors for each column need "
    "one; leave such columns out, or take --model fm"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The columns of some data: rows have a pair for each categorical one, then for each number that is not missing."""

    categorical: tuple[str, ...]
    numeric: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("categorical", "numeric"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(cls, settings: Any) -> RowLayout | None:
        """Return the layout that `settings` are, or are the fields of, as JSON has them."""
        return settings if settings is None or isinstance(settings, cls) else cls(**settings)

    @classmethod
    def of_data(cls, format: str, columns: Columns | None) -> RowLayout | None:
        """Return the layout of data of this format; None if it has none.

        JSON lines have fields in the order of each line.
        """
        if columns is not None and not columns.is_open:
            return cls(categorical=columns.categorical, numeric=columns.numeric)
        return cls(categorical=CRITEO_NAMES) if format == "criteo" else None

    def __len__(self) -> int:
        """Return how many columns there are."""
        return len(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns, in the order in which rows have them."""
        return (*self.categorical, *self.numeric)

    @cached_property
    def numeric_keys(self) -> npt.NDArray[np.uint64]:
        """The key of each numeric column: uint64 [numeric columns]."""
        return np.array([name_seed(name) for name in self.numeric], np.uint64)

    def fields_of(self, batch: Batch) -> npt.NDArray[np.int32]:
        """Return the number of the column of each pair of a batch: int32 [pairs].

        Raises DataError for rows that have not one value of each categorical column, as where one has lists.
        """
        lengths, num_categorical = np.diff(batch.indptr), len(self.categorical)
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

    @cached_property
    def _sorted_numeric(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The keys of numeric columns, rising, and the place of each among them."""
        order = np.argsort(self.numeric_keys)
        return self.numeric_keys[order], order

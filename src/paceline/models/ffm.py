"""Field-aware factorization machine: a feature has one vector for each column of a partner feature.

margin = offset + bias + Σ w[k]·x_k + Σ_{k<l} ⟨v[k, column of l], v[l, column of k]⟩·x_k·x_l (Juan, Zhuang, Chin, Lin,
"Field-aware factorization machines for CTR prediction", RecSys 2016, but without the paper's division by the length of
a row). The sum is over all pairs of a row's features. This includes pairs within a field that has several features,
such as a namespace or a list. Only frequent features have vectors. Vectors are updated like those of
:mod:`paceline.models.fm`. A feature's vectors are stored in one row of `num_columns * dim` numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, override

from paceline.data import Batch, Columns
from paceline.errors import UsageError
from paceline.kernels.csr import add_field_interactions, field_interaction_gradients
from paceline.models.base import KeyedMatrix
from paceline.models.features.layout import RowLayout
from paceline.models.fm import FactorizationMinibatch, FactorModel
from paceline.tables.spec import MAX_DIM
from paceline.tables.types import Floats


class FieldAwareMinibatch(FactorizationMinibatch):
    """A minibatch of clicks for a field-aware factorization machine."""

    __slots__ = ("_are_paired", "_fields", "_width")

    def __init__(self, model: FieldAwareMachine, batch: Batch, rows: KeyedMatrix) -> None:
        super().__init__(model, batch, rows)
        assert model.layout is not None, "of_columns() was not called"
        self._fields = model.layout.fields_of(batch)
        self._width = model.dim
        self._are_paired = np.empty(0, np.uint8)

    @override
    def _add_pairs(self, factors: Floats, active: npt.NDArray[np.bool_], margins: Floats) -> None:
        rows, self._factors, self._are_paired = self._rows, factors, active.view(np.uint8)
        add_field_interactions(
            *(rows.indptr, rows.indices, rows.values, self._fields, self._are_paired, factors, self._width, margins)
        )

    @override
    def _pair_gradients(self, residuals: Floats, out: Floats) -> None:
        rows = self._rows
        field_interaction_gradients(
            *(rows.indptr, rows.indices, rows.values, self._fields, self._are_paired),
            *(self._factors, self._width, residuals, out),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldAwareMachine(FactorModel):
    """P(click) from a weight per feature, and `dim` factors for each column."""

    name: ClassVar[str] = "ffm"
    title: ClassVar[str] = "a field-aware factorization machine"

    usual: ClassVar[Mapping[str, Any]] = {**FactorModel.usual, "factor_l2": 0.1}
    minibatch: ClassVar[type[FactorizationMinibatch]] = FieldAwareMinibatch

    dim: int = 4
    layout: RowLayout | None = None
    """The columns of the data; None while unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", RowLayout.of(self.layout))
        super().__post_init__()
        if self.interactions is not None:
            raise UsageError("--interactions is not an option of --model ffm, which crosses all columns. Leave it out")

    @property
    @override
    def num_factors(self) -> int:
        num_columns = 1 if self.layout is None else len(self.layout)
        if num_columns * self.dim > MAX_DIM:
            raise UsageError(f"--dim {self.dim} for {num_columns} columns: expected at most {MAX_DIM:,} factors in all")
        return num_columns * self.dim

    @override
    def of_columns(self, format: str, columns: Columns | None, fields: Sequence[str] = ()) -> Self:
        layout = RowLayout.of_data(format, columns, fields)
        if layout is None:
            raise UsageError(f"--model ffm needs columns, but {format} has none. Use --model fm")
        return dataclasses.replace(self, layout=layout)

"""Choose the columns of a frame that are numbers, text or categories."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import Batch, Columns, fit_scale
from paceline.data.columns import import_arrow
from paceline.data.example_sampling import sample_batch
from paceline.data.guessing import judge_column
from paceline.inference.frames import ColumnReader, list_names, names_of
from paceline.training.files.numeric_scales import choose_scales

LABEL = "\0label"
"""Name of the label's column. No frame has a column of this name."""

_SAMPLE = 20_000  # at most twice this number of rows for fitting scales


def has_text(frame: Any) -> bool:
    """Return whether a frame has a column of values other than numbers."""
    return not all(_is_numeric(frame[name]) for name in names_of(frame))


def choose_columns(frame: Any, y: npt.NDArray[Any], how: str) -> Columns:
    """Return the columns of a frame, given a scale for ``--numeric-scale`` and each row's label `y`.

    Columns of times are left out with a warning, because a time rarely occurs again.
    """
    names = [str(name) for name in names_of(frame)]
    times = [name for name in names if _is_temporal(frame[name])]
    if times:
        warnings.warn(
            f"columns of times are left out: {list_names(times)}. Convert them to numbers or categories, such as the "
            "hour",
            stacklevel=5,
        )
        names = [name for name in names if name not in times]
    numeric = [name for name in names if _is_numeric(frame[name])]
    sampled = slice(None, None, len(frame) // _SAMPLE + 1)
    cells = {name: list(map(str, list(frame[name])[sampled])) for name in numeric}
    how_first = "standard" if how == "auto" else how
    scales = () if how == "none" else tuple(fit_scale(cells[name], how_first) for name in numeric)
    remaining = [name for name in names if name not in numeric]
    text = tuple(name for name in remaining if _is_text(name, list(frame[name])[sampled]))
    categorical = tuple(name for name in remaining if name not in text)
    columns = Columns(LABEL, categorical, tuple(numeric), scales, text=text, trims=False)
    if how != "auto" or not numeric:
        return columns
    centring = dataclasses.replace(columns, scales=tuple(scale.centring for scale in scales))
    rows = Batch.concatenate(list(ColumnReader(centring, from_text=False, is_known=None).batches(frame)))
    rows.labels = (y if y.dtype.kind in "fiub" else np.unique(y, return_inverse=True)[1]).astype(np.float32)
    return dataclasses.replace(columns, scales=choose_scales(sample_batch(rows), columns))


def _is_text(name: str, column: Sequence[Any]) -> bool:
    """Return whether a column's words are features. The rule is the same as for files."""
    cells = [cell for cell in column if isinstance(cell, str) and cell]
    return judge_column(name, cells, Counter(cells), "text")[0] == "text"


def _is_numeric(column: Any) -> bool:
    """Return whether a column of pandas, polars or Arrow has numbers."""
    dtype = getattr(column, "dtype", None)
    if dtype is None:
        types, found = import_arrow().types, column.type
        return any(test(found) for test in (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean))
    is_numeric = getattr(dtype, "is_numeric", None)
    if is_numeric is not None:
        return bool(is_numeric()) or str(dtype) == "Boolean"
    return getattr(dtype, "kind", "O") in "iufb"


def _is_temporal(column: Any) -> bool:
    dtype = getattr(column, "dtype", None)
    if dtype is None:
        return bool(import_arrow().types.is_temporal(column.type))
    is_temporal = getattr(dtype, "is_temporal", None)
    if is_temporal is not None:
        return bool(is_temporal())
    return getattr(dtype, "kind", "O") in "mM"

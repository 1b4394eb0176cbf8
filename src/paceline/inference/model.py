"""A saved model in this process: ``paceline.load("model/").predict(X)``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import FORMATS, Batch, Columns, Format
from paceline.errors import ModelError, UsageError
from paceline.inference.arrays import ArrayReader
from paceline.inference.frames import ColumnReader, CriteoReader, FrameReader, JsonReader, is_frame, list_names
from paceline.inference.weights import Weights, join_weights, weights_of_data
from paceline.launch import prepare_kernels
from paceline.models.base import BIAS_KEY
from paceline.models.prediction import Predictor
from paceline.tables.types import Floats, Keys

_BATCH = 4096


def load(directory: str | os.PathLike[str]) -> LoadedModel:
    """Load a model written by ``paceline train --save``. Raises ModelError for a directory without a model."""
    prepare_kernels()
    return LoadedModel(Path(directory), Predictor(directory))


class LoadedModel:
    """A saved model, loaded by :func:`load`. Thread-safe."""

    def __init__(self, directory: Path, predictor: Predictor) -> None:
        self.directory = directory
        """The directory of the saved model."""
        self._predictor = predictor

    @property
    def kind(self) -> str:
        """Name of the model, such as ``lr`` for a logistic regression."""
        return self._predictor.model.name

    @property
    def settings(self) -> dict[str, Any]:
        """The model's settings, such as the list of classes or the number of factors."""
        described = self._predictor.model.describe()
        return {name: value for name, value in described.items() if name != "kind"}

    @property
    def format(self) -> str:
        """Format of the training data."""
        return self._predictor.format

    @property
    def columns(self) -> Columns | None:
        """Columns of the training data; None if the columns had no names."""
        return self._predictor.columns

    @property
    def num_features(self) -> int:
        """Number of features, without the bias."""
        return max(len(self._predictor.stores[0]) - 1, 0)

    def __repr__(self) -> str:
        columns = self.columns
        text = f"<LoadedModel {self.kind}: {self.num_features:,} features, trained on {self.format}"
        if columns is not None:
            parts = [("categorical", columns.categorical), ("numeric", columns.numeric), ("text", columns.text)]
            text += "".join(f", {kind}: {list_names(names)}" for kind, names in parts if names)
        return f"{text}; from {self.directory}>"

    def predict(self, X: Any, *, strict: bool = True) -> Floats:
        """Return the predictions for examples, in order.

        Click models return the probability of a click (float32 [n]), regression models a number (float32 [n]). Models
        of several classes return a probability per class (float32 [n, classes]), in the order of
        ``settings["classes"]``.

        `X` is one of:

        - the path of a data file, or a list of paths;
        - for a model of CSV, Parquet or Criteo data, a DataFrame of pandas or polars, or a dict of columns;
        - for a model of LIBSVM data, a NumPy array or SciPy sparse matrix [n, columns]: a column's number is its key;
        - a list of rows, each a dict of values by column name or by key.

        Additional columns in frames and dicts, such as a label, are ignored.

        Raises UsageError for data that does not fit the model. Malformed lines in files raise DataError. If `strict` is
        False, they are skipped and have no prediction.
        """
        predicted = [self._predictor.predict_batch(batch) for batch in self._batches(X, strict)]
        found = np.concatenate(predicted) if predicted else np.empty(0, np.float32)
        if not np.isfinite(found).all():
            raise ModelError(
                f"the model in {self.directory} predicts NaN or infinity: its training diverged. Train again with a "
                "smaller --lr"
            )
        return found

    def weights(self) -> Weights:
        """Return the weights of the first table: `keys` (uint64 [n], ascending), `values` (float32 [n, dim]) and `bias`
        (float32 [dim]).
        """
        predictor = self._predictor
        scaling = None if predictor.scaling is None else predictor.scaling.spec()
        found = join_weights(predictor.stores[0].items(), predictor.stores[0].dim)
        return weights_of_data(found, {**predictor.model.describe(), "scaling": scaling})

    def _batches(self, X: Any, strict: bool) -> Iterator[Batch]:
        if type(X) is list and X and all(type(row) is dict for row in X):  # the most common form of rows, checked first
            return self._row_batches(X)
        if isinstance(X, str | os.PathLike):
            return self._file_batches([X], strict)
        if isinstance(X, Mapping) and not all(
            hasattr(column, "__len__") and not isinstance(column, str) for column in X.values()
        ):
            raise UsageError("X is a dict of single values. Pass a list with this dict, or a dict of columns")
        if isinstance(X, Mapping) or is_frame(X):
            return self._frames.batches(X)
        if isinstance(X, Sequence):
            if not X:
                return iter(())
            if all(isinstance(item, str | os.PathLike) for item in X):
                return self._file_batches(X, strict)
            if all(isinstance(item, Mapping) for item in X):
                return self._row_batches(X)
        return self._arrays.batches(X)

    def _file_batches(self, paths: Iterable[str | os.PathLike[str]], strict: bool) -> Iterator[Batch]:
        with self._predictor.open_data([os.fspath(path) for path in paths], strict=strict) as dataset:
            yield from dataset.batches(_BATCH)

    def _row_batches(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Batch]:
        if self._kind.has_numbered_features:
            return self._arrays.row_batches(rows)
        return self._frames.row_batches(rows)

    @property
    def _kind(self) -> Format:
        return FORMATS[self.format]

    @cached_property
    def _arrays(self) -> ArrayReader:
        if not self._kind.has_numbered_features:
            raise UsageError(
                f"an array has no column names, but the model was trained on {self.format}. Pass a DataFrame, a dict "
                "of columns, or the path of a file"
            )
        return ArrayReader(self._key_range())

    @cached_property
    def _frames(self) -> FrameReader:
        if self._kind.fixed_columns:
            return CriteoReader()
        if self.columns is None and not self._kind.has_numbered_features:
            raise UsageError(f"the model was trained on {self.format}, not on frames or dicts. Pass the path of a file")
        if self.columns is None:
            raise UsageError(
                f"the model was trained on {self.format}, which has numbered features. Pass an array or a sparse "
                "matrix instead of a frame, for example X.to_numpy()"
            )
        if self.columns.is_open:
            return JsonReader(self.columns)
        return ColumnReader(self.columns, from_text=self._kind.cells_are_text, is_known=self._is_known)

    def _key_range(self) -> tuple[int, int] | None:
        """Return the smallest and the largest key of a feature."""
        ends = [(keys.min(), keys.max()) for keys in self._keys() if len(keys)]
        return (int(min(low for low, _ in ends)), int(max(high for _, high in ends))) if ends else None

    def _keys(self) -> Iterator[Keys]:
        """Yield the keys that features have in data files. A number with bins has one key, not one for each bin."""
        scaling = self._predictor.scaling
        bins = np.empty(0, np.uint64) if scaling is None else scaling.bin_keys
        for keys, _ in self._predictor.stores[0].items():
            yield keys[(keys != BIAS_KEY) & ~np.isin(keys, bins)]
        if len(bins):
            assert scaling is not None
            yield scaling.keys

    def _is_known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        return self._predictor.stores[0].read_records(keys)[1]

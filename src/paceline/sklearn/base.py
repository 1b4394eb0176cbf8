"""The common part of all estimators: conversion of examples, training and saving."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, is_regressor
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, InvalidParameterError, StrOptions
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
from typing_extensions import Self

from paceline.data import Batch, Columns, check_numeric_scale
from paceline.data.example_sampling import sample_batch
from paceline.data.key_scaling import read_key_scaling
from paceline.errors import UsageError
from paceline.inference.arrays import ArrayReader
from paceline.inference.frames import ColumnReader, is_frame
from paceline.launch import connect, prepare_kernels
from paceline.models.base import SparseModel
from paceline.models.registry import read_model_settings
from paceline.models.stored import read_stored_model
from paceline.models.update import UPDATE_NAMES, make_update
from paceline.protocol import parse_consistency
from paceline.ps import UpdateRule
from paceline.sklearn.frames import choose_columns, has_text
from paceline.sklearn.model_tables import ModelTables
from paceline.tables.types import Doubles, Floats
from paceline.temporary import TemporaryFolder
from paceline.training.driver import train_locally, train_on
from paceline.training.files.numeric_scales import choose_key_scaling
from paceline.training.options import ExampleWeights, PassOptions, TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.planning import plan_on_sample
from paceline.training.tuning.choices import suggested_batch_size
from paceline.training.weighting import Weighting

_NUMBERS: dict[str, Any] = {"accept_sparse": "csr", "dtype": [np.float64, np.float32], "ensure_all_finite": False}
"""Options for scikit-learn's checks of arrays. They allow infinities, which the readers of arrays reject."""

_NO_FLOAT = re.compile(r"could not convert string to float: (?:np\.str_\()?('.*'|\".*\")\)?")

_WRITTEN_ROWS = 4096
AT_LEAST_0 = Interval(Real, 0, None, closed="left")
ABOVE_0 = Interval(Real, 0, None, closed="neither")
AT_LEAST_1 = Interval(Integral, 1, None, closed="left")

PARAMETERS: Final[dict[str, list[Any]]] = {
    "update": [StrOptions(set(UPDATE_NAMES))],
    "lr": [ABOVE_0, None],
    "l1": [AT_LEAST_0, None],
    "l2": [AT_LEAST_0, None],
    "beta": [ABOVE_0, None],
    "epochs": [AT_LEAST_1, None],
    "batch_size": [AT_LEAST_1, None],
    "shuffle": ["boolean"],
    "numeric_scale": [str],
    "random_state": ["random_state"],
    "workers": [AT_LEAST_1, None],
    "servers": [AT_LEAST_1],
    "consistency": [str],
    "scheduler": [str, None],
    "token": [str, None],
}
"""The valid values of each parameter, for scikit-learn's checks."""


@contextlib.contextmanager
def _numbers_expected(X: Any) -> Iterator[None]:
    """Add a remedy to NumPy's errors about values that are not numbers."""
    if isinstance(X, Mapping) or (hasattr(X, "collect") and not hasattr(X, "__len__")):
        remedy = "call collect() first" if hasattr(X, "collect") else "convert it first"
        raise UsageError(f"X is a {type(X).__name__}: expected an array, a sparse matrix or a DataFrame: {remedy}")
    try:
        yield
    except ValueError as error:
        found = _NO_FLOAT.match(str(error))
        if found is None:
            raise
        raise UsageError(
            f"X or y holds the text {found[1]}: expected numbers. Pass a DataFrame for columns of text, which become "
            "categories"
        ) from None


def _plan_on(options: TrainOptions, rows: Batch) -> TrainingPlan:
    sample, scaling = sample_batch(rows), None
    if options.numeric_scale != "none":
        scaling = choose_key_scaling(sample, options.numeric_scale, absent_is_zero=True, model=options.model)
    return plan_on_sample(options, sample, scaling)


def _write_libsvm(path: Path, examples: Batch, order: npt.NDArray[np.int64]) -> None:
    """Write examples as LIBSVM text. Nothing is lost, because nine digits determine a float32."""
    with open(path, "w", encoding="ascii") as out:
        for start in range(0, len(order), _WRITTEN_ROWS):
            part = examples.take(order[start : start + _WRITTEN_ROWS])
            values = [1.0] * len(part.keys) if part.values is None else part.values.tolist()
            pairs = [f"{key}:{value:.9g}" for key, value in zip(part.keys.tolist(), values, strict=True)]
            ends = part.indptr.tolist()
            for row, label in enumerate(part.labels.tolist()):
                out.write(f"{label:.9g} {' '.join(pairs[ends[row] : ends[row + 1]])}\n")


@dataclass(kw_only=True, eq=False, repr=False)
class SparseEstimator(BaseEstimator, ABC):
    """Base class of estimators with a model of ``paceline train``. A subclass defines the model and the labels.

    The fields of the class are the estimator's parameters. A subclass with further fields adds their valid values to
    `_parameter_constraints`.
    """

    _parameter_constraints = PARAMETERS

    update: str = "ftrl"
    lr: float | None = None
    l1: float | None = None
    l2: float | None = None
    beta: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    shuffle: bool = True
    numeric_scale: str = "auto"
    random_state: Any = None
    workers: int | None = None
    servers: int = 1
    consistency: str = "bounded:4"
    scheduler: str | None = None
    token: str | None = None

    @abstractmethod
    def _model(self) -> SparseModel:
        """Return the untrained model with its settings. Raises UsageError for invalid settings."""

    @abstractmethod
    def _learn_targets(self, targets: npt.NDArray[Any]) -> None:
        """Store the targets' properties before a first training. Raises UsageError for invalid targets."""

    @abstractmethod
    def _to_labels(self, targets: npt.NDArray[Any]) -> Floats:
        """Return targets as the model's labels (float32 [n]). Raises UsageError for invalid targets."""

    def _weighting(self, targets: npt.NDArray[Any]) -> Weighting:
        return Weighting()

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a new model on examples X and their targets y [n].

        `sample_weight` [n] multiplies each example's loss and gradient. It is not supported on a cluster.
        """
        self._check_parameters()
        X, targets = self._read_training_data(X, y, reset=True)
        self._learn_targets(targets)
        rows = self._to_batch(X, self._to_labels(targets), sample_weight)
        random = check_random_state(self.random_state)
        order = random.permutation(rows.num_examples) if self.shuffle else np.arange(rows.num_examples)
        weighting = self._weighting(targets)
        if self.workers is None and self.scheduler is None:
            rows = weighting.weighted(rows.take(order))
            tables = self._train_in_process(rows, random)
        else:
            if sample_weight is not None:
                raise UsageError("sample_weight is not supported on a cluster. Leave it out, or train locally")
            weights = ExampleWeights(classes=weighting.classes or None)
            tables = self._train_on_cluster(rows, order, dataclasses.replace(self._options(rows), weights=weights))
        self._tables = tables
        return self

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the model as ``paceline train --save`` does, for use with ``paceline.load``."""
        check_is_fitted(self, "_tables")
        self._tables.save(directory, self._columns)

    def _coefficients(self) -> Doubles:
        """Return a linear model's weights by column: float64 [features, outputs]."""
        check_is_fitted(self, "_tables")
        if self._columns is not None:
            raise AttributeError(
                "this model has no coef_: the categories of its frame were hashed, so they have no column numbers. "
                "Train on numeric columns only to get coef_"
            )
        if not self._tables.is_linear:
            raise AttributeError(
                "some columns use logarithms or bins, because their effect is nonlinear. They have several weights or "
                "none. Pass numeric_scale='standard' to train one weight per column"
            )
        weights = self._tables.linear_weights()
        out = np.zeros((self.n_features_in_, weights.values.shape[1]))
        out[weights.keys.astype(np.int64)] = weights.values
        return out

    # Training.

    def _check_can_learn_on(self) -> None:
        if self.workers is not None or self.scheduler is not None:
            raise UsageError("partial_fit trains in this process. Leave out workers and scheduler, or call fit")

    def _learn_on(self, rows: Batch) -> Self:
        """Make a pass over more examples. The first call chooses the learning rate and the scale."""
        if not hasattr(self, "_tables"):
            options = self._options(rows)
            plan = _plan_on(dataclasses.replace(options, epochs=1, model=options.model.with_defaults()), rows)
            random = check_random_state(self.random_state)
            self._tables = ModelTables.create(plan.model, plan.update, plan.scaling, random)
        self._tables.train(self._tables.scaled(rows), self.batch_size or suggested_batch_size(rows.num_examples), None)
        return self

    def _train_in_process(self, rows: Batch, random: np.random.RandomState) -> ModelTables:
        """Train in this process. The first pass has the order of `rows`. `random` shuffles later passes."""
        plan = _plan_on(self._options(rows), rows)
        tables = ModelTables.create(plan.model, plan.update, plan.scaling, random)
        rows = tables.scaled(rows)
        for epoch in range(plan.epochs):
            again = random.permutation(rows.num_examples) if self.shuffle and epoch else None
            tables.train(rows, plan.batch_size, again)
        if plan.recent is not None and plan.optimism is not None:
            tables.calibrate(plan.recent, plan.optimism, is_complete=plan.is_recent_complete)
        return tables

    def _train_on_cluster(self, rows: Batch, order: npt.NDArray[np.int64], options: TrainOptions) -> ModelTables:
        """Train on a cluster. Its workers read the rows, in the given order, from a file."""
        with TemporaryFolder.make("sklearn") as folder:
            data, directory = folder.path / "examples.svm", folder.path / "model"
            _write_libsvm(data, rows, order)
            options = dataclasses.replace(options, data=[str(data)], format="libsvm", save=directory)
            if self.scheduler is None:
                consistency = parse_consistency(self.consistency)
                train_locally(options, servers=self.servers, workers=self.workers or 1, consistency=consistency)
            else:
                with contextlib.closing(connect(self.scheduler, token=self.token, observer=True)) as client:
                    train_on(options, client)
            stored = read_stored_model(directory)
            model = read_model_settings(stored.described)
            tables = [(table.spec, stored.load_store(table.spec.name)) for table in stored.tables]
            return ModelTables(model, tables, read_key_scaling(stored.described))

    def _rule(self, suited_lr: float, suited_l1: float, suited_l2: float) -> UpdateRule:
        """Return the update rule. For FTRL, the arguments replace settings that are None."""
        lr, l1, l2 = self.lr, self.l1, self.l2
        if self.update == UPDATE_NAMES[0]:
            lr, l1 = suited_lr if lr is None else lr, suited_l1 if l1 is None else l1
            l2 = suited_l2 if l2 is None else l2
        return make_update(self.update, lr=lr, l1=l1, l2=l2, beta=self.beta, option_format="{}=")

    def _options(self, rows: Batch) -> TrainOptions:
        """Return the options of a training on `rows`, whose labels determine settings of some models."""
        model = self._model()
        if model.labels == "numbers":  # for click models, the training plan does this
            model = model.starting_from(rows.labels, rows.weights)
        scale = self.numeric_scale if self._columns is None else "none"  # a frame's columns have scales
        return TrainOptions(
            data=(),
            model=model,
            epochs=self.epochs,
            batch_size=self.batch_size,
            update=self._rule,
            passes=PassOptions(order="shuffle" if self.shuffle else "file"),
            numeric_scale=scale,
        )

    # Data.

    def _check_parameters(self) -> None:
        try:
            self._validate_params()
        except InvalidParameterError as error:
            raise UsageError(str(error)) from None
        if self.update != UPDATE_NAMES[0]:
            for name in ("l1", "beta"):
                if getattr(self, name):
                    raise UsageError(
                        f"{name}={getattr(self, name)!r} is for update={UPDATE_NAMES[0]!r}, but update is "
                        f"{self.update!r}. Leave {name} out"
                    )
        parse_consistency(self.consistency)
        check_numeric_scale(self.numeric_scale)
        prepare_kernels()

    def _read_training_data(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, npt.NDArray[Any]]:
        """Return X as an array or as the unchanged frame, and y after checks."""
        is_table = is_frame(X) and has_text(X) if reset else self._columns is not None
        if reset:
            self._columns: Columns | None = None
        if not is_table:
            with _numbers_expected(X):
                X, y = validate_data(self, X, y, reset=reset, y_numeric=is_regressor(self), **_NUMBERS)
        else:
            y = column_or_1d(y, warn=True)
            if len(y) != len(X):
                raise UsageError(f"X has {len(X)} rows but y has {len(y)}: expected equal numbers")
            if reset:
                self._columns = choose_columns(X, y, self.numeric_scale)
                self.feature_names_in_ = np.array(self._columns.names[1:], object)
                self.n_features_in_ = len(self.feature_names_in_)
        return X, np.asarray(y)

    def _prepare(self, X: Any) -> Batch:
        check_is_fitted(self, "_tables")
        prepare_kernels()
        if self._columns is None:
            with _numbers_expected(X):
                X = validate_data(self, X, reset=False, **_NUMBERS)
        return self._to_batch(X)

    def _to_batch(self, X: Any, labels: Floats | None = None, sample_weight: Any = None) -> Batch:
        batch = Batch.concatenate(list(self._read(X, is_training=labels is not None)))
        if labels is not None:
            batch.labels = labels
        if sample_weight is not None:
            batch.weights = _check_sample_weight(sample_weight, X, dtype=np.float32, ensure_non_negative=True)
        return batch

    def _read(self, X: Any, *, is_training: bool) -> Iterator[Batch]:
        if self._columns is None:
            return ArrayReader(None).batches(X)
        if not is_frame(X):
            raise UsageError(
                f"X is a {type(X).__name__}: expected a DataFrame, because fit received one with categories"
            )
        tables: ModelTables | None = getattr(self, "_tables", None)
        is_known = None if tables is None or is_training else tables.is_known
        return ColumnReader(self._columns, from_text=False, is_known=is_known).batches(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags

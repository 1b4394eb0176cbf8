"""The files of a training: what is wrong with them before anything starts, and how they are cut into shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data import (
    COLUMN_FORMATS,
    LABEL_NAMES,
    Columns,
    Dataset,
    Guesses,
    check_numeric_scale,
    count_labels,
    describe_named,
    describe_not_binary,
    detect_format,
    fit_scale,
    guess_columns,
    open_dataset,
    sample_labels,
    sample_rows,
)
from paceline.data.dialect import is_number
from paceline.errors import DataError, ModelError, UsageError
from paceline.launch.train.initial_model import continue_from
from paceline.launch.train.options import TrainOptions
from paceline.launch.train.plan import TrainingPlan
from paceline.models.base import SparseModel
from paceline.models.weighting import BALANCED, Weighting, balance
from paceline.storage.model_directory import prepare_directory

_MIXED_SHARD_BYTES = 32 << 10
_CACHE_SPARE = 4  # a temporary cache is made where there is this many times the data's size of free disk


@dataclass(frozen=True)
class DataLook:
    """What a look at data files has shown, before anything is read."""

    format: str
    columns: Columns | None
    labels: dict[float, int]
    """The labels in the rows looked at, and how often each was seen."""
    guesses: Guesses | None
    """What the columns of csv and parquet files were taken for."""
    guessed: bool
    """Whether anybody said what the columns are."""


def look_at(
    data: Sequence[str | Path],
    format: str | None = None,
    columns: Columns | None = None,
    label: str | None = None,
    numeric_scale: str = "auto",
    weight: str | None = None,
) -> DataLook:
    """Look at files; arguments as :class:`TrainOptions` has them. Raises what is wrong with the files."""
    check_numeric_scale(numeric_scale)
    first = str(data[0])
    format = format or detect_format(first)
    if format not in COLUMN_FORMATS:
        if label is not None and columns is None:
            raise UsageError(f"{format} has no columns to choose: leave --label out, or say --format csv or parquet")
        if weight is not None:
            raise UsageError(f"{format} has no columns to choose: leave --weight out, or say --format csv or parquet")
        with open_dataset(data, format, columns) as dataset:
            return DataLook(format, None, sample_labels(dataset.files, format), None, False)
    if columns is not None:
        open_dataset(data, format, columns).close()
        wanted: Sequence[str] = columns.names
    else:
        wanted = LABEL_NAMES if label is None or is_number(label) else (label,)  # a number is a place
    sample = sample_rows([str(file) for file in data], format, wanted)
    guesses = guess_columns(first, sample, label, weight or "") if columns is None else describe_named(sample, columns)
    taken = guesses.columns
    if numeric_scale != "none" and not taken.scales:
        scales = tuple(fit_scale(sample.column(name), numeric_scale) for name in taken.numeric)
        taken = dataclasses.replace(taken, scales=scales)
    open_dataset(data, format, taken).close()
    labels = count_labels(sample.column(taken.label))
    return DataLook(format, taken, labels, guesses, columns is None)


def settle_files(options: TrainOptions) -> tuple[TrainOptions, DataLook]:
    """Return the options with format and columns settled, and what a look at the files has shown.

    Raises what is wrong with the files and with the place for the model.
    """
    options = continue_from(options)
    look = look_at(
        options.data, options.format, options.columns, options.label, options.numeric_scale, options.weights.column
    )
    model = options.model
    if model.labels == "clicks":
        odd = describe_not_binary(look.labels)
        if odd is not None:
            raise DataError(
                f"{options.data[0]}: {odd}: map them before you train {model.name} on them, or take --model softmax "
                "(classes) or regression (quantities)"
            )
    elif options.init_from is not None:
        pass  # it has begun
    else:
        labels, counts = (np.array([*found]) for found in (look.labels.keys(), look.labels.values()))
        model = model.starting_from(np.repeat(labels, counts.astype(np.int64)).astype(np.float32))
    weights = options.weights
    if weights.classes == BALANCED:
        weights = dataclasses.replace(weights, classes=balance(_as_model_sees(look.labels, model)))
    _check_formats(options, look.format)
    validation = () if options.stopping is None else options.stopping.validation
    for files in (options.evaluation, validation):
        if files:
            open_dataset(files, look.format, look.columns and look.columns.unweighted).close()
    _check_place(options.save)
    settled = dataclasses.replace(options, model=model, format=look.format, columns=look.columns, weights=weights)
    weighting_of(settled)
    return settled, look


def weighting_of(options: TrainOptions) -> Weighting:
    """Return how often examples count, once files are settled. Raises UsageError for what the model does not take."""
    model, classes, keep_negatives = options.model, options.weights.classes, options.weights.keep_negatives
    if classes is not None and not model.has_classes:
        raise UsageError(f"--class-weight is nothing that --model {model.name} takes: its labels are no classes")
    if keep_negatives != 1 and model.labels != "clicks":
        raise UsageError(f"--keep-negatives is nothing that --model {model.name} takes: it is for models of clicks")
    assert not isinstance(classes, str)
    return Weighting(classes=dict(classes or {}), keep_negatives=keep_negatives)


def is_weighted(options: TrainOptions) -> bool:
    """Return whether not all examples count alike, once files are settled."""
    return bool(options.columns and options.columns.weight) or not weighting_of(options).is_plain


def _as_model_sees(labels: Mapping[float, int], model: SparseModel) -> dict[float, int]:
    counts: dict[float, int] = {}
    for label, count in labels.items():
        seen = float(label > 0) if model.labels == "clicks" else label
        counts[seen] = counts.get(seen, 0) + count
    return counts


def _check_formats(options: TrainOptions, format: str) -> None:
    if options.format is None:
        validation = () if options.stopping is None else options.stopping.validation
        for file in (*options.data, *options.evaluation, *validation):
            found = detect_format(file)
            if found != format:
                raise DataError(
                    f"{file} looks like {found}, and {options.data[0]} like {format}: all must be of one format"
                )


def _check_place(save: str | Path | None) -> None:
    if save is None:
        return
    try:
        for made in prepare_directory(Path(save)):
            made.rmdir()  # it can be made: it is when there is a model to put in
        if Path(save).is_dir() and not os.access(save, os.W_OK):
            raise ModelError(f"cannot save a model in {save}: it may not be written to")
    except OSError as error:
        raise ModelError(f"cannot save a model in {save}: {error.strerror or error}") from None


def total_size(files: Sequence[str | Path]) -> int:
    """Return the size of files in bytes."""
    return sum(os.path.getsize(file) for file in files)


def open_training_data(
    options: TrainOptions, plan: TrainingPlan, num_workers: int, spare: Path | None, shard_bytes: int | None = None
) -> Dataset:
    """Open the data, in shards that suit the number of workers unless `shard_bytes` is given.

    Several passes are cached in `spare`, given room. Where shards are mixed they are many and small.
    """
    dataset = open_dataset(options.data, options.format, options.columns, strict=options.strict)
    size = sum(os.path.getsize(file) for file in dataset.files)
    cache: Path | None = None if options.cache is None else Path(options.cache)
    if cache is None and spare is not None and plan.epochs > 1:
        disk = os.statvfs(spare)
        packed = 8 if any(str(file).endswith(".gz") for file in dataset.files) else 1
        if disk.f_bavail * disk.f_frsize > _CACHE_SPARE * size * packed:
            cache = spare
    if shard_bytes is None:
        if plan.shards_at_once > 1:
            shard_bytes = max(_MIXED_SHARD_BYTES, min(size // (8 * plan.shards_at_once * num_workers), 16 << 20))
        else:
            shard_bytes = max(256 << 10, min(size // (16 * num_workers), 16 << 20))
    format, columns = dataset.format, dataset.columns
    dataset.close()
    labels = plan.model.labels
    return open_dataset(options.data, format, columns, shard_bytes, options.strict, cache, labels, plan.scaling)

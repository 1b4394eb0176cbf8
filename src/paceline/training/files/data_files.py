"""Check the files of a training before it starts, and open them in shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline.data import (
    CONVERTED,
    FORMATS,
    Columns,
    Dataset,
    Sample,
    check_numeric_scale,
    describe_not_binary,
    detect_format,
    find_format,
    have_same_features,
    open_dataset,
    source_format,
)
from paceline.data.guessing import NO_OPTIONS, ReadOptions
from paceline.data.labels import CLICKS, read_as
from paceline.data.streams import is_packed, stat_file
from paceline.errors import DataError, ModelError, UsageError
from paceline.models.base import SparseModel
from paceline.models.clicks import for_classes
from paceline.models.update import rule_of
from paceline.ps import FTRL
from paceline.storage.model_directory import prepare_directory
from paceline.training.files.numeric_scales import add_scales
from paceline.training.initial_model import continue_from
from paceline.training.options import TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.tuning.choices import L1
from paceline.training.weighting import BALANCED, Weighting, balance

_MIXED_SHARD_BYTES = 32 << 10
_ANY_FORMAT = ("auto", "none")  # the scales for formats without numbers
_CACHE_SPARE = 4  # a temporary cache needs this multiple of the data's size as free disk space


def sample_data(
    data: Sequence[str | Path],
    format: str | None = None,
    columns: Columns | None = None,
    numeric_scale: str = "auto",
    weight: str | None = None,
    reading: ReadOptions = NO_OPTIONS,
) -> Sample:
    """Return a sample of data files, with scales for its columns. :class:`TrainOptions` describes the arguments."""
    check_numeric_scale(numeric_scale)
    files = list(map(str, data))
    kind = find_format(format or detect_format(files[0]))
    source = kind.source_of(files[0])
    if numeric_scale not in _ANY_FORMAT and not FORMATS[source].has_numbers:
        raise UsageError(
            f"--numeric-scale {numeric_scale} applies to numbers, but {source} has none, because its integers are "
            "categories. Leave the option out"
        )
    sample = add_scales(kind.sample(files, columns, reading, weight), numeric_scale)
    open_dataset(files, sample.format, sample.columns).close()
    return sample


def resolve_files(options: TrainOptions) -> tuple[TrainOptions, Sample]:
    """Return the completed options, and the sample of the files. Raises DataError, UsageError and ModelError."""
    options = continue_from(options)
    sample = sample_data(
        *(options.data, options.format, options.columns, options.numeric_scale, options.weights.column),
        reading=options.reading,
    )
    _check_names(options, sample)
    classes = sample.classes
    options = dataclasses.replace(options, model=for_classes(options.model, classes))
    model = options.model
    if classes and not model.has_classes:
        raise UsageError(
            f"{options.data[0]}: labels are words, such as {classes[0]}, but --model {model.name} learns numbers. Pass "
            "--model lr (two classes) or softmax (several)"
        )
    if model.labels == "clicks":
        _check_clicks(options, sample.labels, classes)
    elif options.init_from is not None:
        pass  # the stored model already has these settings
    else:
        labels, counts = (np.array([*found]) for found in (sample.labels.keys(), sample.labels.values()))
        model = model.starting_from(np.repeat(labels, counts.astype(np.int64)).astype(np.float32))
    if options.init_from is None:
        model = model.of_columns(source_format(options.data[0], sample.format), sample.columns, sample.fields)
    weights = options.weights
    if weights.classes == BALANCED:
        weights = dataclasses.replace(weights, classes=balance(_as_read_by(sample.labels, model)))
    _check_class_weights(weights.classes, _as_read_by(sample.labels, model), model)
    options.passes.rates.check(rule_of(options.update, FTRL().alpha, L1))
    _check_formats(options, sample.format)
    stopping = options.passes.stopping
    validation = () if stopping is None else stopping.validation
    for files in (options.evaluation, validation):
        if files:
            format = format_of_evaluation(files, sample.format)
            open_dataset(files, format, sample.columns and sample.columns.unweighted).close()
    _check_place(options.save)
    resolved = dataclasses.replace(options, model=model, format=sample.format, columns=sample.columns, weights=weights)
    weighting_of(resolved)
    return resolved, sample


def _check_clicks(options: TrainOptions, labels: Mapping[float, int], classes: Sequence[str]) -> None:
    """Raise DataError if the labels are not clicks, and UsageError if no label is the positive one."""
    read_as = options.model.read_labels_as
    odd = describe_not_binary(labels, read_as, classes)
    if odd is None:
        return
    if read_as == CLICKS:
        raise DataError(
            f"{options.data[0]}: {odd}. Pass the positive label with --positive, or pass --model softmax (classes)"
            + ("" if classes else ", poisson (counts) or regression (quantities)")
        )
    if options.init_from is None:  # data for training a model further may have only negatives
        raise UsageError(f"{options.data[0]}: {odd}. Pass an existing label with --positive")


def weighting_of(options: TrainOptions) -> Weighting:
    """Return the weights in resolved options. Raises UsageError if the model does not support them."""
    model, classes, keep_negatives = options.model, options.weights.classes, options.weights.keep_negatives
    if classes is not None and not model.has_classes:
        raise UsageError(f"--class-weight is not an option of --model {model.name}: its labels are not classes")
    if keep_negatives != 1 and model.labels != "clicks":
        raise UsageError(f"--keep-negatives is not an option of --model {model.name}: only models of clicks have it")
    assert not isinstance(classes, str)
    return Weighting(classes=dict(classes or {}), keep_negatives=keep_negatives)


def is_weighted(options: TrainOptions) -> bool:
    return bool(options.columns and options.columns.weight) or not weighting_of(options).is_plain


def _check_class_weights(
    classes: Mapping[str, float] | str | None, labels: Mapping[float, int], model: SparseModel
) -> None:
    if classes is None or isinstance(classes, str) or not model.has_classes:
        return
    of_model = (0.0, 1.0) if model.labels == "clicks" else getattr(model, "classes", ())
    known = {np.float32(label) for label in (*labels, *of_model)}
    for label in classes:
        if np.float32(label) not in known:
            labels_found = ", ".join(f"{value:g}" for value in sorted(known)[:10])
            raise UsageError(
                f"--class-weight {label}:{classes[label]:g}: no example has this label. The labels are {labels_found}"
            )


def _as_read_by(labels: Mapping[float, int], model: SparseModel) -> dict[float, int]:
    seen = np.array([*labels], np.float32)
    read_as(model.read_labels_as, seen)
    counts: dict[float, int] = {}
    for label, count in zip(seen.tolist(), labels.values(), strict=True):
        counts[label] = counts.get(label, 0) + count
    return counts


def _check_formats(options: TrainOptions, format: str) -> None:
    if options.format is not None:
        return
    features = source_format(options.data[0], format)
    stopping = options.passes.stopping
    validation = () if stopping is None else stopping.validation
    for file in (*options.data, *options.evaluation, *validation):
        found = detect_format(file)
        is_trained_on = file in options.data
        if (is_trained_on and found != format) or not have_same_features(source_format(file, found), features):
            first = options.data[0]
            one, other = _describe_format(file, found), _describe_format(first, format)
            raise DataError(f"{file} {one}, and {first} {other}. Pass files of one format")


def _describe_format(file: str | Path, format: str) -> str:
    if format == CONVERTED:
        return f"is converted from {source_format(file, format)}"
    return f"looks like {format}"


def format_of_evaluation(files: Sequence[str | Path], format: str) -> str:
    """Return the evaluation files' format if it has the training format's features, otherwise the training format."""
    try:
        found = detect_format(files[0])
    except DataError:
        return format
    sources = [name if name == CONVERTED else FORMATS[name].source_of(str(files[0])) for name in (found, format)]
    return found if CONVERTED in sources or have_same_features(*sources) else format


def _check_names(options: TrainOptions, sample: Sample) -> None:
    for path, file in zip(options.data, sample.converted, strict=False):  # empty if not converted
        has_names = FORMATS[file.description.format].has_numbered_features or file.has_names
        if options.feature_names and not has_names:
            raise UsageError(
                f"{path} has no feature names. Convert its sources with --feature-names, or leave the option out"
            )


def _check_place(save: str | Path | None) -> None:
    if save is None:
        return
    try:
        for made in prepare_directory(Path(save)):
            made.rmdir()  # only a test; saving the model creates the directory again
        if Path(save).is_dir() and not os.access(save, os.W_OK):
            raise ModelError(f"cannot save a model in {save}: permission denied. Pass another directory")
    except OSError as error:
        raise ModelError(f"cannot save a model in {save}: {error.strerror or error}") from None


def total_size(files: Sequence[str | Path]) -> int:
    return sum(stat_file(file).num_bytes for file in files)


def open_training_data(
    options: TrainOptions, plan: TrainingPlan, num_workers: int, spare: Path | None, shard_bytes: int | None = None
) -> Dataset:
    """Open the data in shards. Their size depends on the number of workers; it is smaller if workers mix shards.

    If there are several passes and enough disk space, parsed data is cached in `spare`.
    """
    dataset = open_dataset(options.data, options.format, options.columns, strict=options.strict)
    size = sum(stat_file(file).num_bytes for file in dataset.files)
    cache: Path | None = None if options.cache is None else Path(options.cache)
    is_cache = dataset.format == CONVERTED and plan.scaling is None  # converted data is as fast as a cache
    if cache is None and spare is not None and plan.epochs > 1 and not is_cache:
        disk = os.statvfs(spare)
        packed = 8 if any(map(is_packed, dataset.files)) else 1
        if disk.f_bavail * disk.f_frsize > _CACHE_SPARE * size * packed:
            cache = spare
    if shard_bytes is None:
        if plan.shards_at_once > 1:
            shard_bytes = max(_MIXED_SHARD_BYTES, min(size // (8 * plan.shards_at_once * num_workers), 16 << 20))
        else:
            shard_bytes = max(256 << 10, min(size // (16 * num_workers), 16 << 20))
    format, columns = dataset.format, dataset.columns
    dataset.close()
    labels = plan.model.read_labels_as
    return open_dataset(options.data, format, columns, shard_bytes, options.strict, cache, labels, plan.scaling)

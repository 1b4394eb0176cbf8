"""The files of a training: what is wrong with them before anything starts, and how they are cut into shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data import (
    CONVERTED,
    FORMATS,
    Columns,
    ConvertedFile,
    Dataset,
    Guesses,
    Scale,
    TextTable,
    check_numeric_scale,
    count_labels,
    describe_converted,
    describe_named,
    describe_not_binary,
    detect_format,
    find_format,
    fit_numbers,
    fit_scale,
    guess_columns,
    have_same_features,
    merge_guesses,
    open_dataset,
    source_format,
)
from paceline.data.dialect import is_number
from paceline.data.example_sampling import ExampleSample, sample_examples
from paceline.data.formats.json_lines import describe_json, find_json_columns, json_cells, sample_objects, walk_fields
from paceline.data.formats.table_format import TableFormat
from paceline.data.guessing import NO_OPTIONS, ReadOptions
from paceline.data.labels import CLICKS, MOST_CLASSES, describe_no_numbers, find_label_words, read_as
from paceline.data.streams import is_packed, stat_file
from paceline.errors import DataError, ModelError, UsageError
from paceline.kernels.hashing import name_seed
from paceline.models.base import SparseModel
from paceline.models.clicks import for_classes
from paceline.models.update import rule_of
from paceline.ps import FTRL
from paceline.storage.model_directory import prepare_directory
from paceline.training.files.numeric_scales import choose_column_scales
from paceline.training.initial_model import continue_from
from paceline.training.options import TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.tuning import L1
from paceline.training.weighting import BALANCED, Weighting, balance

_MIXED_SHARD_BYTES = 32 << 10
_ANY_FORMAT = ("auto", "none")  # scales that suit formats without columns too
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
    """Whether the columns were guessed."""
    sample: TextTable | None = None
    """Rows of csv and parquet files, as text."""
    label_words: tuple[str, ...] = ()
    """The words that labels are written as instead of numbers."""
    known: tuple[ConvertedFile, ...] = ()
    """Of converted files, what they say."""
    fields: tuple[str, ...] = ()
    """Of vw and JSON lines, the namespaces and what rows hold, in the rows looked at."""
    files: tuple[str, ...] = ()
    """Of csv and parquet files, where they are."""
    examples: ExampleSample | None = None
    """The sample that scales of csv and parquet files were chosen on; None if none was read."""

    @property
    def header_news(self) -> str | None:
        """A line that the csv files have no header; None if they have one, or are of another format."""
        if self.sample is None or self.sample.has_header:
            return None
        last = self.sample.names[-1]
        return (
            f"{self.files[0]} has no header: its columns are c1 to {last} (--header yes reads names from its first row)"
        )

    def fit_scales(self, how: str) -> tuple[tuple[Scale, ...], ExampleSample | None]:
        """Return the scale of each numeric column of csv and parquet files; `how` as in :func:`fit_scale`.

        ``auto`` tries scales of all columns together too, on the examples that are returned.
        """
        assert self.sample is not None
        assert self.columns is not None
        if how == "auto" and self.columns.numeric:
            usual, _ = self.fit_scales("standard")
            return choose_column_scales(self.files, self.format, dataclasses.replace(self.columns, scales=usual))
        known = self.sample.labels(self.columns.label)
        return tuple(fit_scale(self.sample.column(name), how, known) for name in self.columns.numeric), None


def look_at(
    data: Sequence[str | Path],
    format: str | None = None,
    columns: Columns | None = None,
    numeric_scale: str = "auto",
    weight: str | None = None,
    reading: ReadOptions = NO_OPTIONS,
) -> DataLook:
    """Look at files; arguments as :class:`TrainOptions` has them. Raises what is wrong with the files."""
    check_numeric_scale(numeric_scale)
    first = str(data[0])
    format = format or detect_format(first)
    kind = find_format(format)
    if numeric_scale not in _ANY_FORMAT and not FORMATS[source_format(first, format)].has_numbers:
        raise UsageError(
            f"--numeric-scale {numeric_scale} applies to numbers, and {source_format(first, format)} has none, because "
            "its integers are categories: leave it out"
        )
    if format == CONVERTED:
        return _look_at_converted([str(file) for file in data], columns, reading, numeric_scale, weight)
    if format == "jsonl":
        return _look_at_json([str(file) for file in data], columns, reading, weight)
    if not isinstance(kind, TableFormat):
        given = [*reading.given, *(["--weight"] if weight is not None else [])]
        if given and columns is None:
            raise UsageError(
                f"{format} has no columns to choose: leave {given[0]} out, or pass --format csv, parquet or jsonl"
            )
        with open_dataset(data, format, columns) as dataset:
            fields = kind.sample_fields(dataset.files)
            labels = kind.sample_labels(dataset.files, None)
            if not labels and kind.may_lack_labels:
                raise DataError(f"{first} has no label in the lines looked at: begin each line with one, '1 | a b'")
            return DataLook(format, None, labels, None, False, fields=fields)
    if reading.header != "auto" and "--header" not in kind.column_options:
        raise UsageError(f"--header {reading.header}: {first} is {format}, which has no header: leave the option out")
    if columns is not None:
        open_dataset(data, format, columns).close()
        wanted: Sequence[str] = columns.names
    else:
        wanted = [name for name in (*reading.names, weight) if name and not is_number(name)]  # a number is a place
    sample = kind.sample_table([str(file) for file in data], wanted, columns.header if columns else reading.header)
    if columns is None:
        guesses = guess_columns(first, sample, reading, weight or "")
    else:
        guesses = describe_named(sample, columns)
    taken = guesses.columns
    labels = count_labels(sample.column(taken.label), taken.classes)
    words = () if taken.classes else find_label_words(sample.column(taken.label))
    files = tuple(map(str, data))
    look = DataLook(format, taken, labels, guesses, columns is None, sample, words, files=files)
    open_dataset(data, format, taken).close()
    _check_numbers(first, taken, sample.column(taken.label), sample.column(taken.weight) if taken.weight else [])
    if numeric_scale != "none" and not taken.scales:
        scales, examples = look.fit_scales(numeric_scale)
        look = dataclasses.replace(look, columns=dataclasses.replace(taken, scales=scales), examples=examples)
    return look


def _look_at_json(files: Sequence[str], columns: Columns | None, reading: ReadOptions, weight: str | None) -> DataLook:
    objects = sample_objects(files)
    found = find_json_columns(files[0], objects, ReadOptions(label=columns.label) if columns else reading, weight or "")
    if columns is not None:
        found = dataclasses.replace(columns, is_open=True, classes=columns.classes or found.classes)
    _check_numbers(files[0], found, *(json_cells(objects, name) for name in (found.label, found.weight)))
    with open_dataset(files, "jsonl", found) as dataset:
        guesses = describe_json(objects, found)
        labels = FORMATS["jsonl"].sample_labels(dataset.files, found)
        texts = (
            value
            for each in objects
            for name, value, _ in walk_fields(each)
            if name == found.label and isinstance(value, str)
        )
        known = (found.label, found.weight)
        fields = tuple(dict.fromkeys(name for each in objects for name in each if name not in known))
        words = () if found.classes else find_label_words(texts)
        return DataLook("jsonl", found, labels, guesses, columns is None, label_words=words, fields=fields)


def _check_numbers(path: str, columns: Columns, labels: Sequence[str], weights: Sequence[str]) -> None:
    """Raise DataError where the column of the labels, or of the weights, holds nothing but texts."""
    texts = None if columns.classes else describe_no_numbers(labels)
    if texts is not None:
        raise DataError(
            f"{path}: the labels, column '{columns.label}', are {texts}, and expected are numbers, or from 2 to "
            f"{MOST_CLASSES} words: say which column it is with --label"
        )
    texts = describe_no_numbers(weights)
    if texts is not None:
        raise DataError(
            f"{path}: the weights, column '{columns.weight}', are {texts}, and expected are numbers from 0 up"
        )


def _look_at_converted(
    files: Sequence[str], columns: Columns | None, reading: ReadOptions, numeric_scale: str, weight: str | None
) -> DataLook:
    known = tuple(map(describe_converted, files))
    first = known[0].description
    stored = first.columns
    names = [each.name for each in first.guesses]
    if reading.given and (stored is None or not reading.fit(files[0], stored, names or stored.names)):
        given = ", ".join(reading.given)
        raise UsageError(f"{files[0]} is converted with other columns: leave {given} out, or convert its sources again")
    if weight is not None and (stored is None or weight != stored.weight):
        raise UsageError(f"{files[0]} is converted, without --weight {weight}: convert the sources with it")
    taken = stored if columns is None else columns
    if taken is not None and stored is not None and stored.numeric and not taken.scales and numeric_scale != "none":
        found = first.scales.get(numeric_scale)
        if found is None:
            found = _fit_converted(files, stored, first.centres, numeric_scale)
        scales = dict(zip(stored.numeric, found, strict=True))
        taken = dataclasses.replace(taken, scales=tuple(scales[name] for name in taken.numeric if name in scales))
    open_dataset(files, CONVERTED, taken).close()
    fields = tuple(dict.fromkeys(name for file in known for name in file.description.fields))
    labels = FORMATS[CONVERTED].sample_labels(files, taken)
    return DataLook(CONVERTED, taken, labels, merge_guesses(known), False, known=known, fields=fields)


def _fit_converted(
    files: Sequence[str], stored: Columns, centres: Sequence[float], numeric_scale: str
) -> tuple[Scale, ...]:
    """Return scales that converted data does not keep, by some of its examples."""
    centring = tuple(Scale(0.0, 0.0, 0.0, centre) for centre in centres or (0.0,) * len(stored.numeric))
    with open_dataset(files, CONVERTED, dataclasses.replace(stored, scales=centring), labels="numbers") as dataset:
        batch = sample_examples(dataset).batch
    assert batch.values is not None
    of_columns = (
        batch.values[batch.keys == np.uint64(name_seed(name))].astype(np.float64) + scale.centre
        for name, scale in zip(stored.numeric, centring, strict=True)
    )
    return tuple(fit_numbers(numbers, numeric_scale) for numbers in of_columns)


def settle_files(options: TrainOptions) -> tuple[TrainOptions, DataLook]:
    """Return the options with format and columns settled, and what a look at the files has shown.

    Raises what is wrong with the files and with the place for the model.
    """
    options = continue_from(options)
    look = look_at(
        *(options.data, options.format, options.columns, options.numeric_scale, options.weights.column),
        reading=options.reading,
    )
    _check_names(options, look)
    classes = look.columns.classes if look.columns is not None else ()
    options = dataclasses.replace(options, model=for_classes(options.model, classes))
    model = options.model
    if classes and not model.has_classes:
        raise UsageError(
            f"{options.data[0]}: labels are words, such as {classes[0]}, and --model {model.name} learns numbers: take "
            "--model lr (two classes) or softmax (several)"
        )
    if model.labels == "clicks":
        _check_clicks(options, look.labels, classes)
    elif options.init_from is not None:
        pass  # it has begun
    else:
        labels, counts = (np.array([*found]) for found in (look.labels.keys(), look.labels.values()))
        model = model.starting_from(np.repeat(labels, counts.astype(np.int64)).astype(np.float32))
    if options.init_from is None:
        model = model.of_columns(source_format(options.data[0], look.format), look.columns, look.fields)
    weights = options.weights
    if weights.classes == BALANCED:
        weights = dataclasses.replace(weights, classes=balance(_as_model_sees(look.labels, model)))
    _check_class_weights(weights.classes, _as_model_sees(look.labels, model), model)
    options.passes.rates.check(rule_of(options.update, FTRL().alpha, L1))
    _check_formats(options, look.format)
    stopping = options.passes.stopping
    validation = () if stopping is None else stopping.validation
    for files in (options.evaluation, validation):
        if files:
            format = format_of_evaluation(files, look.format)
            open_dataset(files, format, look.columns and look.columns.unweighted).close()
    _check_place(options.save)
    settled = dataclasses.replace(options, model=model, format=look.format, columns=look.columns, weights=weights)
    weighting_of(settled)
    return settled, look


def _check_clicks(options: TrainOptions, labels: Mapping[float, int], classes: Sequence[str]) -> None:
    """Raise DataError for labels that are none of clicks, UsageError for a positive one that is not there."""
    read_as = options.model.read_labels_as
    odd = describe_not_binary(labels, read_as, classes)
    if odd is None:
        return
    if read_as == CLICKS:
        raise DataError(
            f"{options.data[0]}: {odd}: say which one is positive with --positive, or take --model softmax (classes)"
            + ("" if classes else ", poisson (counts) or regression (quantities)")
        )
    if options.init_from is None:  # further data may be of negatives alone
        raise UsageError(f"{options.data[0]}: {odd}: give one that is there with --positive")


def weighting_of(options: TrainOptions) -> Weighting:
    """Return how often examples count, once files are settled. Raises UsageError for what the model does not take."""
    model, classes, keep_negatives = options.model, options.weights.classes, options.weights.keep_negatives
    if classes is not None and not model.has_classes:
        raise UsageError(f"--class-weight is not an option of --model {model.name}: its labels are not classes")
    if keep_negatives != 1 and model.labels != "clicks":
        raise UsageError(f"--keep-negatives is not an option of --model {model.name}: it is for models of clicks")
    assert not isinstance(classes, str)
    return Weighting(classes=dict(classes or {}), keep_negatives=keep_negatives)


def is_weighted(options: TrainOptions) -> bool:
    """Return whether not all examples count alike, once files are settled."""
    return bool(options.columns and options.columns.weight) or not weighting_of(options).is_plain


def _check_class_weights(
    classes: Mapping[str, float] | str | None, labels: Mapping[float, int], model: SparseModel
) -> None:
    """Raise UsageError for weights of labels that neither the rows looked at nor the model have."""
    if classes is None or isinstance(classes, str) or not model.has_classes:
        return
    of_model = (0.0, 1.0) if model.labels == "clicks" else getattr(model, "classes", ())
    known = {np.float32(label) for label in (*labels, *of_model)}
    for label in classes:
        if np.float32(label) not in known:
            there = ", ".join(f"{each:g}" for each in sorted(known)[:10])
            raise UsageError(f"--class-weight {label}:{classes[label]:g}: no example has that label; there are {there}")


def _as_model_sees(labels: Mapping[float, int], model: SparseModel) -> dict[float, int]:
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
            raise DataError(f"{file} {one}, and {first} {other}: all must be of one format")


def _describe_format(file: str | Path, format: str) -> str:
    if format == CONVERTED:
        return f"is converted from {source_format(file, format)}"
    return f"looks like {format}"


def format_of_evaluation(files: Sequence[str | Path], format: str) -> str:
    """Return the format of the files to evaluate on: that of the data, unless they are of another that fits it."""
    try:
        found = detect_format(files[0])
    except DataError:
        return format
    sources = [name if name == CONVERTED else FORMATS[name].source_of(str(files[0])) for name in (found, format)]
    return found if CONVERTED in sources or have_same_features(*sources) else format


def _check_names(options: TrainOptions, look: DataLook) -> None:
    for path, file in zip(options.data, look.known, strict=False):  # none of other formats
        if options.feature_names and file.description.format != "libsvm" and not file.has_names:
            raise UsageError(
                f"{path} has no names of features: convert its sources with --feature-names, or leave that out here"
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
    return sum(stat_file(file).num_bytes for file in files)


def open_training_data(
    options: TrainOptions, plan: TrainingPlan, num_workers: int, spare: Path | None, shard_bytes: int | None = None
) -> Dataset:
    """Open the data, in shards that suit the number of workers unless `shard_bytes` is given.

    Several passes are cached in `spare`, given room. Where shards are mixed they are many and small.
    """
    dataset = open_dataset(options.data, options.format, options.columns, strict=options.strict)
    size = sum(stat_file(file).num_bytes for file in dataset.files)
    cache: Path | None = None if options.cache is None else Path(options.cache)
    is_cache = dataset.format == CONVERTED and plan.scaling is None  # which reads as fast as one
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

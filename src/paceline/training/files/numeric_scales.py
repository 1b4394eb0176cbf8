"""Choose scales or bins for the numbers of a training's data, using a sample of its examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.data import Columns, Sample, Scale, fit_numbers, fit_scale, open_dataset
from paceline.data.example_sampling import sample_examples
from paceline.data.key_scaling import KeyScaling, find_key_scaling, with_scales
from paceline.data.labels import NUMBERS, read_as
from paceline.data.sampling import ExampleSample
from paceline.data.scales.numeric_features import (
    candidate_scales,
    explain_features,
    find_numeric_features,
    known_labels,
    numbers_of,
)
from paceline.data.scales.scaling import ColumnScaling
from paceline.kernels.hashing import name_seed
from paceline.launch.kernels import prepare_kernels
from paceline.models.base import SparseModel
from paceline.models.fm import FactorModel
from paceline.training.tuning.scale_trial import Scaling, best_scaling, is_worse_for_factors


def add_scales(sample: Sample, how: str) -> Sample:
    """Return the sample with scales for its numeric columns. :func:`fit_scale` describes `how`."""
    columns = sample.columns
    if how == "none" or columns is None or columns.scales or not columns.numeric:
        return sample
    if sample.converted:
        return dataclasses.replace(sample, columns=dataclasses.replace(columns, scales=_stored_scales(sample, how)))
    scales, examples = fit_scales(sample, how)
    return dataclasses.replace(sample, columns=dataclasses.replace(columns, scales=scales), examples=examples)


def fit_scales(sample: Sample, how: str) -> tuple[tuple[Scale, ...], ExampleSample | None]:
    """Return the scale of each numeric column of csv and parquet files.

    ``auto`` tries scales for all columns together on the returned examples; :func:`scale_columns` scales them.
    """
    assert sample.table is not None
    assert sample.columns is not None
    if how == "auto" and sample.columns.numeric:
        usual, _ = fit_scales(sample, "standard")
        columns = dataclasses.replace(sample.columns, scales=tuple(scale.centring for scale in usual))
        prepare_kernels()
        examples = _sample_numbers(sample.files, sample.format, columns)
        return choose_scales(examples, columns), examples
    labels = sample.table.labels(sample.columns.label)
    return tuple(fit_scale(sample.table.column(name), how, labels) for name in sample.columns.numeric), None


def _stored_scales(sample: Sample, how: str) -> tuple[Scale, ...]:
    """Return the scales that are stored in converted files, or else scales fitted to a sample of the examples."""
    first = sample.converted[0].description
    assert first.columns is not None
    assert sample.columns is not None
    names = first.columns.numeric
    scales = first.scales.get(how)
    if scales is None:
        centring = tuple(Scale(0.0, 0.0, 0.0, centre) for centre in first.centres or (0.0,) * len(names))
        columns = dataclasses.replace(first.columns, scales=centring)
        batch = _sample_numbers(sample.files, sample.format, columns).batch
        assert batch.values is not None
        numbers = (batch.values[batch.keys == np.uint64(name_seed(name))].astype(np.float64) for name in names)
        scales = tuple(fit_numbers(column + scale.centre, how) for column, scale in zip(numbers, centring, strict=True))
    by_name = dict(zip(names, scales, strict=True))
    return tuple(by_name[name] for name in sample.columns.numeric if name in by_name)


def _sample_numbers(files: Sequence[str], format: str, columns: Columns) -> ExampleSample:
    """Return a sample with the files' labels, and with numbers minus the centres in `columns`."""
    with open_dataset(files, format, columns, labels=NUMBERS) as dataset:
        return sample_examples(dataset)


def scale_columns(sample: ExampleSample, columns: Columns, labels: str) -> ExampleSample:
    """Return the sample of :func:`fit_scales` after scaling its numbers by `columns` and converting its labels."""
    batch = sample.batch.copy()
    read_as(labels, batch.labels)
    return dataclasses.replace(sample, batch=_scaling_of(columns).apply_in_place(batch))


def _scaling_of(columns: Columns) -> ColumnScaling:
    centres = [scale.centre for scale in columns.scales]
    return ColumnScaling(columns.numeric, centres, columns.scales, columns.bins)


def choose_scales(sample: ExampleSample, columns: Columns) -> tuple[Scale, ...]:
    if not sample.batch.num_examples:
        return columns.scales
    centres = [scale.centre for scale in columns.scales]
    found = numbers_of(sample.batch, [name_seed(name) for name in columns.numeric], absent_is_zero=False)
    features = [
        dataclasses.replace(feature, numbers=feature.numbers + centre)
        for feature, centre in zip(found, centres, strict=True)
    ]
    candidates = [
        tuple(scale.centred_at(centre) for scale, centre in zip(scales, centres, strict=True))
        for scales in candidate_scales(explain_features(features))
    ]
    scalings = [_scaling_of(dataclasses.replace(columns, scales=scales)) for scales in candidates]
    return candidates[_best(sample, scalings)]


def choose_key_scaling(
    sample: ExampleSample, how: str, *, absent_is_zero: bool, model: SparseModel | None = None
) -> KeyScaling | None:
    """Return the best scaling for the values of features without columns; None if all values are 1.

    :func:`paceline.data.fit_scale` describes `how`. Each feature is divided by its root mean square, or standardized.
    ``auto`` chooses logarithms or bins for numeric features if they lower the loss of a logistic regression. If `model`
    is a factorization machine, its own loss must not be worse with them.
    """
    usual = find_key_scaling(sample.batch)
    if how == "standard":
        return usual
    features = find_numeric_features(sample.batch, absent_is_zero=absent_is_zero)
    if not features:
        return usual
    if how != "auto":
        scales = [fit_numbers(feature.numbers, how, known_labels(feature.labels)) for feature in features]
        return with_scales(usual, features, scales, absent_is_zero=absent_is_zero)
    candidates = candidate_scales(explain_features(features))
    scalings = [with_scales(usual, features, scales, absent_is_zero=absent_is_zero) for scales in candidates]
    found = scalings[_best(sample, scalings)]
    is_nonlinear = found is not None and not found.is_linear
    if is_nonlinear and isinstance(model, FactorModel) and model.name == "fm" and model.interactions is None:
        return usual if is_worse_for_factors(model, sample, found, usual) else found
    return found


def _best(sample: ExampleSample, scalings: Sequence[Scaling | None]) -> int:
    """Return the index of the best scaling. It is 0, the usual scaling, if the labels do not have two classes."""
    labels = np.unique(sample.batch.labels)
    if len(labels) != 2:
        return 0
    batch = dataclasses.replace(sample.batch, labels=(sample.batch.labels == labels[1]).astype(np.float32))
    return best_scaling(dataclasses.replace(sample, batch=batch), scalings)

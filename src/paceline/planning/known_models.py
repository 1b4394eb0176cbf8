"""Describe known models, for predictions without a script. Sizes are rounded.

Sources: He et al. 2015 (ResNet) and Simonyan and Zisserman 2014 (VGG) for the layers. The images per second of one
NVIDIA P100, with 64 images per batch, are those of TensorFlow's benchmarks of 2017
(the page benchmarks.md of tensorflow/docs), and for ResNet-101 those of Horovod's documentation
(1,656.82 images/s on 16 GPUs). Devlin et al. 2018 (BERT); Naumov et al. 2019 (DLRM). The times of BERT, DLRM and the
logistic regression are rough estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Final

from paceline.errors import UsageError
from paceline.strategies.profile import LayerProfile, ModelProfile, find_impossible, read_record

_FORWARD_SHARE: Final = 1 / 3
_QUANTILES: Final = 10_000
_M: Final = 1_000_000

_RESNET50: Final = [(0.01, 118), (0.22, 668), (1.22, 1032), (7.1, 1464), (14.96, 808), (2.05, 2)]
_RESNET101: Final = [(0.01, 118), (0.22, 668), (1.22, 1032), (26.1, 5180), (14.96, 808), (2.05, 2)]
_VGG16: Final = [
    (0.04, 1940),
    (0.22, 2770),
    (1.48, 4620),
    (5.9, 4620),
    (7.08, 1390),
    (102.76, 103),
    (16.78, 17),
    (4.1, 4),
]
_BERT_LARGE: Final = [(31.8, 1), *[(12.6, 100)] * 24, (1.1, 5)]
_DLRM: Final = [(0.16, 1), (2.3, 9)]
"""The parts of a model in the order of the forward: millions of parameters, and relative computing time."""


def _model(
    parts: Sequence[tuple[float, float]], batch_size: int, examples_per_s: float, *, rows: int = 0, dim: int = 0
) -> ModelProfile:
    """Return a model with float32 parameters. With `rows`, a step also looks up this number of rows of a table."""
    step_s = batch_size / examples_per_s
    total = sum(share for _, share in parts)
    layers = [
        LayerProfile(
            name=f"part {number}",
            forward_s=step_s * share / total * _FORWARD_SHARE,
            backward_s=step_s * share / total * (1 - _FORWARD_SHARE),
            num_parameters=2,
            parameter_bytes=round(millions * _M) * 4,
        )
        for number, (millions, share) in enumerate(parts)
    ]
    if rows:
        table = LayerProfile(name="rows", forward_s=0.0, backward_s=0.0, touched_rows=rows, row_bytes=4 * dim)
        layers.insert(0, table)
    return ModelProfile(
        layers=tuple(layers), steps_s=(step_s,), program_s=0.0, update_s=0.0, batch_size=batch_size, is_on_gpu=True
    )


KNOWN_MODELS: Final[dict[str, ModelProfile]] = {
    "resnet50": _model(_RESNET50, 64, 219),
    "resnet101": _model(_RESNET101, 64, 103.6),
    "vgg16": _model(_VGG16, 64, 154),
    "bert-large": _model(_BERT_LARGE, 8, 23),
    "criteo-lr": _model([(0.000_013, 1)], 1000, 200_000, rows=15_000, dim=1),
    "dlrm": _model(_DLRM, 2048, 400_000, rows=30_000, dim=16),
}
"""The models by name. criteo-lr and dlrm have their rows in sparse tables."""


def find_model(name: str) -> ModelProfile:
    """Return a known model, or the profile in a file. Raises UsageError."""
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name]
    try:
        profile = read_record(Path(name), ModelProfile)
    except OSError:
        raise UsageError(
            f"--model {name}: expected {', '.join(KNOWN_MODELS)}, or the file of a profile. "
            "PACELINE_PROFILE=DIR paceline run SCRIPT writes one to DIR/profile.json"
        ) from None
    _check_profile(name, profile)
    return profile


def _check_profile(name: str, profile: ModelProfile) -> None:
    """Raise UsageError for values that no measurement has, such as a negative time."""
    problem = find_impossible(profile)
    if not profile.steps_s or not profile.batch_size or not min(profile.compute_s, *profile.steps_s) > 0:
        problem = problem or "the profile has no steps, a batch without examples, or steps of 0 s"
    if problem is not None:
        raise UsageError(
            f"--model {name}: {problem}. Measure the script again with PACELINE_PROFILE=DIR paceline run SCRIPT"
        )


def varied(step_s: float, variation: float) -> tuple[float, ...]:
    """Return equidistant quantiles of a lognormal distribution with this mean and this coefficient of variation.

    The tail ends at the last quantile. So the waiting is too short if there are far more ranks than quantiles.
    """
    variance = math.log1p(variation**2)
    if not variance or not step_s:
        return (step_s,)
    normal = NormalDist(math.log(step_s) - variance / 2, math.sqrt(variance))
    return tuple(math.exp(normal.inv_cdf((number + 0.5) / _QUANTILES)) for number in range(_QUANTILES))


def with_stragglers(profile: ModelProfile, share: float, slowdown: float) -> ModelProfile:
    """Return a profile in which a share of the steps takes `slowdown` times as long as the other steps."""
    steps_s, count = profile.steps_s, round(share * _QUANTILES)
    repeated = [steps_s[number * len(steps_s) // _QUANTILES] for number in range(_QUANTILES)]
    stride = _QUANTILES // count if count else 0  # short and long steps become stragglers
    slow = {stride * number for number in range(count)}
    mixed = tuple(step_s * slowdown if number in slow else step_s for number, step_s in enumerate(repeated))
    return replace(profile.scaled(1 + share * (slowdown - 1)), steps_s=mixed) if count else profile

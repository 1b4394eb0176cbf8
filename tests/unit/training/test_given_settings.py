"""The trainer uses every given hyperparameter, for every model, from the command line and from estimators."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import cli
from paceline.ps import FTRL
from paceline.sklearn import FactorizationMachine, LinearRegression, LogisticRegression, PoissonRegressor, base
from paceline.training import driver, planning
from paceline.training.files.data_files import resolve_files
from paceline.training.options import TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.planning import plan_training

RULE = {"lr": 0.0123, "l1": 0.77, "l2": 0.33, "beta": 1.7}
COMMON = {"epochs": 3, "batch_size": 7, **RULE}
FACTORS = {"dim": 3, "factor_lr": 0.011, "factor_l1": 0.5, "factor_l2": 0.07, "factor_min_count": 2}
COUNTED = {"min_count": 2, "count_cells": 1 << 20}
TOWER = {"hidden": "5,4", "tower_lr": 0.02, "tower_l1": 0.1, "tower_l2": 0.2}
FAMILIES: dict[str, dict[str, Any]] = {
    "lr": {}, "regression": {}, "poisson": {}, "softmax": {"classes": 3}, "fm": FACTORS, "ffm": FACTORS,
}  # fmt: skip
SLOW = {"deepfm": {**FACTORS, **TOWER}, "dcn": {**FACTORS, **TOWER, "cross_layers": 1}}
LINEAR = ("lr", "regression", "poisson", "softmax")
THOROUGH = pytest.mark.thorough
FEW = ("l1", "factor_lr")
ALONE = [
    *(("lr", name, []) for name in [*COMMON, "min_count"]),
    *(pytest.param(family, name, [], marks=[THOROUGH] * (name not in FEW)) for family in LINEAR[1:] for name in COMMON),
    *(
        pytest.param(family, name, ["--tune"], marks=[THOROUGH] * (name not in FEW or family not in ("lr", "softmax")))
        for family in LINEAR
        for name in COMMON
    ),
    *(pytest.param("fm", name, [], marks=[THOROUGH] * (name not in FEW)) for name in [*COMMON, *FACTORS]),
    *(pytest.param("ffm", name, [], marks=THOROUGH) for name in FACTORS),
    ("fm", "factor_lr", ["--tune"]),
    *(pytest.param("fm", name, ["--tune"], marks=THOROUGH) for name in ("factor_l2", "lr", "l1")),
]


class _PlannedError(Exception):
    """Raised in place of the training, with the training's plan already recorded."""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    features = [f"c{rng.integers(0, 4)},d{rng.integers(0, 3)},{rng.normal():.3f}" for _ in range(60)]
    for name, num_classes in (("clicks.csv", 2), ("classes.csv", 3)):
        lines = [f"{row % num_classes},{feature}" for row, feature in enumerate(features)]
        (tmp_path / name).write_text("label,site,device,size\n" + "\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)


def plan_of_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[TrainingPlan, TrainOptions]:
    found: list[TrainOptions] = []

    def record(options: TrainOptions, *cluster: Any, **settings: Any) -> None:
        found.append(options)
        raise _PlannedError

    monkeypatch.setattr(driver, "run_training", record)
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "-q", *arguments])
    with pytest.raises(_PlannedError):
        cli.main()
    options, _ = resolve_files(found[0])
    return plan_training(options), options


def value_in(plan: TrainingPlan, name: str) -> Any:
    """Return the value that the training uses for a hyperparameter."""
    if name in ("epochs", "batch_size"):
        return getattr(plan, name)
    if name in RULE:
        of_rule = {"lr": "alpha", "l2": "l2"} if isinstance(plan.update, FTRL) else {"l2": "weight_decay"}
        return getattr(plan.update, of_rule.get(name, name))
    value: Any = plan.model.num_outputs if name == "classes" else plan.model.value_of(name)
    return ",".join(map(str, value)) if name == "hidden" else value


def check(monkeypatch: pytest.MonkeyPatch, family: str, given: dict[str, Any], *other_arguments: str) -> None:
    arguments = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    data = "classes.csv" if family == "softmax" else "clicks.csv"
    plan, _ = plan_of_command(monkeypatch, data, "--model", family, *arguments, *other_arguments)
    assert {name: value_in(plan, name) for name in given} == given


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(("family", "name", "tuned"), ALONE)
def test_a_single_given_setting(monkeypatch: pytest.MonkeyPatch, family: str, name: str, tuned: list[str]) -> None:
    check(monkeypatch, family, {name: {**COMMON, **FAMILIES[family], "min_count": 2}[name]}, *tuned)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("family", [*FAMILIES, *SLOW])
def test_all_settings_together(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    if family in SLOW:
        pytest.importorskip("torch")
    check(monkeypatch, family, {**COMMON, **COUNTED, **{**FAMILIES, **SLOW}[family]})


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "rmsprop", "adam", "adamw"])
@pytest.mark.parametrize("family", ["lr", pytest.param("poisson", marks=pytest.mark.thorough)])
def test_settings_of_other_rules(monkeypatch: pytest.MonkeyPatch, family: str, rule: str) -> None:
    check(monkeypatch, family, {"lr": 0.0123, "l2": 0.33}, "--update", rule)


@pytest.mark.usefixtures("rows")
def test_settings_outside_of_the_update_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--schedule", "cosine", "--warmup", "0.5", "--keep-negatives", "0.3", "--order", "file", "--update", "sgd"]
    _, options = plan_of_command(monkeypatch, "clicks.csv", *given, "--class-weight", "0:1,1:5")
    assert (str(options.passes.rates.schedule), options.passes.rates.warmup) == ("cosine", 0.5)
    assert (options.weights.keep_negatives, options.passes.order) == (0.3, "file")
    assert options.weights.classes == {"0": 1.0, "1": 5.0}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[THOROUGH] * (kind is not LogisticRegression and name not in FEW))
        for kind in (LogisticRegression, LinearRegression, PoissonRegressor, FactorizationMachine)
        for name in {**COMMON, **(FACTORS if kind is FactorizationMachine else {})}
    ],
)
def test_a_parameter_of_an_estimator(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> None:
    rng, found, original = np.random.default_rng(0), [], planning.plan_on_sample

    def record(*arguments: Any) -> TrainingPlan:
        found.append(original(*arguments))
        raise _PlannedError

    monkeypatch.setattr(base, "plan_on_sample", record)
    value = {**COMMON, **FACTORS}[name]
    with pytest.raises(_PlannedError):
        kind(**{name: value}).fit(rng.normal(0, 1, (60, 3)), rng.integers(0, 2, 60))
    assert value_in(found[0], name) == value

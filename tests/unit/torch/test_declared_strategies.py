"""The declarations of strategies match their classes and their options."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

pytest.importorskip("torch")
import paceline.torch as pt
from paceline.environment import Environment
from paceline.strategies import (
    STRATEGIES,
    ElasticFlags,
    PipelineFlags,
    PipelineOptions,
    ShardingFlags,
    ShardingOptions,
    StrategySpec,
    choose_strategy,
)
from paceline.torch.strategies.choosing import class_of


@pytest.mark.parametrize("spec", STRATEGIES.values(), ids=list(STRATEGIES))
def test_declaration_names_the_public_class(spec: StrategySpec) -> None:
    kind = class_of(spec)
    assert kind.name == spec.name
    assert getattr(pt, kind.__name__) is kind
    assert set(spec.neutral_settings) <= set(inspect.signature(kind).parameters)


@pytest.mark.parametrize("spec", STRATEGIES.values(), ids=list(STRATEGIES))
def test_declared_flags_exist(spec: StrategySpec) -> None:
    known = {field.name for group in (ElasticFlags, PipelineFlags, ShardingFlags) for field in fields(group)}
    assert set(spec.flags) <= known
    assert bool(spec.flags) == bool(spec.without_flags) == (spec.choose_options is not None)


def test_options_are_passed_only_to_the_named_strategy() -> None:
    options = choose_strategy("pipeline", processes=4).options
    assert isinstance(options, PipelineOptions)
    assert options.num_processes == 4
    rank_environment = Environment(strategy="pipeline", strategy_options=options.encode())
    assert PipelineOptions.of_environment(rank_environment) == options
    assert ShardingOptions.of_environment(rank_environment) is None
    assert PipelineOptions.of_environment(Environment(strategy="pipeline")) is None

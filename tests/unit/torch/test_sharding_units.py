"""Units of a model, the division of parameters into shards, and errors about options. No processes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from paceline.errors import UsageError  # noqa: E402
from paceline.strategies import (  # noqa: E402
    PipelineFlags,
    ShardingFlags,
    ShardingOptions,
    StrategyFlags,
    choose_sharding,
    choose_strategy,
)
from paceline.torch.strategies.sharded.units import choose_units, shard_dimension  # noqa: E402


class Model(nn.Module):
    """A model with nested lists of blocks and other modules. The first and the last module may share weights."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])
        self.encoder.norm = nn.LayerNorm(4)
        self.top = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 10, bias=False)
        if is_tied:
            self.head.weight = self.words.weight


def test_default_units() -> None:
    blocks, leaves = ["encoder.blocks.0", "encoder.blocks.1"], ["words", "head"]
    assert set(choose_units(Model(), least=1)) == {*blocks, *leaves, "encoder.norm", "top.0", "top.2"}
    assert set(choose_units(Model(), least=30)) == {*blocks, *leaves}
    assert set(choose_units(Model(is_tied=True), least=30)) == set(blocks)
    assert choose_units(Model()) == []
    assert choose_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), least=1) == ["0"]


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        (["encoder.blocks.*"], ["encoder.blocks.0", "encoder.blocks.1"]),
        (["top", "top.*"], ["top.0", "top.2", "top"]),
        (["h*d", "*.norm"], ["encoder.norm", "head"]),
        (["encoder.blocks.1", "encoder.blocks.*"], ["encoder.blocks.1", "encoder.blocks.0"]),
    ],
)
def test_units_by_name(patterns: list[str], units: list[str]) -> None:
    assert choose_units(Model(), patterns) == units


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layers.*"], r"--shard layers\.\*: no module .*modules: words, encoder, .* and \d+ more"),
        (["encoder.blocks"], r"encoder\.blocks has no parameters, or no forward .*encoder\.blocks\.\*"),
        (["top.1"], r"top\.1 has no parameters"),
        (["head"], "head shares the parameter 'weight' with another part"),
    ],
)
def test_invalid_unit_names(patterns: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_units(Model(is_tied=True), patterns)


@pytest.mark.parametrize(
    ("shape", "num_shards", "dimension"),
    [
        ((8, 3), 4, 0),
        ((7, 4), 4, 0),
        ((5, 8), 4, 1),
        ((1, 8), 4, 1),
        ((1, 7), 4, None),
        ((3,), 4, None),
        ((), 4, None),
        ((0, 4), 2, 1),
        ((3, 1 << 16), 5, 0),
    ],
)
def test_no_shard_is_empty_if_avoidable(shape: tuple[int, ...], num_shards: int, dimension: int | None) -> None:
    """For example, four shards of five rows have 2, 2, 1 and 0 rows."""
    assert shard_dimension(shape, num_shards) == dimension


def test_options() -> None:
    options = choose_sharding("blocks.*, head", 2, 8)
    assert options == ShardingOptions(units=("blocks.*", "head"), shards=4, data_parallel=2)
    assert ShardingOptions.decode(options.encode()) == options
    assert choose_sharding(None, None, 3) == ShardingOptions(units=(), shards=3, data_parallel=1)
    flags = StrategyFlags(sharding=ShardingFlags(shard="head"))
    assert choose_strategy("sharded", processes=2, flags=flags).options == choose_sharding("head", None, 2)
    with pytest.raises(UsageError, match="PACELINE_STRATEGY_OPTIONS='no' was not written by paceline run"):
        ShardingOptions.decode("no")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sharded", {"pipeline": {"data_parallel": 2}}, "--data-parallel 2: expected a divisor of the 3 processes"),
        ("sharded", {"pipeline": {"data_parallel": 0}}, "--data-parallel 0: expected"),
        ("sharded", {"pipeline": {"stages": 3}}, "sharded has no pipeline stages. Leave --stages 3 out"),
        ("sharded", {"shard": "a,,b"}, "--shard a,,b: expected different module names"),
        ("sharded", {"shard": "a,a"}, "--shard a,a: expected different"),
        ("sharded", {"replicas": 2}, "Leave --replicas 2 out"),
        ("sharded", {"servers": 1}, "strategy sharded has no servers"),
        ("all-reduce", {"shard": "a"}, "all-reduce shards no parameters. Leave --shard a out, or choose sharded"),
    ],
)
def test_impossible_options(name: str, options: dict[str, Any], message: str) -> None:
    remaining = dict(options)
    flags = StrategyFlags(
        pipeline=PipelineFlags(**remaining.pop("pipeline", {})),
        sharding=ShardingFlags(shard=remaining.pop("shard", None)),
    )
    with pytest.raises(UsageError) as caught:
        choose_strategy(name, processes=3, flags=flags, **remaining)
    assert message in str(caught.value)

"""Values that are sent between stages keep their properties."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from paceline.errors import UsageError  # noqa: E402
from paceline.torch.strategies.pipeline.loop.batches import describe_cut  # noqa: E402
from paceline.torch.strategies.pipeline.run.values import (  # noqa: E402
    plain_values,
    put_together,
    take_apart,
    tensors_of,
)


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """Outputs like those of transformers: a dictionary and a dataclass."""

    hidden: object = None
    remainder: object = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


def test_sent_tuples_and_dictionaries_keep_their_classes() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    value = [Pair(x, (1, "a")), Output(hidden=y), OrderedDict(a=x), {"b": None}, defaultdict(int, c=4)]
    assert plain_values(take_apart(value, "a value")[0]) == [1, "a", None, 4]
    description, tensors = take_apart(value, "a value")
    description = json.loads(json.dumps(description))
    found = put_together(description, tensors)
    assert [type(value) for value in found] == [Pair, Output, OrderedDict, dict, defaultdict]
    assert found[0].first is x
    assert found[0].second == (1, "a")
    assert found[1].hidden is y
    assert found[1].remainder is None
    assert [shape for _, shape, _ in tensors_of(description)] == [[2], [3], [2]]


@pytest.mark.parametrize("name", ["Missing", "take_apart"])
def test_a_missing_class_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"another stage sent a value of the class .*values.{name}"):
        put_together({"n": ["paceline.torch.strategies.pipeline.run.values", name, {"d": {}}]}, [])


def test_unsplit_arguments_are_reported_with_a_possible_batch_dimension() -> None:
    x, state, mask = torch.ones(8, 3), torch.ones(2, 8, 4), torch.ones(3)
    assert describe_cut({"x": x}, 8) == ""
    assert describe_cut({"x": x, "mask": mask}, 8).endswith("the whole of mask [3]")
    text = describe_cut({"x": x, "state": (state, mask)}, 8)
    assert "the whole of state [2, 8, 4], state [3]; if state's dimension 1 is the batch, put it first" in text

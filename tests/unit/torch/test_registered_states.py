"""Checkpoints contain the states of objects that a program registers, in the types that the objects expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from paceline.errors import UsageError  # noqa: E402
from paceline.torch.strategies.one_device import OneDevice  # noqa: E402


class Counters:
    """A program's own state, of several types."""

    def __init__(self, number: int = 0) -> None:
        self.state: dict[str, Any] = {
            "place": (number, 0.5),
            "values": np.full(2, number, np.int16),
            "by number": {number and 7: float("inf")},
            "tensors": [torch.full((2, 2), number, dtype=torch.bfloat16)],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def registered(number: int) -> tuple[OneDevice, Counters, Any, Any]:
    strategy = OneDevice()
    model = strategy.prepare(nn.Linear(1, 1))
    counters, average, generator = Counters(number), AveragedModel(model), torch.Generator().manual_seed(number)
    nn.init.constant_(model.weight, number)
    average.update_parameters(model)
    for name, state in (("counters", counters), ("average", average), ("noise", generator)):
        strategy.register_state(name, state)
    return strategy, counters, average, generator


def test_registered_states_are_in_checkpoints(tmp_path: Path) -> None:
    strategy, counters, average, generator = registered(3)
    strategy.save(tmp_path / "saved")
    drawn = torch.rand(2, generator=generator)
    other, loaded, other_average, other_generator = registered(0)
    other.load(tmp_path / "saved")
    assert loaded.state["place"] == (3, 0.5)
    assert isinstance(loaded.state["place"], tuple)
    assert loaded.state["values"].dtype == np.int16
    assert loaded.state["values"].tolist() == [3, 3]
    assert loaded.state["by number"] == {7: float("inf")}
    assert torch.equal(loaded.state["tensors"][0], counters.state["tensors"][0])
    assert loaded.state["tensors"][0].dtype == torch.bfloat16
    assert torch.equal(other_average.module.weight, average.module.weight)
    assert torch.equal(torch.rand(2, generator=other_generator), drawn)


def test_a_checkpoint_without_the_name_changes_nothing(tmp_path: Path) -> None:
    strategy = OneDevice()
    strategy.prepare(nn.Linear(1, 1))
    strategy.save(tmp_path / "saved")
    other, counters, _, _ = registered(2)
    other.load(tmp_path / "saved")
    assert counters.state["place"] == (2, 0.5)


class Unsavable(Counters):
    def state_dict(self) -> dict[str, Any]:
        return {"file": Path()}


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("noise", Counters(), r"^register_state\('noise'\): the name is already in use. Choose another name$"),
        ("count", 3, r"^register_state\('count'\): got an object of type int, expected one with state_dict"),
        ("other", Unsavable(), r"cannot save the registered state 'other'\['file'\], of type PosixPath"),
    ],
)
def test_objects_that_cannot_be_registered(name: str, state: Any, message: str) -> None:
    strategy = OneDevice()
    strategy.register_state("noise", torch.Generator())
    with pytest.raises(UsageError, match=message):
        strategy.register_state(name, state)

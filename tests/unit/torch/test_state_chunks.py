"""The tensors of a state are divided into chunks. A newcomer's chunks have the same order and meaning."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from paceline.errors import UsageError  # noqa: E402
from paceline.protocol import healing  # noqa: E402
from paceline.torch.strategies.elastic.chunks import StateTensors  # noqa: E402
from paceline.torch.strategies.one_device import OneDevice  # noqa: E402


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "CHUNK_BYTES", 100)


def train(num_steps: int, *, width: int = 4) -> OneDevice:
    """Return a strategy after training steps on a model with tied weights, a frozen parameter and channels last."""
    strategy = OneDevice(device="cpu")
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width, width))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_module("tied", model[3])
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    strategy.prepare(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    strategy.register_state("average", average)
    for _ in range(num_steps):
        model(torch.randn(2, 3, 3, 3)).sum().backward()
        optimizer.step()
        average.update_parameters(model)
    return strategy


def test_a_family_has_a_parameter_and_its_moments() -> None:
    tensors = StateTensors(train(1))
    moments = ["optimizer/0/0/exp_avg", "optimizer/0/0/exp_avg_sq"]
    assert tensors.families[0] == ["model/0.weight", *moments]
    assert ["model/1.bias"] in tensors.families
    assert not any(name.startswith("model/tied") for name in tensors.by_name)
    assert "optimizer/0/0/step" in tensors.rest
    assert sorted([*tensors.rest, *(name for family in tensors.families for name in family)]) == sorted(tensors.by_name)


def test_a_newcomer_gets_the_same_state() -> None:
    """The newcomer has made no step, so its optimizer has no state."""
    source, newcomer = train(2), train(0)
    described = StateTensors(source).describe()
    own = StateTensors(newcomer)
    own.adopt(described)
    chunks, copies = StateTensors(source).chunks(), own.chunks()
    numbers = range(len(chunks.sizes))
    assert copies.sizes == chunks.sizes == described["sizes"]
    assert max(chunks.sizes) <= 3 * 100
    copies.unpack(chunks.pack(numbers), numbers)
    for name in own.rest:
        own.by_name[name].copy_(StateTensors(source).by_name[name])
    assert np.array_equal(copies.checksums(numbers), chunks.checksums(numbers))
    found = StateTensors(newcomer)
    for name, tensor in StateTensors(source).by_name.items():
        if not name.startswith("registered/"):
            assert torch.equal(found.by_name[name], tensor), name
    assert [*found.by_name] == [*StateTensors(source).by_name]


def test_checksums_find_the_changed_chunks() -> None:
    strategy = train(1)
    chunks = StateTensors(strategy).chunks()
    numbers = range(len(chunks.sizes))
    before = chunks.checksums(numbers)
    weight = next(parameter for parameter in strategy.optimizers[0].state if parameter.ndim == 4)
    strategy.optimizers[0].state[weight]["exp_avg"][-1, -1, -1, -1] += 1.0
    assert np.flatnonzero(chunks.checksums(numbers) != before).tolist() == [4]


def test_another_model_is_an_error() -> None:
    described = StateTensors(train(1)).describe()
    with pytest.raises(UsageError, match=r"0\.weight"):
        StateTensors(train(1, width=5)).adopt(described)

"""Models that are built under ``torch.device("meta")`` and get their values module by module."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from paceline.errors import UsageError  # noqa: E402
from paceline.torch.strategies.deferred import DeferredValues, is_stand_in, lent_memory  # noqa: E402


def model() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.BatchNorm1d(4))


def test_initialization_by_parts_equals_initialization_of_the_complete_model() -> None:
    whole, parts = model(), model()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    first, second = DeferredValues.of(whole, 7), DeferredValues.of(parts, 7)
    assert first is not None
    assert second is not None
    first.fill()
    known_parameters = {id(parameter) for parameter in parts[1].parameters()}
    state = torch.get_rng_state()
    second.fill(lambda tensor: id(tensor) in known_parameters)
    assert torch.equal(state, torch.get_rng_state())
    weight = parts.get_parameter("0.weight")
    assert is_stand_in(weight)
    assert weight.untyped_storage().nbytes() == 4
    second.fill()
    for part_parameter, whole_parameter, known in zip(
        parts.parameters(), whole.parameters(), optimizer.param_groups[0]["params"], strict=True
    ):
        assert part_parameter is known
        assert torch.equal(part_parameter, whole_parameter)
        assert not part_parameter.isnan().any()
    assert torch.equal(parts.get_buffer("2.running_var"), torch.ones(4))


def test_a_model_with_allocated_parameters_needs_no_deferred_values() -> None:
    assert DeferredValues.of(nn.Linear(2, 2), 0) is None


def test_lent_memory_is_released() -> None:
    net = model()
    DeferredValues.of(net, 0)
    weight = net.get_parameter("0.weight")
    with lent_memory([weight, 3]):
        assert not weight.isnan().any()
    assert is_stand_in(weight)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class HalfScale(Scale):
    def reset_parameters(self) -> None:
        pass


class BrokenScale(Scale):
    def reset_parameters(self) -> None:
        raise ValueError("no such file")


def test_modules_without_reset_parameters_are_named() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(UsageError, match=r"1 \(Scale\) is on the meta device with factor.*reset_parameters"):
        DeferredValues.of(net, 0)


@pytest.mark.parametrize(("kind", "message"), [(HalfScale, "does not set 'factor'"), (BrokenScale, "no such file")])
def test_an_incomplete_reset_is_named(kind: type[Scale], message: str) -> None:
    with torch.device("meta"):
        net = nn.Sequential(kind())
    deferred = DeferredValues.of(net, 0)
    assert deferred is not None
    with pytest.raises(UsageError, match=rf"0 \({kind.__name__}\).*{message}"):
        deferred.fill()

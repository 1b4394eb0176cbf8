"""Parts of the strategies with replicas: splitting a batch, joining outputs, and devices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.torch import CentralStorage, Mirrored, strategy
from paceline.torch.device_threads import DeviceThreads
from paceline.torch.strategies.replicas.strategy import replica_devices
from paceline.torch.strategies.splitting import check_outputs, gather, scatter, split

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"),
    [(30, 8, [4, 4, 4, 4, 4, 4, 4, 2]), (10, 8, [2, 2, 2, 2, 2]), (3, 8, [1, 1, 1]), (7, 1, [7])],
)
def test_a_batch_is_split_like_by_torch_chunk(rows: int, replicas: int, expected: list[int]) -> None:
    x = torch.arange(rows * 2.0).view(rows, 2)
    factor = torch.tensor(3.0)
    parts = split([x, "name", factor], replicas)
    assert [len(part[0]) for part in parts] == expected
    assert all(part[1] == "name" and part[2] is factor for part in parts)
    assert torch.equal(gather([part[0] for part in parts], CPU), x)


def test_gather_and_scatter_are_inverse() -> None:
    parts = [torch.rand(4, 3), torch.rand(2, 3)]
    back = scatter(gather(parts, CPU), parts)
    assert all(torch.equal(one, other) for one, other in zip(back, parts, strict=True))


def test_outputs_that_cannot_be_joined_are_reported() -> None:
    check_outputs([[torch.rand(8, 3), None, "a"], [torch.rand(4, 3), None, "a"]], [4, 2])  # rows by time steps
    with pytest.raises(UsageError, match=r"shape \(2, 4, 8\) for 4 examples.*must be the batch"):
        check_outputs([[torch.rand(2, 4, 8)], [torch.rand(2, 2, 8)]], [4, 2])
    with pytest.raises(UsageError, match="differ in kind"):
        check_outputs([[torch.rand(4)], [None]], [4, 2])
    with pytest.raises(UsageError, match="returned 4, 2, which cannot be joined"):
        check_outputs([[4], [2]], [4, 2])
    with pytest.raises(UsageError, match=r"which cannot be joined. Return tensors"):
        check_outputs([[threading.Lock()]], [4])


def test_indivisible_batches_are_reported() -> None:
    with pytest.raises(UsageError, match=r"shapes \(30, 2\), \(29,\).*first dimension"):
        split([torch.rand(30, 2), torch.rand(29)], 2)
    with pytest.raises(UsageError, match="batch of 0 examples"):
        split([torch.rand(0, 2)], 2)
    with pytest.raises(UsageError, match="layout sparse_coo, which replicas cannot split"):
        split([torch.eye(4).to_sparse()], 2)


def test_devices_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replica_devices("mirrored", 3, None, "cpu") == (CPU,) * 3
    assert replica_devices("mirrored", None, ["cpu", "cpu"], None) == (CPU,) * 2
    monkeypatch.setenv("PACELINE_REPLICAS", "5")
    assert replica_devices("mirrored", None, None, "cpu") == (CPU,) * 5
    monkeypatch.setenv("PACELINE_REPLICAS", "0")
    with pytest.raises(UsageError, match="PACELINE_REPLICAS=0: expected a whole number from 1 up"):
        Mirrored(device="cpu")
    monkeypatch.delenv("PACELINE_REPLICAS")
    assert 1 <= len(replica_devices("mirrored", None, None, "cpu")) <= 4
    with pytest.raises(UsageError, match="strategy central-storage: replicas=0: expected"):
        CentralStorage(replicas=0)
    with pytest.raises(UsageError, match=r"devices=\[\]: expected a list"):
        Mirrored(devices=[])
    with pytest.raises(UsageError, match="pass only devices"):
        Mirrored(devices=["cpu"], replicas=2)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="this host has no CUDA device"):
            Mirrored(devices=["cpu", "cuda:0"])


def test_threads_share_the_cores_and_the_callers_keep_the_thread_count() -> None:
    before = torch.get_num_threads()
    threads = DeviceThreads([CPU] * 2, "replica")
    torch.set_num_threads(4)
    try:
        assert threads.run(lambda _: torch.get_num_threads(), 2) == [2, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
        threads.close()


def test_threads_use_the_autograd_and_autocast_state_of_the_caller() -> None:
    threads = DeviceThreads([CPU] * 2, "replica")

    def state(_: int) -> tuple[bool, torch.dtype, bool]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_inference_mode_enabled()

    with torch.autocast("cpu", dtype=torch.float16):
        assert threads.run(state, 2) == [(True, torch.float16, False)] * 2
    with torch.inference_mode():
        assert [found[2] for found in threads.run(state, 2)] == [True, True]
    assert [found[0] for found in threads.run(state, 2)] == [False, False]
    assert threads.run(lambda _: torch.is_grad_enabled(), 2, grad=True) == [True, True]
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("paceline-replica")]


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(x)
        return {"outputs": outputs, "loss": nn.functional.cross_entropy(outputs, y)}


def test_a_loss_computed_in_the_model_is_the_mean_over_the_examples() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(7, 4), torch.arange(7) % 3  # replicas get 4 and 3 examples
    model = WithLoss()
    expected = model(x, y=y)["loss"]
    (grad,) = torch.autograd.grad(model(x, y=y)["loss"], model.layer.weight)
    model.zero_grad()
    with strategy("mirrored", replicas=2, device="cpu") as mirrored:
        prepared = mirrored.prepare(model)
        found = prepared(x, y=y)["loss"]
        found.backward()
    assert found.shape == ()
    assert torch.allclose(found, expected)
    assert model.layer.weight.grad is not None
    assert torch.allclose(model.layer.weight.grad, grad, atol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_model_with_another_batch_dimension_is_refused(batch_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.GRU(3, 8, batch_first=batch_first)
    model.forward = lambda x, forward=model.forward: forward(x)[0]  # type: ignore[method-assign]
    x = torch.randn(6, 4, 3)
    expected = model(x)
    with strategy("mirrored", replicas=2, device="cpu") as mirrored:
        prepared = mirrored.prepare(model)
        if batch_first:
            assert torch.allclose(prepared(x), expected, atol=1e-6)
        else:
            with pytest.raises(UsageError, match="batch_first=True"):
                prepared(x)


@pytest.mark.parametrize("option", [{"find_unused_parameters": True}, {"unused": "skip"}, {"bucket_mb": 4}])
def test_neutral_options_of_other_strategies_are_accepted(option: dict[str, Any]) -> None:
    with strategy("mirrored", replicas=2, device="cpu", **option) as mirrored:
        assert mirrored.name == "mirrored"


def test_options_with_an_effect_and_unknown_options_are_rejected() -> None:
    for option in ("sync_batch_norm", "find_unused"):
        options: dict[str, Any] = {option: True}
        with pytest.raises(UsageError, match="does not have an option"):
            strategy("mirrored", replicas=2, device="cpu", **options)

"""``AllReduce`` with real processes.

Importing torch takes seconds, so one run of a few ranks (see ``strategy_ranks.py``) serves all checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

_SIZE = 3
"""The number of ranks is no power of two. ``test_equal_results.py`` covers two ranks."""


@pytest.mark.timeout(240)
def test_all_reduce(tmp_path: Path) -> None:
    from tests.integration.strategies.rank_checks import run_checks

    result = run_checks("all_reduce_checks", _SIZE, tmp_path)
    assert not result.failures()
    assert result.codes == [7 if rank == 1 else 0 for rank in range(_SIZE)], result.errors
    assert "Traceback" not in "".join(result.errors)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", None),
        ("cpu", "gloo"),
        pytest.param("cuda", None, marks=pytest.mark.gpu),
        pytest.param("cuda", "nccl", marks=pytest.mark.gpu),
        pytest.param("cuda", "paceline", marks=pytest.mark.gpu),
    ],
)
def test_a_single_rank_equals_one_device(device: str, backend: str | None) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from paceline.torch import AllReduce, OneDevice, Strategy

    def train(strategy: Strategy) -> list[float]:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model, optimizer, batches = strategy.prepare(
            layers, torch.optim.Adam(layers.parameters()), torch.utils.data.DataLoader(data, 4, shuffle=True)
        )
        losses = []
        for batch in batches:
            assert batch.device.type == device
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(strategy.reduce(loss.item()))
        return losses

    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
    with OneDevice(device=device) as alone:
        expected = train(alone)
    with AllReduce(device=device, backend=backend) as strategy:
        assert train(strategy) == pytest.approx(expected, abs=1e-5)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "smoke"}, ["'smoke'", "paceline, gloo, nccl"]),
        ({"backend": "nccl", "device": "cpu"}, ["nccl", "cpu", "leave backend out"]),
        ({"compression": "zip"}, ["'zip'", "powersgd"]),
        ({"filters": "key-caching"}, ["key-caching:64 is not for gradients"]),
        ({"filters": "quantize:8", "compression": "fp16"}, ["pass only one"]),
        ({"compression": "powersgd:0"}, ["powersgd:0"]),
        ({"join": True, "sync_batch_norm": True}, ["join=True", "sync_batch_norm=True"]),
        ({"bucket_mb": 0}, ["bucket_mb=0"]),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], words: list[str]) -> None:
    from paceline.errors import UsageError
    from paceline.torch import AllReduce

    with pytest.raises(UsageError) as caught:
        AllReduce(**options)
    for word in words:
        assert word in str(caught.value)
    assert not torch.distributed.is_initialized()

"""The phases of a training loop, recorded by hooks of the model and the optimizer."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Group
from paceline.collectives.clocks import clock_offsets
from paceline.observe.recording import Recorder
from paceline.observe.spans.window import StepSpans, StepWindow
from paceline.observe.stuck.recorder import BUFFER_BYTES, FlightRecorder
from paceline.testing.ranks import run_ranks
from paceline.torch.strategies.step_phases import StepPhases, num_examples, tensors_in

PAUSE_S = 0.02
HOUR_NS = 3600 * 10**9


class _Slow(torch.autograd.Function):
    """Sleeps during forward and twice as long during backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * PAUSE_S)
        return gradient


class SlowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"outputs": [_Slow.apply(self.linear(batch))], "size": len(batch)}


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(3 * PAUSE_S)
        return super().step(closure)


def batches() -> Any:
    for _ in range(2):
        time.sleep(4 * PAUSE_S)
        yield torch.randn(8, 4), torch.randn(8, 1)


def test_phases_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(rank=0, world_size=1)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # restores it
    phases = StepPhases(recorder, lambda: True)
    model = SlowModel()
    optimizer = SlowOptimizer(model.parameters(), lr=0.1)
    phases.watch([optimizer], None)
    for inputs, targets in phases.batches(batches()):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs)["outputs"][0], targets).backward()
        optimizer.step()
        with torch.no_grad():
            model(inputs)  # an evaluation after the step is no forward of the training
    report = recorder.report()
    seconds = {labels[0]: value for labels, value in report.samples["paceline_step_phase_seconds_total"]}
    for phase, pauses in (("data", 8), ("forward", 2), ("backward", 4), ("optimizer", 6), ("other", 2)):
        assert seconds[phase] == pytest.approx(pauses * PAUSE_S, rel=0.5, abs=PAUSE_S / 2), phase
        assert seconds[phase] >= pauses * PAUSE_S, phase  # type: ignore[operator]
    assert "communication" not in seconds
    assert report.samples["paceline_examples_total"] == [((), 16)]
    [(_, step)] = report.samples["paceline_step_seconds"]
    assert isinstance(step, list)
    assert step[0] == pytest.approx(sum(seconds.values()), rel=0.05)  # type: ignore[arg-type]
    assert [number for number, _ in report.arrivals] == [1, 2]


def test_tensors_and_examples_of_a_batch() -> None:
    batch = {"name": "text", "parts": [(torch.zeros(3, 2), torch.zeros(1))]}
    assert [tensor.shape[0] for tensor in tensors_in(batch)] == [3, 1]
    assert num_examples(batch) == 3
    assert num_examples("text") == num_examples(torch.tensor(1.0)) == 1


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 0, 0]])
def test_ranks_of_several_hosts_compare_their_clocks_for_a_timeline(
    hosts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of host 1 is an hour ahead."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # restores it
    monkeypatch.setattr(
        "paceline.torch.strategies.step_phases.clock_offsets",
        lambda group, clock: clock_offsets(group, lambda: clock() + hosts[group.rank] * HOUR_NS),
    )

    def measure(group: Group) -> float:
        folder = tmp_path / str(group.rank)
        folder.mkdir()
        recorder = Recorder(rank=group.rank, world_size=group.size)
        window = StepWindow.create(folder, 1)
        recorder.spans = StepSpans(FlightRecorder(mmap.mmap(-1, BUFFER_BYTES)), window, range(1))
        StepPhases(recorder).watch([], group)
        offset_ns = window.offset_ns
        window.close()
        return offset_ns

    offsets = run_ranks(3, measure, hosts=hosts)
    assert offsets[:2] == [0, 0]  # rank 0's clock is the reference, and rank 1 is not the first rank of its host
    assert offsets[2] == pytest.approx(hosts[2] * HOUR_NS, abs=10**9)

"""How a script is measured: copies that begin their steps together, and the additional time of microbatches."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies.profile import STARTED
from paceline.torch.strategies.measuring import program_copies
from paceline.torch.strategies.measuring.microbatch_times import MicrobatchTimes
from paceline.torch.strategies.measuring.program_copies import ProgramCopies

STEPS = 20


def run_copies(folder: Path, pauses_s: dict[str, float], num_steps: dict[str, int]) -> dict[str, list[float]]:
    """Run a copy in each of several threads. Return the times at which its steps began."""
    begins: dict[str, list[float]] = {name: [] for name in pauses_s}

    def run(name: str) -> None:
        group = ProgramCopies(folder / name)
        for _ in range(num_steps[name]):
            begins[name].append(time.monotonic())
            time.sleep(pauses_s[name])
            group.wait()
        group.end()

    for name in pauses_s:
        (folder / name).mkdir()
    threads = [threading.Thread(target=run, args=(name,)) for name in pauses_s]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all((folder / name / STARTED).exists() for name in pauses_s)
    return begins


def test_copies_begin_each_step_together(tmp_path: Path) -> None:
    """The faster copy waits for the slower one, and not for a copy that has ended."""
    begins = run_copies(tmp_path, {"0": 0.001, "1": 0.01}, {"0": STEPS, "1": STEPS // 2})
    for number in range(1, STEPS // 2):
        assert begins["0"][number] >= begins["1"][number - 1] + 0.01
    assert len(begins["0"]) == STEPS


def test_a_copy_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_copies, "_PATIENCE_S", 0.2)
    began = time.monotonic()
    run_copies(tmp_path, {"0": 0.0, "1": 1.0}, {"0": STEPS, "1": 1})
    assert time.monotonic() - began < 5.0


class Slow(nn.Module):
    """A layer whose forward takes 5 ms and 1 ms per example, on a clock of its own."""

    def __init__(self, smallest: int = 1) -> None:
        super().__init__()
        self.layer, self.smallest, self.clock_s = nn.Linear(3, 2), smallest, 0.0

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        if len(inputs) < self.smallest:
            raise KeyError("the batch is too small")
        self.clock_s += 0.005 + 0.001 * len(inputs)
        outputs: Tensor = self.layer(inputs) * scale
        return outputs


@pytest.mark.parametrize(("smallest", "examples", "more_s"), [(1, 16, 0.005), (16, 16, 0.0), (1, 1, 0.0)])
def test_microbatches_take_additional_time(
    smallest: int, examples: int, more_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a division, because the model or the batch does not allow one, the time is 0."""
    model = Slow(smallest)
    monkeypatch.setattr(time, "perf_counter", lambda: model.clock_s)
    times = MicrobatchTimes(model, lambda: None)
    assert times.measure() == 0.0  # the model was not called yet
    times = MicrobatchTimes(model, lambda: None)
    model(torch.randn(examples, 3), scale=2.0)
    assert times.measure() == pytest.approx(more_s)

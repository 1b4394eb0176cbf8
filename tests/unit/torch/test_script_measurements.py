"""How a script is measured: its steps, copies that begin their steps together, and the time of microbatches."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies.profile import LEAST_STEPS, STARTED, ModelProfile, read_record
from paceline.torch.strategies.measuring import profiling, program_copies
from paceline.torch.strategies.measuring.microbatch_times import MicrobatchTimes
from paceline.torch.strategies.measuring.profiling import StepProfiler
from paceline.torch.strategies.measuring.program_copies import ProgramCopies
from paceline.torch.strategies.one_device import OneDevice

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


def measure_script(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    model: nn.Module,
    wait: Callable[[], None] = lambda: None,
) -> ModelProfile | None:
    """Train a model for `num_steps` steps, and end the program. Return the profile; None if none was written."""
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    strategy = OneDevice()
    strategy.module, strategy.optimizers = model, [torch.optim.SGD(model.parameters(), 0.1)]
    profiler = StepProfiler(strategy, folder, None, list)
    try:
        for inputs in profiler.watch(iter([(torch.randn(16, 3),)] * num_steps)):
            model(*inputs).sum().backward()
            wait()
            strategy.optimizers[0].step()
    except SystemExit:
        assert num_steps > LEAST_STEPS
    for end in at_exit:
        end()
    path = folder / "profile.json"
    return read_record(path, ModelProfile) if path.exists() else None


@pytest.mark.parametrize("num_steps", [LEAST_STEPS - 1, LEAST_STEPS, 1000])
def test_a_script_needs_thirteen_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """A longer script ends after 310 steps, ten of which are not measured as a whole."""
    found = measure_script(tmp_path, monkeypatch, num_steps, nn.Linear(3, 2))
    measured = {LEAST_STEPS - 1: None, LEAST_STEPS: 3, 1000: 300}[num_steps]
    assert (None if found is None else len(found.steps_s)) == measured


def test_the_profile_is_written_before_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may hang on a small batch. The finished measurements are already in the file then."""
    found: list[ModelProfile] = []

    class Watching(Slow):
        def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
            if len(inputs) < 16:
                found.append(read_record(tmp_path / "profile.json", ModelProfile))
            return super().forward(inputs, scale=scale)

    after = measure_script(tmp_path, monkeypatch, LEAST_STEPS, Watching())
    assert after is not None
    assert found
    assert {profile.steps_s for profile in found} == {after.steps_s}


def test_waiting_for_a_core_is_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each step is spent without a core: the layers use one core in the other half."""
    clock_s = {"elapsed": 0.0, "used": 0.0, "waited": 0.0}

    def pass_time() -> None:
        clock_s["elapsed"] += 0.02
        clock_s["used"] += 0.01
        clock_s["waited"] += 0.01

    class Busy(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            pass_time()
            return super().forward(inputs)

    class Waiting:
        def read_text(self) -> str:
            return f"0 {round(clock_s['waited'] * 1e9)} 0"

    monkeypatch.setattr(profiling, "CORE_WAITS", Waiting())
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s["elapsed"])
    monkeypatch.setattr(time, "process_time", lambda: clock_s["used"])
    found = measure_script(tmp_path, monkeypatch, LEAST_STEPS, Busy(3, 2), pass_time)
    assert found is not None
    assert found.stretch == pytest.approx(2.0)
    assert found.noise == pytest.approx(2.0)
    assert found.busy_cores == pytest.approx(1.0)

"""Measure the steps of a training loop, then end the program. ``paceline explain`` and ``compare`` use this module.

With ``PACELINE_PROFILE=DIR``, each prepared training loader measures the program's steps: from one batch to the next.
``PACELINE_PROFILE_STEPS=N`` measures N steps as a whole, under any strategy. Without this variable, the first steps
warm up, one step measures memory, five steps measure every layer, and the remaining steps are measured as a whole.
The measuring process writes no checkpoints.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.output_files import replacing
from paceline.ps import Client
from paceline.strategies.profile import (
    COPIES,
    FEWEST_STEPS,
    LAST,
    NUM_LATEST,
    STARTED,
    TARGET,
    WARM_UP,
    ModelProfile,
    StepRecord,
    latest_loss,
    warm_up_steps,
    write_record,
)
from paceline.torch.strategies.measuring.layer_times import LayerTimes
from paceline.torch.strategies.measuring.microbatch_times import MicrobatchTimes
from paceline.torch.strategies.measuring.program_copies import ProgramCopies
from paceline.torch.strategies.measuring.traffic import TrafficCounter
from paceline.torch.strategies.step_phases import num_examples, watch_backward

if TYPE_CHECKING:
    from paceline.torch.strategies.base import Strategy

_LAYER_STEPS: Final = 5
_LEAST_STEPS, _MOST_STEPS, _LONG_S = 12, 300, 3.0
"""Numbers of steps that are measured as a whole, and the time after which the smaller number is enough."""
_MOST_LOSS: Final = 1e300
"""Larger losses are left out, because their sums overflow."""
_MORE_STEPS: Final = 2
"""All ranks end this many steps after the first rank reaches the target. Other ranks may be one step ahead of it."""
CORE_WAITS: Final = Path("/proc/thread-self/schedstat")


class _MeasuredStep(NamedTuple):
    seconds: float
    waited_s: float
    """The part of the step in which this thread was ready and had no core."""
    end_s: float
    loss: Tensor | None


class StepProfiler:
    """Measures the steps of one process. Writes the result to a directory, and then raises SystemExit."""

    def __init__(
        self, strategy: Strategy, directory: Path, num_steps: int | None, clients: Callable[[], Sequence[Client]]
    ) -> None:
        """With `num_steps`, measure this number of steps as a whole, without layers.

        `clients` returns the connections to servers.
        """
        self._strategy, self._directory, self._num_steps = strategy, directory.absolute(), num_steps
        self._clients = clients
        self._layers = LayerTimes(strategy.device)
        self._microbatches: MicrobatchTimes | None = None
        self._traffic: TrafficCounter | None = None
        self._copies: ProgramCopies | None = None
        self._target: float | None = None
        self._number = 0
        self._batch_size = 0
        self._steps: list[_MeasuredStep] = []
        self._hooked_steps: list[_MeasuredStep] = []
        self._loss: Tensor | None = None
        self._first_s = self._began_s = self._waited_s = 0.0
        """The beginnings of the first step and of this step, and the time that this thread had waited for a core."""
        self._is_written = False
        atexit.register(self._write)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, and measure the steps. Raises SystemExit after the last step."""
        with ExitStack() as stack:
            stack.callback(watch_backward(self._begin_backward, self._layers.end_backward))
            if not self._number:
                self._begin()
            self._begin_interval()
            self._first_s = self._first_s or self._began_s
            for batch in batches:
                self._begin_step(batch)
                yield batch
                if self._end_step():
                    self._write()
                    raise SystemExit(0)

    def _begin(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if (self._directory / TARGET).exists():
            self._target = float((self._directory / TARGET).read_text())
        if (self._directory / COPIES).exists():
            self._copies = ProgramCopies(self._directory)
        else:
            (self._directory / STARTED).touch()

    def _begin_interval(self) -> None:
        self._waited_s = self._read_waited_s()
        self._began_s = time.perf_counter()

    def _read_waited_s(self) -> float:
        """Return the seconds for which this thread has waited for a core; 0 if the system does not measure them."""
        with suppress(OSError, IndexError):
            return int(CORE_WAITS.read_text().split()[1]) / 1e9 if self._num_steps is None else 0.0
        return 0.0

    def _begin_step(self, batch: Any) -> None:
        self._batch_size = max(self._batch_size, num_examples(batch))
        self._loss = None
        if self._num_steps is not None:
            return
        if self._number == WARM_UP:
            assert self._strategy.module is not None
            self._layers.hook_memory(self._strategy.module)
            self._microbatches = MicrobatchTimes(self._strategy.module, self._layers.synchronize)
        elif self._number == WARM_UP + 1:
            self._layers.hook_times(self._strategy.optimizers)
        self._layers.begin_step(self._began_s)

    def _end_step(self) -> bool:
        """Record the step. Return whether it is the last one."""
        self._layers.synchronize()
        self._layers.end_step()
        now_s = time.perf_counter()
        step = _MeasuredStep(
            seconds=now_s - self._began_s,
            waited_s=self._read_waited_s() - self._waited_s,
            end_s=now_s - self._first_s,
            loss=self._loss,
        )
        if self._copies is not None:
            self._copies.wait()
        self._begin_interval()
        self._number += 1
        if self._num_steps is not None:
            warm_up = warm_up_steps(self._num_steps)
            if self._number > warm_up:
                self._steps.append(step)
            elif self._number == warm_up:
                self._traffic = TrafficCounter(self._strategy.rank, self._strategy.world_size, self._clients())
                self._begin_interval()
                self._first_s = self._began_s
            return len(self._steps) == self._num_steps or (self._target is not None and self._is_last(self._target))
        first = WARM_UP + 1 + _LAYER_STEPS
        if self._number in (WARM_UP + 1, first):
            self._layers.remove_hooks()
        if self._number > first + 1:  # the step after the removal of the hooks warms up too
            self._steps.append(step)
        elif WARM_UP + 1 < self._number <= first:
            self._hooked_steps.append(step)
        count = len(self._steps)
        return count >= _MOST_STEPS or (count >= _LEAST_STEPS and sum(step.seconds for step in self._steps) >= _LONG_S)

    def _is_last(self, target: float) -> bool:
        """Return whether all ranks end after this step, because one of them has reached the target loss."""
        last = self._directory / LAST
        if last.exists():
            return self._number >= int(last.read_text())
        if latest_loss(_losses(self._steps[-NUM_LATEST:])) <= target:
            with replacing(last) as part:
                part.write_text(str(self._number + _MORE_STEPS))
        return False

    def _begin_backward(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = loss.detach()
        self._layers.mark(None)

    def _write(self) -> None:
        """Write the measurements, unless there are too few. A program may end before its last measured step."""
        if self._copies is not None:
            self._copies.end()
        if self._is_written or len(self._steps) < FEWEST_STEPS:
            return
        self._is_written = True
        steps, rank = self._steps, self._strategy.rank
        if self._num_steps is None:
            profile, path = self._profile(), self._directory / "profile.json"
            write_record(path, profile)
            if self._microbatches is not None:  # after the first record, because the model may fail or hang
                write_record(path, replace(profile, microbatch_s=self._microbatches.measure()))
            return
        assert self._traffic is not None
        has_messages = self._strategy.name == "pipeline"  # which are not counted
        record = StepRecord(
            rank=rank,
            batch_size=self._batch_size,
            steps_s=tuple(step.seconds for step in steps),
            ends_s=tuple(step.end_s for step in steps),
            losses=tuple(_losses(steps)),
            step_bytes=None if has_messages else self._traffic.num_bytes() / len(steps),
            staleness=self._traffic.staleness(),
        )
        write_record(self._directory / f"rank{rank}.json", record)

    def _profile(self) -> ModelProfile:
        strategy = self._strategy
        assert strategy.module is not None
        state = [
            leaf
            for optimizer in strategy.optimizers
            for entry in optimizer.state.values()
            for leaf in pytree.tree_leaves(entry)
            if isinstance(leaf, Tensor)
        ]
        profile = ModelProfile(
            layers=self._layers.profiles(),
            steps_s=tuple(step.seconds for step in self._steps),
            program_s=self._layers.program_s(),
            update_s=self._layers.update_s(),
            batch_size=max(self._batch_size, 1),
            optimizer_bytes=sum(tensor.nbytes for tensor in state),
            buffer_bytes=sum(buffer.nbytes for buffer in strategy.module.buffers()),
            stretch=_stretch(self._steps),
            busy_cores=max(self._layers.busy_cores() * _stretch(self._hooked_steps), 1.0),
            is_on_gpu=strategy.device.type == "cuda",
        )
        return profile.scaled_to_steps()  # the hooks make steps slower


def _stretch(steps: Sequence[_MeasuredStep]) -> float:
    """Return the duration of the steps, divided by their duration without waiting for a core."""
    total_s = sum(step.seconds for step in steps)
    return total_s / max(total_s - sum(step.waited_s for step in steps), 1e-9)


def _losses(steps: Sequence[_MeasuredStep]) -> list[float | None]:
    values = [math.nan if step.loss is None else float(step.loss) for step in steps]
    return [value if abs(value) <= _MOST_LOSS else None for value in values]

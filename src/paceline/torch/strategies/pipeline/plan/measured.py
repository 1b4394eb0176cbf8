"""Measured times of steps. Every rank sends its times to all ranks with the agreements."""

from __future__ import annotations

import time
from typing import Any

from paceline.torch.strategies.pipeline.plan.choosing import PipelinePlan

_WARM_UP = 2


class Measurements:
    """Sums over steps: this rank's sums, and the last received sums of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.own: list[Any] = [0, 0.0, {}]
        """Sums over steps: their number, seconds, and seconds of computing a microbatch by ``F3`` or ``B3``."""
        self.by_rank: list[list[Any]] = [[0, 0.0, {}] for _ in range(num_ranks)]
        self._num_seen = 0
        self._update_began = 0.0

    def add(self, took_s: float, busy_s: dict[str, float], num_parts: int, *, is_whole: bool) -> None:
        """Add a run of `num_parts` microbatches if it is a whole training step; the first steps are warm-up."""
        if not is_whole or len({key[0] for key in busy_s}) < 2:
            return
        self._num_seen += 1
        if self._num_seen <= _WARM_UP:
            return
        steps, seconds, busy = self.own
        by_stage = {key: busy.get(key, 0.0) + value / num_parts for key, value in busy_s.items()}
        whole = busy.get("all", 0.0) + sum(busy_s.values())
        self.own = [steps + 1, seconds + took_s, {**by_stage, "all": whole}]

    def begin_update(self) -> None:
        """Start to measure an optimizer's step, whose time :meth:`end_update` adds to the last step."""
        self._update_began = time.perf_counter()

    def end_update(self) -> None:
        steps, seconds, busy = self.own
        if steps:
            took_s = time.perf_counter() - self._update_began
            self.own = [steps, seconds + took_s, {**busy, "all": busy["all"] + took_s}]


def describe_measured(plan: PipelinePlan, measurements: Measurements) -> str | None:
    """Return a text with measured and predicted times; None if too few steps ran."""
    sums = measurements.by_rank
    steps = min(count for count, _, _ in sums)
    if steps < 1:
        return None
    step_s = max(seconds / count for count, seconds, _ in sums)
    busy = sum(by_stage["all"] / count for count, _, by_stage in sums)
    bubble = 1 - busy / (step_s * len(sums))
    stages = []
    for stage, times in enumerate(plan.times):
        own = next((rank_sums for rank_sums in sums if f"F{stage}" in rank_sums[2]), None)
        if own is not None:
            forward, backward = (own[2].get(f"{kind}{stage}", 0.0) / own[0] for kind in ("F", "B"))
            stages.append(
                f"  stage {stage}: forward {forward * 1e3:.3f} ms (predicted {times.forward_s * 1e3:.3f}), backward "
                f"{backward * 1e3:.3f} ms ({times.backward_s * 1e3:.3f})"
            )
    head = (
        f"pipeline: measured over {steps} steps: step {step_s * 1e3:.2f} ms "
        f"(predicted {plan.timeline.step_s * 1e3:.2f}), "
        f"bubble {bubble:.1%} ({plan.timeline.bubble:.1%})"
    )
    return "\n".join([head, *stages])

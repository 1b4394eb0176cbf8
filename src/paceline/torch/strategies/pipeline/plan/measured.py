"""What steps took: kept by every rank, told to all with what ranks agree on anyway."""

from __future__ import annotations

import time
from typing import Any

from paceline.torch.strategies.pipeline.plan.choosing import PipelinePlan

_WARM_UP = 2


class Measurements:
    """Sums over steps, of this rank and, as far as they have told, of the others."""

    def __init__(self, num_ranks: int) -> None:
        self.own: list[Any] = [0, 0.0, {}]
        """Sums over steps: 1, seconds with the update, and seconds of computing a microbatch, by ``F3`` or ``B3``."""
        self._by_rank: list[list[Any]] = [[0, 0.0, {}] for _ in range(num_ranks)]
        self._num_seen = 0
        self._update_began = 0.0

    def add(self, took_s: float, busy_s: dict[str, float], num_parts: int, *, is_whole: bool) -> None:
        """Count a run of `num_parts` microbatches, if it is a whole training step; the first ones are warm-up."""
        if not is_whole or len({key[0] for key in busy_s}) < 2:
            return
        self._num_seen += 1
        if self._num_seen <= _WARM_UP:
            return
        steps, seconds, busy = self.own
        each = {key: busy.get(key, 0.0) + value / num_parts for key, value in busy_s.items()}
        whole = busy.get("all", 0.0) + sum(busy_s.values())
        self.own = [steps + 1, seconds + took_s, {**each, "all": whole}]

    def begin_update(self) -> None:
        """Count what the optimizer does until :meth:`end_update` as part of the last step."""
        self._update_began = time.perf_counter()

    def end_update(self) -> None:
        """Count an update."""
        steps, seconds, busy = self.own
        if steps:
            took_s = time.perf_counter() - self._update_began
            self.own = [steps, seconds + took_s, {**busy, "all": busy["all"] + took_s}]

    def take(self, rank: int, told: list[Any]) -> None:
        """Take what another rank has told."""
        self._by_rank[rank] = told

    def all(self) -> list[list[Any]]:
        """Return by rank what is known of it."""
        return self._by_rank


def describe_measured(plan: PipelinePlan, measurements: Measurements) -> str | None:
    """Return what was measured beside what was predicted; None if too few steps ran."""
    told = measurements.all()
    steps = min(found[0] for found in told)
    if steps < 1:
        return None
    step_s = max(found[1] / found[0] for found in told)
    busy = sum(found[2]["all"] / found[0] for found in told)
    bubble = 1 - busy / (step_s * len(told))
    stages = []
    for stage, times in enumerate(plan.times):
        found = next((each for each in told if f"F{stage}" in each[2]), None)
        if found is not None:
            forward, backward = (found[2].get(f"{kind}{stage}", 0.0) / found[0] for kind in ("F", "B"))
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

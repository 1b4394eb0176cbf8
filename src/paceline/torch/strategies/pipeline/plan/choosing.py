"""Choose the schedule, microbatches and cuts with the shortest predicted step; compare it with measurements."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.strategies import SCHEDULES, PipelineOptions
from paceline.strategies.pipeline import AUTO, default_microbatches
from paceline.torch.strategies.pipeline.plan.orders import most_in_flight, orders_of, place_stages, split_backwards
from paceline.torch.strategies.pipeline.plan.splitting import (
    LayerCost,
    MessageCost,
    StageLimits,
    split_layers,
    stage_bytes,
)
from paceline.torch.strategies.pipeline.plan.timeline import StageTimes, Timeline, bubble_bound, play
from paceline.transport import register_type

_AUTO_SCHEDULES = ("1f1b", "interleaved", "zbv")
"""The schedules for ``auto``, in the order of preference."""
_WORTH_IT = 0.98
"""``auto`` prefers a later schedule only if its predicted step takes at most this share of the best earlier one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The settings of a pipeline, and the predictions of its times and memory."""

    schedule: str
    microbatches: int
    cuts: tuple[int, ...]
    """The number of the first layer of each of stages 1, 2, …"""
    times: tuple[StageTimes, ...]
    """Times of one microbatch, by stage."""
    memory_bytes: tuple[float, ...]
    timeline: Timeline
    seed: int = 0
    """The seed of random numbers in the model, such as dropout."""

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> PipelinePlan:
        return msgspec.convert(fields, register_type(cls))


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured costs of a model's layers, for several sizes of a microbatch."""

    by_rows: dict[int, list[LayerCost]]
    crossing: dict[int, list[int]]
    """For each number of rows of a microbatch: the bytes that cross a cut before each layer."""

    def at(self, rows: float) -> list[LayerCost]:
        """Return the layers' costs for a microbatch of any number of rows, by linear interpolation."""
        sizes = sorted(self.by_rows)
        if len(sizes) == 1:
            return [_scaled(cost, rows / sizes[0]) for cost in self.by_rows[sizes[0]]]
        upper = next((k for k, size in enumerate(sizes[1:-1], 1) if rows <= size), len(sizes) - 1)
        small, large = sizes[upper - 1], sizes[upper]
        share = (rows - small) / (large - small)

        def between(a: float, b: float) -> float:
            return max(a + (b - a) * share, min(a, b) * min(rows / small, 1.0))

        return [
            replace(
                a,
                forward_s=between(a.forward_s, b.forward_s),
                backward_s=between(a.backward_s, b.backward_s),
                weights_s=between(a.weights_s, b.weights_s),
                halving_s=between(a.halving_s, b.halving_s),
                activation_bytes=int(between(a.activation_bytes, b.activation_bytes)),
            )
            for a, b in zip(self.by_rows[small], self.by_rows[large], strict=True)
        ]

    def crossing_at(self, rows: float) -> list[float]:
        size, counts = max(self.crossing.items())
        return [count * rows / size for count in counts]


def _scaled(cost: LayerCost, factor: float) -> LayerCost:
    return replace(
        cost,
        forward_s=cost.forward_s * factor,
        backward_s=cost.backward_s * factor,
        weights_s=cost.weights_s * factor,
        halving_s=cost.halving_s * factor,
        activation_bytes=int(cost.activation_bytes * factor),
    )


def make_plan(
    measured: Measured,
    options: PipelineOptions,
    rows: int,
    link: MessageCost,
    state_bytes: float,
    cuts_for: Callable[[int], Sequence[int] | None],
) -> PipelinePlan:
    """Return the plan with the shortest predicted step.

    `rows` is the size of a batch. `state_bytes` is the memory for parameters, gradients and optimizer state per byte of
    parameters. ``cuts_for(stages)`` returns the user's cuts, or None if this function should find the cuts.

    If no plan is possible, raises UsageError with the reason why the first attempt failed.
    """
    plans: list[PipelinePlan] = []
    first: UsageError | None = None
    for schedule in [options.schedule] if options.schedule != AUTO else _AUTO_SCHEDULES:
        for count in microbatch_counts(options, rows):
            try:
                plans.append(_plan_of(measured, options, schedule, count, rows, link, state_bytes, cuts_for))
            except UsageError as error:
                first = first or error
    if not plans:
        assert first is not None
        raise first
    best = plans[0]
    for plan in plans[1:]:
        if plan.timeline.step_s < best.timeline.step_s * _WORTH_IT:
            best = plan
    return best


def splits_backwards(options: PipelineOptions) -> bool:
    schedules = [options.schedule] if options.schedule != AUTO else _AUTO_SCHEDULES
    return any(split_backwards(row) for schedule in schedules for row in orders_of(schedule, 2, 4))


def microbatch_counts(options: PipelineOptions, rows: int) -> list[int]:
    if options.microbatches is not None:
        return [min(options.microbatches, rows)]
    return default_microbatches(options.stages, rows)


def _plan_of(
    measured: Measured,
    options: PipelineOptions,
    schedule: str,
    count: int,
    rows: int,
    link: MessageCost,
    state_bytes: float,
    cuts_for: Callable[[int], Sequence[int] | None],
) -> PipelinePlan:
    num_ranks, parts = options.stages, SCHEDULES[schedule].parts_per_rank
    orders = orders_of(schedule, num_ranks, count)
    layers, crossing = measured.at(rows / count), measured.crossing_at(rows / count)
    in_flight = -(-max(most_in_flight(row) for row in orders) // parts)
    memory = None if options.stage_memory is None else options.stage_memory // parts
    limits = StageLimits(memory_bytes=memory, bytes_per_parameter_byte=state_bytes, in_flight=in_flight)
    num_stages = num_ranks * parts
    cuts = cuts_for(num_stages)
    if cuts is None:
        cuts = split_layers(layers, num_stages, lambda cut: link.seconds(crossing[cut]), limits)
    bounds = [0, *cuts, len(layers)]
    stages = [layers[a:b] for a, b in itertools.pairwise(bounds)]
    times = tuple(map(_times_of, stages))
    memory_bytes = tuple(stage_bytes(stage, limits) for stage in stages)
    _check_memory(memory_bytes, memory)
    timeline = play(
        orders,
        place_stages(schedule, num_ranks),
        times,
        lambda stage: link.seconds(crossing[bounds[stage]]),
        lambda stage: link.sending(crossing[bounds[stage]]),
    )
    timeline = replace(timeline, step_s=timeline.step_s + link.agreement_s)
    return PipelinePlan(
        schedule=schedule,
        microbatches=count,
        cuts=tuple(cuts),
        times=times,
        memory_bytes=memory_bytes,
        timeline=timeline,
    )


def _times_of(layers: Sequence[LayerCost]) -> StageTimes:
    names = [field.name for field in fields(StageTimes)]
    return StageTimes(**{name: sum(getattr(layer, name) for layer in layers) for name in names})


def _check_memory(memory_bytes: Sequence[float], limit: int | None) -> None:
    if limit is None:
        return
    for stage, size in enumerate(memory_bytes):
        if size > limit:
            raise UsageError(
                f"stage {stage} of --split takes {size / 2**20:.0f} MiB for parameters, optimizer and activations, a "
                f"stage may take {limit / 2**20:.0f} MiB (--stage-memory); split elsewhere, or leave --split out"
            )


def describe_plan(plan: PipelinePlan, names: Sequence[str], places: Sequence[int]) -> str:
    lines = [
        f"pipeline: schedule {plan.schedule}, {plan.microbatches} microbatches a batch, predicted step "
        f"{plan.timeline.step_s * 1e3:.2f} ms, bubble {plan.timeline.bubble:.1%} (bound of 1f1b with equal stages: "
        f"{bubble_bound(len(plan.timeline.busy_s), plan.microbatches):.1%})"
    ]
    rows = [("stage", "rank", "forward ms", "backward ms", "MiB", "layers")]
    rows += [
        (str(stage), str(rank), f"{t.forward_s * 1e3:.3f}", f"{t.backward_s * 1e3:.3f}", f"{size / 2**20:.1f}", name)
        for stage, (rank, t, size, name) in enumerate(zip(places, plan.times, plan.memory_bytes, names, strict=True))
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines += ["  " + "  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[5]]) for row in rows]
    return "\n".join(lines)


_WARM_UP = 2


class Measurements:
    """Adds up this rank's measurements of steps, and holds the last sums received from each rank."""

    def __init__(self, num_ranks: int) -> None:
        self.own: list[Any] = [0, 0.0, {}]
        """Number of steps, their seconds, and the seconds of computing by kind and stage (as ``F3``)."""
        self.by_rank: list[list[Any]] = [[0, 0.0, {}] for _ in range(num_ranks)]
        self._num_seen = 0
        self._update_began = 0.0

    def add(self, took_s: float, busy_s: dict[str, float], num_parts: int, *, is_whole: bool) -> None:
        """Add the times of a whole training step of `num_parts` microbatches, unless it is one of the first steps."""
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
        """Start to measure an optimizer's update. :meth:`end_update` adds the update's time to the last step."""
        self._update_began = time.perf_counter()

    def end_update(self) -> None:
        steps, seconds, busy = self.own
        if steps:
            took_s = time.perf_counter() - self._update_began
            self.own = [steps, seconds + took_s, {**busy, "all": busy["all"] + took_s}]


def describe_measured(plan: PipelinePlan, measurements: Measurements) -> str | None:
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

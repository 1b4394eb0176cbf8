"""Run a script under several strategies, and show the predictions beside the measurements."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from paceline.observe.table import draw_bars
from paceline.planning.calibration import key_of, load_results, store_results
from paceline.planning.explaining import find_machine, profile_both
from paceline.planning.options import CompareOptions
from paceline.planning.plays import ClusterShape
from paceline.planning.predictions import Scenario, StepPrediction, parse_candidate, predict_step
from paceline.planning.scripts import check_options, measured_examples_per_s, measured_step_s
from paceline.strategies.profile import StepRecord

_CURVE_CELLS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """The prediction and the measurement of one strategy."""

    prediction: StepPrediction
    records: tuple[StepRecord, ...]

    @property
    def step_s(self) -> float:
        """The mean measured seconds per step."""
        return measured_step_s(self.records)

    @property
    def examples_per_s(self) -> float:
        """The measured examples per second of all ranks together."""
        total = measured_examples_per_s(self.records)
        return total / len(self.records) if self.prediction.candidate.strategy == "pipeline" else total

    @property
    def error(self) -> float:
        """The prediction's relative error: positive if the prediction is too long."""
        return self.prediction.step_s / self.step_s - 1

    def losses(self) -> list[float]:
        """Return the mean loss over the ranks of each step, without steps that have no loss."""
        means = [statistics.fmean(same) for same in zip(*(record.losses for record in self.records), strict=False)]
        return [mean for mean in means if math.isfinite(mean)]

    def loss_at(self, seconds: float) -> float:
        """Return the mean loss of the last tenth of the steps until a time after the first step; NaN without losses."""
        losses = self.losses()
        count = sum(end_s <= seconds for end_s in self.records[0].ends_s[: len(losses)])
        latest = losses[:count][-max(count // 10, 1) :] if count else []
        return statistics.fmean(latest) if latest else math.nan


def compare(options: CompareOptions, show: Callable[[str], None]) -> Iterator[StepComparison]:
    """Measure each strategy and yield its comparison. The results are stored for ``paceline explain``."""
    command, ranks = check_options(options)
    chosen = [parse_candidate(text, options.servers) for text in options.strategies.split(",")]
    shape = ClusterShape(ranks_per_node=ranks)
    machine = find_machine(shape)
    profile, alone = profile_both(command, ranks, show)
    scenario = Scenario(profile=profile, alone=alone, machine=machine, shape=shape, servers=options.servers)
    predictions = [predict_step(scenario, candidate) for candidate in chosen]  # before the runs, which take minutes
    for candidate, prediction in zip(chosen, predictions, strict=True):
        show(f"running {command.script} under {candidate.label} ...")
        records = command.record(candidate, ranks, options.steps, prediction.step_s)
        comparison = StepComparison(prediction=prediction, records=tuple(records))
        results = load_results()
        key = key_of(command, ranks, candidate)
        results.steps_s.pop(key, None)  # so that the newest result is the last one
        results.steps_s[key] = comparison.step_s
        store_results(results)
        yield comparison


def comparison_as_json(comparison: StepComparison) -> dict[str, Any]:
    """Return the object for ``--json``. Losses that are not finite are left out."""
    return {
        "strategy": comparison.prediction.candidate.label,
        "predicted_s": comparison.prediction.step_s,
        "measured_s": comparison.step_s,
        "error": comparison.error,
        "examples_per_s": comparison.examples_per_s,
        "losses": comparison.losses(),
    }


def show_comparisons(console: Console, comparisons: Sequence[StepComparison]) -> None:
    """Print the table: prediction, measurement, error, and the losses at equal times and at equal samples."""
    ends_s = [comparison.records[0].ends_s[-1] for comparison in comparisons]
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    loss_time = f"loss at {min(ends_s):.2g} s"
    for name in ("predicted ms", "measured ms", "error", "examples/s", loss_time, "at the end"):
        table.add_column(name, justify="right")
    for comparison in comparisons:
        table.add_row(
            comparison.prediction.candidate.label,
            f"{comparison.prediction.step_s * 1e3:,.2f}",
            f"{comparison.step_s * 1e3:,.2f}",
            f"{comparison.error:+.0%}",
            f"{comparison.examples_per_s:,.0f}",
            _number(comparison.loss_at(min(ends_s))),
            _number(comparison.loss_at(math.inf)),
        )
    console.print(table)
    curves = {comparison.prediction.candidate.label: comparison.losses() for comparison in comparisons}
    known = [loss for losses in curves.values() for loss in losses]
    if known:
        steps = max(map(len, curves.values()))
        console.print(f"\nloss by step, from step 1 to {steps}, between {min(known):.3g} and {max(known):.3g}")
        width = max(map(len, curves))
        for label, losses in curves.items():
            console.print(f"{label:<{width}}  {draw_curve(losses, min(known), max(known))}", highlight=False)
    errors = [abs(comparison.error) for comparison in comparisons]
    console.print(f"\nmedian error of the predictions {statistics.median(errors):.0%}, worst {max(errors):.0%}")


def draw_curve(values: Sequence[float], low: float, high: float) -> str:
    """Return a line of bars with the means of consecutive values, between `low` and `high`."""
    bounds = [round(len(values) * cell / _CURVE_CELLS) for cell in range(_CURVE_CELLS + 1)]
    means = [statistics.fmean(values[begin:end]) for begin, end in itertools.pairwise(bounds) if end > begin]
    return draw_bars(means, low, high)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"

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

from paceline.errors import UsageError
from paceline.observe.plots import PageTable, Plot, Series
from paceline.observe.table import draw_bars, format_bytes, format_count
from paceline.planning.calibration import key_of, store_result
from paceline.planning.explaining import measure_scenario
from paceline.planning.options import CompareOptions
from paceline.planning.predictions import StepPrediction, parse_candidate, predict_step
from paceline.planning.scripts import ONLY, check_options, measured_step_s
from paceline.planning.steps import ClusterShape
from paceline.strategies.profile import StepRecord

_CURVE_CELLS: Final = 12
_PLOT_POINTS: Final = 100
_STEPS, _MOST_STEPS = 60, 10_000
"""Steps under each strategy: without a target loss, and at most with one."""


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
        speeds = [record.batch_size / measured_step_s([record]) for record in self.records]
        return self._add_batches(speeds)

    @property
    def error(self) -> float:
        """The prediction's relative error: positive if the prediction is too long."""
        return self.prediction.step_s / self.step_s - 1

    @property
    def batch_size(self) -> int:
        """Examples per step of all ranks together."""
        return round(self._add_batches([record.batch_size for record in self.records]))

    def _add_batches(self, values: Sequence[float]) -> float:
        """Return the sum of the ranks' values, or their mean for a pipeline, whose ranks read the same batch."""
        return statistics.fmean(values) if self.prediction.candidate.strategy == "pipeline" else sum(values)

    @property
    def step_bytes(self) -> float | None:
        """The mean bytes that a rank sends and receives per step; None if they are not counted."""
        counts = [record.step_bytes for record in self.records if record.step_bytes is not None]
        return statistics.fmean(counts) if counts else None

    @property
    def staleness(self) -> float | None:
        """The mean staleness of pushes to the servers, in pushes; None without servers."""
        return next((record.staleness for record in self.records if record.staleness is not None), None)

    def reached(self, target: float) -> tuple[float, int] | None:
        """Return the seconds and the examples until a rank has reached a loss; None if no rank has reached it."""
        steps = [(record.reached(target), record) for record in self.records]
        reached = [(step, record.ends_s[step - 1]) for step, record in steps if step is not None]
        step, end_s = min(reached, default=(0, 0.0))
        return (end_s, step * self.batch_size) if reached else None

    def losses(self) -> list[float]:
        """Return the loss of each step, as the mean over the ranks. Steps without a loss are left out."""
        steps = [
            [loss for loss in same if loss is not None]
            for same in zip(*(record.losses for record in self.records), strict=False)
        ]
        return [statistics.fmean(losses) for losses in steps if len(losses) == len(self.records)]

    def loss_at(self, seconds: float = math.inf, examples: float = math.inf) -> float:
        """Return the loss after a time or a number of examples: the mean of the last tenth of the steps until then.

        NaN if these steps have no loss.
        """
        losses = self.losses()
        count = sum(end_s <= seconds for end_s in self.records[0].ends_s[: len(losses)])
        count = int(min(count, examples // self.batch_size))
        latest = losses[:count][-max(count // 10, 1) :] if count else []
        return statistics.fmean(latest) if latest else math.nan


def compare(options: CompareOptions, show: Callable[[str], None]) -> Iterator[StepComparison]:
    """Measure each strategy and yield its comparison. The results are stored for ``paceline explain``."""
    command, ranks = check_options(options)
    if options.target_loss is not None and not math.isfinite(options.target_loss):
        raise UsageError(f"--target-loss {options.target_loss}: expected a finite number")
    chosen = [parse_candidate(text, options.servers) for text in options.strategies.split(",")]
    scenario = measure_scenario(command, ClusterShape(ranks_per_node=ranks), options.servers, show)
    predictions = [predict_step(scenario, candidate) for candidate in chosen]  # before the runs, which take minutes
    steps = options.steps or (_STEPS if options.target_loss is None else _MOST_STEPS)
    for candidate, prediction in zip(chosen, predictions, strict=True):
        show(f"running {command.script} under {candidate.label} ...")
        records = command.records(candidate, ranks, steps, step_s=prediction.step_s, target_loss=options.target_loss)
        comparison = StepComparison(prediction=prediction, records=tuple(records[ONLY]))
        store_result(key_of(command, ranks, candidate), comparison.step_s)
        yield comparison


def comparison_as_json(comparison: StepComparison, target: float | None) -> dict[str, Any]:
    """Return the object for ``--json``. Losses that are not finite are left out.

    ``reached`` is the pair of seconds and examples until the target loss.
    """
    return {
        "strategy": comparison.prediction.candidate.label,
        "predicted_s": comparison.prediction.step_s,
        "measured_s": comparison.step_s,
        "error": comparison.error,
        "examples_per_s": comparison.examples_per_s,
        "staleness": comparison.staleness,
        "step_bytes": comparison.step_bytes,
        "reached": comparison.reached(target) if target is not None else None,
        "losses": comparison.losses(),
    }


def tables_of(comparisons: Sequence[StepComparison], target: float | None) -> list[PageTable]:
    """Return the tables: predictions beside measurements, and the losses at equal times and numbers of examples."""
    end_s = min(comparison.records[0].ends_s[-1] for comparison in comparisons)
    examples = min(len(comparison.records[0].ends_s) * comparison.batch_size for comparison in comparisons)
    labels = [comparison.prediction.candidate.label for comparison in comparisons]
    errors = [abs(comparison.error) for comparison in comparisons]
    steps = PageTable(
        title="Prediction and measurement",
        columns=["strategy", "predicted\nms", "measured\nms", "error", "examples\n/s", "staleness", "bytes\n/step"],
        rows=[
            [
                label,
                f"{comparison.prediction.step_s * 1e3:,.2f}",
                f"{comparison.step_s * 1e3:,.2f}",
                f"{comparison.error:+.0%}",
                f"{comparison.examples_per_s:,.0f}",
                "" if comparison.staleness is None else f"{comparison.staleness:.2f}",
                "" if comparison.step_bytes is None else format_bytes(comparison.step_bytes),
            ]
            for label, comparison in zip(labels, comparisons, strict=True)
        ],
        note=f"median error of the predictions {statistics.median(errors):.0%}, worst {max(errors):.0%}",
    )
    known = [loss for comparison in comparisons for loss in comparison.losses()]
    if not known:
        return [steps]
    columns = ["strategy", f"after\n{end_s:.2g} s", f"{format_count(examples)}\nexamples", "at the\nend"]
    rows = [
        [label, *map(_number, (line.loss_at(end_s), line.loss_at(examples=examples), line.loss_at()))]
        for label, line in zip(labels, comparisons, strict=True)
    ]
    if target is not None:
        columns += [f"s to\n{target:g}", "examples"]
        for row, comparison in zip(rows, comparisons, strict=True):
            reached = comparison.reached(target)
            row += ["-", "-"] if reached is None else [f"{reached[0]:.2f}", f"{reached[1]:,}"]
    for row, comparison in zip(rows, comparisons, strict=True):
        row.append(draw_curve(comparison.losses(), min(known), max(known)))
    note = f"losses are means of the last tenth of the steps; bars from {min(known):.3g} to {max(known):.3g}"
    return [steps, PageTable(title="Loss", columns=[*columns, "by step"], rows=rows, note=note)]


def show_comparisons(console: Console, comparisons: Sequence[StepComparison], target: float | None) -> None:
    """Print the tables, with a curve of the loss under each strategy."""
    for page in tables_of(comparisons, target):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for number, name in enumerate(page.columns):
            table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
        for row in page.rows:
            table.add_row(*row)
        console.print(table)
        console.print(f"{page.note}\n")


def page_of(comparisons: Sequence[StepComparison], target: float | None) -> list[Plot | PageTable]:
    """Return the sections of the report: the tables, and the loss against time and examples."""
    sections: list[Plot | PageTable] = [*tables_of(comparisons, target)]
    for title, is_time in (("Loss against time", True), ("Loss against examples", False)):
        series = [
            _loss_series(comparison, number, is_time=is_time)
            for number, comparison in enumerate(comparisons)
            if comparison.losses()
        ]
        if series:
            label = "seconds" if is_time else "examples of all ranks"
            sections.append(Plot(title=title, x_label=label, series=series, format="number"))
    return sections


def _loss_series(comparison: StepComparison, number: int, *, is_time: bool) -> Series:
    """Return the means of consecutive losses: at most 100 points."""
    losses = comparison.losses()
    bounds = _bounds(len(losses), _PLOT_POINTS)
    ends_s = comparison.records[0].ends_s
    return Series(
        name=comparison.prediction.candidate.label,
        x=[ends_s[end - 1] if is_time else end * comparison.batch_size for _, end in bounds],
        y=[statistics.fmean(losses[begin:end]) for begin, end in bounds],
        color=number,
    )


def _bounds(count: int, parts: int) -> list[tuple[int, int]]:
    bounds = [round(count * part / parts) for part in range(parts + 1)]
    return [(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin]


def draw_curve(values: Sequence[float], low: float, high: float) -> str:
    """Return a line of bars with the means of consecutive values, between `low` and `high`."""
    means = [statistics.fmean(values[begin:end]) for begin, end in _bounds(len(values), _CURVE_CELLS)]
    return draw_bars(means, low, high)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:#.4g}"

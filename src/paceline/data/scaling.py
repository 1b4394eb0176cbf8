"""How the numbers of a column are brought to a common scale, found from rows spread over the files.

Gradients of a linear model are proportional to its features' values, so columns of thousands and of thousandths would
need learning rates of their own. A missing number is left out of its row, which is the mean of a standardised column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.data.dialect import is_missing, is_number
from paceline.data.one_column import Doubles, line_loss
from paceline.errors import UsageError

NUMERIC_SCALES = ("auto", "standard", "log", "none")
_HEAVY = 10.0  # the largest of 20,000 exponential variables lies 9 deviations above the mean
_LEAST_ROWS = 20
_EVIDENCE = 2.0  # nats: one scale is e^2 times as likely as the other


@dataclass(frozen=True, slots=True)
class Scale:
    """x becomes (x - mean) / deviation; with `log`, sign(x) log(1 + |x|) takes the place of x."""

    log: bool
    mean: float
    deviation: float

    def as_array(self) -> npt.NDArray[np.float64]:
        """As the kernels take it."""
        return np.array([float(self.log), self.mean, self.deviation])

    def describe(self) -> str:
        """Return the scale for people."""
        return f"{'log, ' if self.log else ''}mean {self.mean:.4g}, deviation {self.deviation:.4g}"


def check_numeric_scale(how: str) -> None:
    """Raise UsageError unless `how` is one of :data:`NUMERIC_SCALES`."""
    if how not in NUMERIC_SCALES:
        raise UsageError(f"numeric scale {how!r}: expected one of {', '.join(NUMERIC_SCALES)}")


def fit_scale(cells: Iterable[str], how: str = "auto", labels: Doubles | None = None) -> Scale:
    """Return the scale of a column by some of its cells; `how` is ``auto``, ``standard`` or ``log``.

    ``auto`` takes logarithms if they explain the `labels` (float64, one for each cell; NaN where there is none) better
    by 2 / rows nats a row or more, and not if they explain them worse by as much. Otherwise, and without labels, it
    takes them if a value lies more than 10 deviations from the mean, and less than half as many after logarithms.
    """
    cells = list(cells)
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell) and is_number(cell)]
    rows = [row for row in rows if math.isfinite(float(cells[row]))]
    numbers = [float(cells[row]) for row in rows]
    logs = [math.copysign(math.log1p(abs(number)), number) for number in numbers]
    plain, farthest = _standardise(numbers)
    logged, farthest_log = _standardise(logs)
    if how == "auto":
        known = None if labels is None else labels[rows]
        takes_logs = _explained_better(np.array(numbers), np.array(logs), known)
        if takes_logs is None:
            takes_logs = farthest > max(_HEAVY, 2 * farthest_log)
    else:
        takes_logs = how == "log"
    return Scale(True, *logged) if takes_logs else Scale(False, *plain)


def _explained_better(numbers: Doubles, logs: Doubles, labels: Doubles | None) -> bool | None:
    """Return whether logarithms explain labels better; None if both do about alike."""
    if labels is None:
        return None
    known = np.isfinite(labels)
    if known.sum() < _LEAST_ROWS:
        return None
    numbers, logs, labels = numbers[known], logs[known], labels[known]
    better = line_loss(numbers, labels) - line_loss(logs, labels)
    return None if abs(better) * len(labels) < _EVIDENCE else better > 0


def _standardise(numbers: list[float]) -> tuple[tuple[float, float], float]:
    """Mean and deviation, and how many deviations the farthest number is from the mean; exact, so alike everywhere."""
    if not numbers:
        return (0.0, 1.0), 0.0
    mean = math.fsum(number / len(numbers) for number in numbers)
    distances = [number - mean for number in numbers]
    farthest = max(map(abs, distances))
    if not farthest > 1e-12 * abs(mean):  # a constant column
        return (mean, 1.0), 0.0
    deviation = farthest * math.sqrt(math.fsum((each / farthest) ** 2 for each in distances) / len(numbers))
    return (mean, deviation), farthest / deviation

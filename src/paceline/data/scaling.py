"""How the numbers of a column are brought to a common scale, found from rows spread over the files.

Gradients of a linear model are proportional to its features' values, so columns of thousands and of thousandths would
need learning rates of their own. A missing number is left out of its row, which is the mean of a standardised column.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.data.dialect import is_missing, is_number
from paceline.data.one_column import Doubles, line_loss
from paceline.errors import UsageError
from paceline.kernels.text.reference import MAX_FLOAT32

NUMERIC_SCALES = ("auto", "standard", "log", "none")
_HEAVY = 10.0  # the largest of 20,000 exponential variables lies 9 deviations above the mean
_LEAST_ROWS = 20
_FAR = 1000.0  # deviations from 0, where float32 has 14 bits left for one
_EVIDENCE = 2.0  # nats: one scale is e^2 times as likely as the other
_UNIT_SHARES = (0.5, 0.01)  # of the sizes other than 0 that are smaller than a unit


@dataclass(frozen=True, slots=True)
class Scale:
    """x becomes (x - mean) / deviation; with a `unit` u, sign(x) log(1 + |x|/u) takes the place of x.

    Values below u are spread as they are then, and those above by their ratios. Numbers are rounded to float32 before
    that, less `centre`: of those that lie close together and far from 0, as times do, it is in their midst.
    """

    unit: float
    """0 where no logarithms are taken."""
    mean: float
    deviation: float
    centre: float = 0.0

    @property
    def centring(self) -> Scale:
        """What takes the centre from numbers, and leaves them as they are then."""
        return Scale(0.0, 0.0, 0.0, self.centre)

    def as_array(self) -> Doubles:
        """As the kernels take it."""
        return np.array([self.unit, self.mean, self.deviation, self.centre])

    def describe(self) -> str:
        """Return the scale for people."""
        logs = "" if not self.unit else "log, " if self.unit == 1 else f"log of 1 + x/{self.unit:.3g}, "
        return f"{logs}mean {self.mean:.4g}, deviation {self.deviation:.4g}"


def check_numeric_scale(how: str) -> None:
    """Raise UsageError unless `how` is one of :data:`NUMERIC_SCALES`."""
    if how not in NUMERIC_SCALES:
        raise UsageError(f"numeric scale {how!r}: expected one of {', '.join(NUMERIC_SCALES)}")


def fit_scale(cells: Iterable[str], how: str = "auto", labels: Doubles | None = None) -> Scale:
    """Return the scale of a column by some of its cells; `how` is ``auto``, ``standard`` or ``log``.

    ``auto`` takes logarithms if they explain the `labels` (float64, one for each cell; NaN where there is none) better
    by 2 / rows nats a row or more, and not if they explain them worse by as much. Otherwise, and without labels, it
    takes them if a value lies more than 10 deviations from the mean, and less than half as many after logarithms.

    The unit of logarithms is 1 for whole numbers. For others half of the sizes lie below it, or a hundredth of them:
    whichever explains the labels better; half of them without labels.
    """
    cells = list(cells)
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell) and is_number(cell)]
    rows = [row for row in rows if math.isfinite(float(cells[row]))]
    numbers = np.array([float(cells[row]) for row in rows])
    known = None if labels is None else labels[rows]
    if known is not None and np.isfinite(known).sum() < _LEAST_ROWS:
        known = None
    (mean, deviation), farthest = _standardise(numbers.tolist())
    centre = float(np.float32(mean)) if _FAR * deviation < abs(mean) <= MAX_FLOAT32 else 0.0
    plain = Scale(0.0, mean, deviation, centre)
    if how == "standard":
        return plain
    units = _units(numbers)
    losses = [_loss_of_logs(numbers, unit, known) for unit in units]
    logs = signed_logs(numbers, unit := units[int(np.argmin(losses))])
    (mean, deviation), farthest_log = _standardise(logs.tolist())
    logged = Scale(unit, mean, deviation, centre)
    if how == "log":
        return logged
    if known is not None:
        better = _line_loss(numbers, known) - min(losses)
        if abs(better) * np.isfinite(known).sum() >= _EVIDENCE:
            return logged if better > 0 else plain
    return logged if farthest > max(_HEAVY, 2 * farthest_log) else plain


def signed_logs(numbers: Doubles, unit: float) -> Doubles:
    """Return sign(x) log(1 + |x| / unit) of each number."""
    logs: Doubles = np.copysign(np.log1p(np.abs(numbers) / unit), numbers)
    return logs


def _units(numbers: Doubles) -> list[float]:
    """Return units that logarithms may have, the likeliest first."""
    sizes = np.abs(numbers[numbers != 0])
    if not len(sizes) or (numbers == np.rint(numbers)).all():
        return [1.0]
    found = [float(np.quantile(sizes, share, method="lower")) for share in _UNIT_SHARES]
    return [float(f"{unit:.3g}") or sys.float_info.min for unit in found]


def _loss_of_logs(numbers: Doubles, unit: float, labels: Doubles | None) -> float:
    return 0.0 if labels is None else _line_loss(signed_logs(numbers, unit), labels)


def _line_loss(numbers: Doubles, labels: Doubles) -> float:
    known = np.isfinite(labels)
    return line_loss(numbers[known], labels[known])


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

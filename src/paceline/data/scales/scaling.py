"""How the numbers of a column are brought to a common scale, or cut into bins, found from rows spread over the files.

Gradients of a linear model are proportional to its features' values, so columns of thousands and of thousandths would
need learning rates of their own. A missing number is left out of its row, which is the mean of a standardised column.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.data.dialect import is_missing, is_number
from paceline.data.scales.bins import MAX_BINS, bins_of, log_edges, quantile_edges
from paceline.data.scales.one_column import Doubles, line_loss, table_loss
from paceline.errors import UsageError
from paceline.kernels.text.values import MAX_FLOAT32

NUMERIC_SCALES = ("auto", "standard", "log", "log-bins", "none")
"""The ways that need no number; ``quantile:N`` is another."""
KEPT_SCALES = ("auto", "standard", "log", "log-bins")
"""Those that converted data keeps beside its numbers."""
_QUANTILES = re.compile(r"quantile:([0-9]{1,9})")
TRIED_BINS = (8, 16, 32, 64)
"""How many bins by quantiles are tried."""
_USUAL_BINS = TRIED_BINS[:3]
_BENT = 10.0  # nats: bins of a column whose effect is a line seldom explain more by so much
_HEAVY = 10.0  # the largest of 20,000 exponential variables lies 9 deviations above the mean
_LEAST_ROWS = 20
_FAR = 1000.0  # deviations from 0, where float32 has 14 bits left for one
_EVIDENCE = 2.0  # nats: one scale is e^2 times as likely as the other
_UNIT_SHARES = (0.5, 0.01)  # of the sizes other than 0 that are smaller than a unit


@dataclass(frozen=True, slots=True)
class Scale:
    """x becomes (x - mean) / deviation; with a `unit` u, sign(x) log(1 + |x|/u) takes the place of x.

    Where the deviation is 0 numbers stay as they are, and with `edges` they become categories after that.
    Values below u are spread as they are then, and those above by their ratios. Numbers are rounded to float32 before
    that, less `centre`: of those that lie close together and far from 0, as times do, it is in their midst.
    """

    unit: float
    """0 where no logarithms are taken."""
    mean: float
    deviation: float
    centre: float = 0.0
    edges: tuple[float, ...] = ()
    """Where bins after the first begin, of numbers less `centre` as float32, which are categories then."""

    @classmethod
    def from_fields(cls, fields: Sequence[Any]) -> Scale:
        """The scale that :meth:`to_fields` described. Raises TypeError and ValueError."""
        unit, mean, deviation, *others = fields
        centre, edges = (*others, ()) if len(others) == 1 else others or (0.0, ())
        return cls(float(unit), float(mean), float(deviation), float(centre), tuple(map(float, edges)))

    def to_fields(self) -> list[Any]:
        """This scale as JSON and msgpack can carry it."""
        fields: list[Any] = [self.unit, self.mean, self.deviation]
        if self.centre or self.edges:
            fields.append(self.centre)
        return [*fields, list(self.edges)] if self.edges else fields

    @property
    def centring(self) -> Scale:
        """What takes the centre from numbers, and leaves them as they are then."""
        return Scale(0.0, 0.0, 0.0, self.centre)

    def centred_at(self, centre: float) -> Scale:
        """Return this scale of numbers from which another centre is taken."""
        if centre == self.centre:
            return self
        edges = np.unique((np.array(self.edges) + (self.centre - centre)).astype(np.float32))
        return replace(self, centre=centre, edges=tuple(edges.tolist()))

    def as_array(self) -> Doubles:
        """As the kernels take it."""
        return np.array([self.unit, self.mean, self.deviation, self.centre])

    def describe(self) -> str:
        """Return the scale for people."""
        if self.edges:
            first, last = self.edges[0] + self.centre, self.edges[-1] + self.centre
            return f"{len(self.edges) + 1} bins, below {first:.4g} to {last:.4g} and above"
        logs = "" if not self.unit else "log, " if self.unit == 1 else f"log of 1 + x/{self.unit:.3g}, "
        return f"{logs}mean {self.mean:.4g}, deviation {self.deviation:.4g}"


def check_numeric_scale(how: str) -> None:
    """Raise UsageError unless `how` is one of :data:`NUMERIC_SCALES`, or ``quantile:N``."""
    found = _QUANTILES.fullmatch(how)
    if found is not None and not 2 <= int(found[1]) <= MAX_BINS:
        raise UsageError(f"numeric scale {how!r}: expected 2 to {MAX_BINS:,} bins")
    if how not in NUMERIC_SCALES and found is None:
        raise UsageError(f"numeric scale {how!r}: expected one of {', '.join(NUMERIC_SCALES)}, or quantile:N")


def fit_scale(cells: Iterable[str], how: str = "auto", labels: Doubles | None = None) -> Scale:
    """Return the scale of a column by some of its cells; `how` as :func:`check_numeric_scale` has it, but ``none``.

    ``quantile:N`` cuts the numbers into N bins, ``log-bins`` into those of their logarithms (:mod:`.bins`). ``auto``
    takes bins by quantiles, 8, 16 or 32, if a rate (a mean) in each of them explains the `labels` (float64, one for
    each cell; NaN where there is none) better than a line does by more than 10 / rows nats a row, each bin beyond the
    first costing 1 / rows.

    Otherwise ``auto`` takes logarithms if they explain the labels better by 2 / rows nats a row or more, and not if
    they explain them worse by as much. In between, and without labels, it takes them if a value lies more than 10
    deviations from the mean, and less than half as many after logarithms.

    The unit of logarithms is 1 for whole numbers. For others half of the sizes lie below it, or a hundredth of them:
    whichever explains the labels better; half of them without labels. For bins it is the smaller.
    """
    cells = list(cells)
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell) and is_number(cell)]
    rows = [row for row in rows if math.isfinite(float(cells[row]))]
    return fit_numbers(np.array([float(cells[row]) for row in rows]), how, None if labels is None else labels[rows])


def fit_numbers(numbers: Doubles, how: str, known: Doubles | None = None) -> Scale:
    """Return what :func:`fit_scale` does of numbers, finite float64 all, whose labels are `known`, or None."""
    if how == "auto":
        return explain_numbers(numbers, known).usual
    plain, _ = _standard_scale(numbers)
    if how == "standard":
        return plain
    if how == "log-bins":
        return _binned(plain, log_edges(numbers - plain.centre, min(_units(numbers))))
    if found := _QUANTILES.fullmatch(how):
        return _binned(plain, quantile_edges(numbers - plain.centre, int(found[1])))
    return _log_scale(numbers, plain.centre, _known(known))[0]


@dataclass(frozen=True, slots=True)
class ExplainedNumbers:
    """A column's numbers on the scale that suits a line, and cut into bins; and what each explains of the labels."""

    plain: Scale
    line: Scale
    """That, or of logarithms."""
    bins: tuple[Scale, ...]
    """Of :data:`TRIED_BINS` by quantiles; a line's scale where all numbers are alike, or labels not known."""
    gains: tuple[float, ...]
    """By how many nats in all each of the bins explains the labels better than a line, each bin costing one; -inf
    where labels are not known."""

    @property
    def usual(self) -> Scale:
        """The scale that ``auto`` takes of this column by itself."""
        best = max(range(len(_USUAL_BINS)), key=lambda place: self.gains[place])
        return self.bins[best] if self.gains[best] > _BENT else self.line


def explain_numbers(numbers: Doubles, known: Doubles | None, chance: float = 0.0) -> ExplainedNumbers:
    """Return how numbers, finite float64 all, explain the labels `known` (NaN where there is none), or None.

    `chance` is by how many nats logarithms of one column among many explain more by chance.
    """
    known = _known(known)
    plain, farthest = _standard_scale(numbers)
    logged, farthest_log, loss_of_logs = _log_scale(numbers, plain.centre, known)
    has_long_tail = farthest > max(_HEAVY, 2 * farthest_log)
    if known is None:
        line = logged if has_long_tail else plain
        return ExplainedNumbers(plain, line, (line,) * len(TRIED_BINS), (-math.inf,) * len(TRIED_BINS))
    bins = tuple(_binned(plain, quantile_edges(numbers - plain.centre, each)) for each in TRIED_BINS)
    loss, num_known = _line_loss(numbers, known), int(np.isfinite(known).sum())
    better = (loss - loss_of_logs) * num_known
    line = (
        (logged if better > 0 else plain) if abs(better) >= _EVIDENCE + chance else logged if has_long_tail else plain
    )
    best = min(loss, loss_of_logs)
    return ExplainedNumbers(
        plain, line, bins, tuple((best - _table_loss(numbers - plain.centre, each, known)) * num_known for each in bins)
    )


def _known(labels: Doubles | None) -> Doubles | None:
    return None if labels is None or np.isfinite(labels).sum() < _LEAST_ROWS else labels


def _standard_scale(numbers: Doubles) -> tuple[Scale, float]:
    """Return the scale of a line, and how many deviations the farthest number is from the mean."""
    (mean, deviation), farthest = _standardise(numbers.tolist())
    centre = float(np.float32(mean)) if _FAR * deviation < abs(mean) <= MAX_FLOAT32 else 0.0
    return Scale(0.0, mean, deviation, centre), farthest


def _log_scale(numbers: Doubles, centre: float, known: Doubles | None) -> tuple[Scale, float, float]:
    """Return the scale of logarithms, how far the farthest is from their mean in deviations, and a line's loss."""
    units = _units(numbers)
    losses = [0.0 if known is None else _line_loss(signed_logs(numbers, unit), known) for unit in units]
    unit = units[int(np.argmin(losses))]
    (mean, deviation), farthest = _standardise(signed_logs(numbers, unit).tolist())
    return Scale(unit, mean, deviation, centre), farthest, min(losses)


def _binned(plain: Scale, edges: tuple[float, ...]) -> Scale:
    """Return a scale with bins; the plain one where all numbers are alike."""
    return Scale(0.0, 0.0, 0.0, plain.centre, edges) if edges else plain


def _table_loss(numbers: Doubles, scale: Scale, labels: Doubles) -> float:
    """Return what :func:`table_loss` says of bins; infinity where there are none."""
    known = np.isfinite(labels)
    return table_loss(bins_of(numbers[known], scale.edges), labels[known]) if scale.edges else math.inf


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

"""Choose the scale or the bins of a column's numbers, using rows spread over the files.

Gradients of a linear model are proportional to the features' values, so columns of thousands and of thousandths would
need different learning rates. A row lacks the feature of a missing number, which therefore counts as the mean of a
standardized column.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.data.batch import Batch
from paceline.data.dialect import is_missing, is_number
from paceline.data.scales.bins import MAX_BINS, ColumnBins, bins_of, log_edges, quantile_edges
from paceline.data.scales.one_column import Doubles, line_loss, table_loss
from paceline.errors import UsageError
from paceline.kernels.hashing import name_seed
from paceline.kernels.text.values import MAX_FLOAT32

NUMERIC_SCALES = ("auto", "standard", "log", "log-bins", "none")
"""The methods without a parameter; ``quantile:N`` is the method with a parameter."""
KEPT_SCALES = ("auto", "standard", "log", "log-bins")
"""The methods whose scales are stored in converted data."""
_QUANTILES = re.compile(r"quantile:([0-9]{1,9})")
TRIED_BINS = (8, 16, 32, 64)
_USUAL_BINS = TRIED_BINS[:3]
_NONLINEAR = 10.0  # nats: if the effect is linear, bins seldom explain more than a line by this
_HEAVY = 10.0  # deviations; the largest of 20,000 exponential variables is 9 above the mean
_LEAST_ROWS = 20
_FAR = 1000.0  # deviations from 0; float32 then has 14 bits for a deviation
_EVIDENCE = 2.0  # nats: one scale is e^2 times as likely as another
_UNIT_SHARES = (0.5, 0.01)  # candidates for the fraction of nonzero magnitudes below a unit


@dataclass(frozen=True, slots=True)
class Scale:
    """x becomes (x - mean) / deviation; with a `unit` u, sign(x) log(1 + |x|/u) replaces x.

    If the deviation is 0, numbers do not change. With `edges`, numbers become categories. First `centre` is subtracted,
    and the result is rounded to float32. The centre is in the middle of numbers that are far from 0 but close together,
    such as times.
    """

    unit: float
    """0 for no logarithms. Otherwise the scale is nearly linear for numbers below the unit, and logarithmic above."""
    mean: float
    deviation: float
    centre: float = 0.0
    edges: tuple[float, ...] = ()
    """Lower bounds of all bins except the first, for numbers minus `centre` (float32); empty without bins."""

    @classmethod
    def from_fields(cls, fields: Sequence[Any]) -> Scale:
        """Create the scale from :meth:`to_fields`. Raises TypeError and ValueError."""
        unit, mean, deviation, *optional = fields
        centre, edges = (*optional, ()) if len(optional) == 1 else optional or (0.0, ())
        return cls(float(unit), float(mean), float(deviation), float(centre), tuple(map(float, edges)))

    def to_fields(self) -> list[Any]:
        """Return the scale as values for JSON and msgpack."""
        fields: list[Any] = [self.unit, self.mean, self.deviation]
        if self.centre or self.edges:
            fields.append(self.centre)
        return [*fields, list(self.edges)] if self.edges else fields

    @property
    def centring(self) -> Scale:
        """The scale that only subtracts the centre."""
        return Scale(0.0, 0.0, 0.0, self.centre)

    def centred_at(self, centre: float) -> Scale:
        """Return the equivalent scale with another centre."""
        if centre == self.centre:
            return self
        edges = np.unique((np.array(self.edges) + (self.centre - centre)).astype(np.float32))
        return replace(self, centre=centre, edges=tuple(edges.tolist()))

    def as_array(self) -> Doubles:
        """Return the scale as an argument of kernels."""
        return np.array([self.unit, self.mean, self.deviation, self.centre])

    def describe(self) -> str:
        """Return the scale as text."""
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
    """Choose the scale of a column, given a sample of its cells. `how` is any method except ``none``.

    ``quantile:N`` divides the numbers into N bins, ``log-bins`` into bins of their logarithms (:mod:`.bins`). ``auto``
    may choose 8, 16 or 32 quantile bins. It does so if a rate (a mean) per bin explains the `labels` (float64, one per
    cell; NaN if missing) better than a line by more than 10 / rows nats per row, with a penalty of 1 / rows for each
    bin beyond the first.

    Otherwise ``auto`` chooses logarithms if they explain the labels better by at least 2 / rows nats per row, and
    rejects them if they are worse by as much. In between, and without labels, it chooses logarithms if a value is more
    than 10 deviations from the mean, and less than half as many after logarithms.

    The unit of logarithms is 1 for integers. Otherwise a half or a hundredth of the magnitudes are below it, depending
    on which explains the labels better; without labels it is a half. Bins use the smaller unit.
    """
    cells = list(cells)
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell) and is_number(cell)]
    rows = [row for row in rows if math.isfinite(float(cells[row]))]
    return fit_numbers(np.array([float(cells[row]) for row in rows]), how, None if labels is None else labels[rows])


def fit_numbers(numbers: Doubles, how: str, known: Doubles | None = None) -> Scale:
    """Do the same as :func:`fit_scale` for finite float64 numbers. `known` are their labels, or None."""
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
    """The scales and bins of a column's numbers, and their fit to the labels."""

    plain: Scale
    line: Scale
    """The better scale for a line: plain or logarithmic."""
    bins: tuple[Scale, ...]
    """Quantile bins for each of :data:`TRIED_BINS`; the line's scale if numbers are equal or labels unknown."""
    gains: tuple[float, ...]
    """The total gain in nats of each number of bins over a line, minus one per bin; -inf if labels are unknown."""

    @property
    def usual(self) -> Scale:
        """The choice of ``auto`` if this column is considered alone."""
        best = max(range(len(_USUAL_BINS)), key=lambda place: self.gains[place])
        return self.bins[best] if self.gains[best] > _NONLINEAR else self.line


def explain_numbers(numbers: Doubles, known: Doubles | None, chance: float = 0.0) -> ExplainedNumbers:
    """Return the scales of numbers (finite float64) and their fit to labels (`known`: NaN if missing; None: no labels).

    `chance` is the gain in nats that logarithms of one among many columns may have by chance.
    """
    known = _known(known)
    plain, farthest = _standard_scale(numbers)
    logged, farthest_log, loss_of_logs = _log_scale(numbers, plain.centre, known)
    has_long_tail = farthest > max(_HEAVY, 2 * farthest_log)
    if known is None:
        line = logged if has_long_tail else plain
        return ExplainedNumbers(plain, line, (line,) * len(TRIED_BINS), (-math.inf,) * len(TRIED_BINS))
    bins = tuple(_binned(plain, quantile_edges(numbers - plain.centre, num_bins)) for num_bins in TRIED_BINS)
    loss, num_known = _line_loss(numbers, known), int(np.isfinite(known).sum())
    better = (loss - loss_of_logs) * num_known
    line = (
        (logged if better > 0 else plain) if abs(better) >= _EVIDENCE + chance else logged if has_long_tail else plain
    )
    best = min(loss, loss_of_logs)
    return ExplainedNumbers(
        plain,
        line,
        bins,
        tuple((best - _table_loss(numbers - plain.centre, scale, known)) * num_known for scale in bins),
    )


def _known(labels: Doubles | None) -> Doubles | None:
    return None if labels is None or np.isfinite(labels).sum() < _LEAST_ROWS else labels


def _standard_scale(numbers: Doubles) -> tuple[Scale, float]:
    """Return the standard scale, and the largest distance of a number from the mean, in deviations."""
    (mean, deviation), farthest = _standardise(numbers.tolist())
    centre = float(np.float32(mean)) if _FAR * deviation < abs(mean) <= MAX_FLOAT32 else 0.0
    return Scale(0.0, mean, deviation, centre), farthest


def _log_scale(numbers: Doubles, centre: float, known: Doubles | None) -> tuple[Scale, float, float]:
    """Return the logarithmic scale, the largest distance from its mean in deviations, and a line's loss."""
    units = _units(numbers)
    losses = [0.0 if known is None else _line_loss(signed_logs(numbers, unit), known) for unit in units]
    unit = units[int(np.argmin(losses))]
    (mean, deviation), farthest = _standardise(signed_logs(numbers, unit).tolist())
    return Scale(unit, mean, deviation, centre), farthest, min(losses)


def _binned(plain: Scale, edges: tuple[float, ...]) -> Scale:
    """Return a scale with bins; the plain scale if all numbers are equal."""
    return Scale(0.0, 0.0, 0.0, plain.centre, edges) if edges else plain


def _table_loss(numbers: Doubles, scale: Scale, labels: Doubles) -> float:
    known = np.isfinite(labels)
    return table_loss(bins_of(numbers[known], scale.edges), labels[known]) if scale.edges else math.inf


def signed_logs(numbers: Doubles, unit: float | Doubles) -> Doubles:
    logs: Doubles = np.copysign(np.log1p(np.abs(numbers) / unit), numbers)
    return logs


def _units(numbers: Doubles) -> list[float]:
    """Return candidates for the unit of logarithms, the most likely first."""
    sizes = np.abs(numbers[numbers != 0])
    if not len(sizes) or (numbers == np.rint(numbers)).all():
        return [1.0]
    found = [float(np.quantile(sizes, share, method="lower")) for share in _UNIT_SHARES]
    return [float(f"{unit:.3g}") or sys.float_info.min for unit in found]


def _line_loss(numbers: Doubles, labels: Doubles) -> float:
    known = np.isfinite(labels)
    return line_loss(numbers[known], labels[known])


def _standardise(numbers: list[float]) -> tuple[tuple[float, float], float]:
    """Return mean, deviation, and the largest distance from the mean in deviations, from exact sums."""
    if not numbers:
        return (0.0, 1.0), 0.0
    mean = math.fsum(number / len(numbers) for number in numbers)
    distances = [number - mean for number in numbers]
    farthest = max(map(abs, distances))
    if not farthest > 1e-12 * abs(mean):  # a constant column
        return (mean, 1.0), 0.0
    deviation = farthest * math.sqrt(math.fsum((distance / farthest) ** 2 for distance in distances) / len(numbers))
    return (mean, deviation), farthest / deviation


class ColumnScaling:
    """Scales and bins of the numeric columns `names`. The reader has subtracted the `centres` from the numbers."""

    def __init__(
        self, names: Sequence[str], centres: Sequence[float], scales: Sequence[Scale], bins: ColumnBins | None = None
    ) -> None:
        from paceline.kernels.features.scaling import scale_columns

        self._scale_columns = scale_columns
        self._seeds = np.array([name_seed(name) for name in names], np.uint64)
        self._centres = np.array(centres, np.float64)
        self._scales = np.array([scale.as_array() for scale in scales]).T.copy()
        self._bins = bins

    def apply(self, batch: Batch) -> Batch:
        return self.apply_in_place(batch.copy())

    def apply_in_place(self, batch: Batch) -> Batch:
        """Scale the values of the batch in place, and return the rows with bins in place of numbers."""
        if batch.values is None or not len(self._seeds):
            return batch
        self._scale_columns(batch.indptr, batch.keys, batch.values, self._seeds, self._centres, self._scales)
        return batch if self._bins is None else self._bins.apply(batch)

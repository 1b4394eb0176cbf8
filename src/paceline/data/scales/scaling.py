"""Choose the scale or the bins of a column's numbers, using rows spread over the files.

Gradients of a linear model are proportional to the features' values, so columns of thousands and of thousandths would
need different learning rates. If a row has no number, it lacks the feature. In a standardized column, this has the same
effect as the mean.
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
_NONLINEAR = 10.0  # nats: if the effect is linear, bins are rarely better than a line by this amount
_HEAVY = 10.0  # deviations: the largest of 20,000 exponential variables is 9 deviations above the mean
_LEAST_ROWS = 20
_FAR = 1000.0  # a mean of this many deviations leaves float32 14 bits for one deviation
_EVIDENCE = 2.0  # nats: the better scale is e^2 times as likely
_UNIT_SHARES = (0.5, 0.01)  # candidates for the fraction of nonzero magnitudes below a unit


@dataclass(frozen=True, slots=True)
class Scale:
    """x becomes (x - mean) / deviation. If `unit` is not 0, x is first replaced by sign(x) log(1 + |x| / unit).

    If the deviation is 0, numbers do not change. If there are `edges`, numbers become categories. The reader subtracts
    `centre` from a number before it rounds the number to float32. The centre is the mean of numbers that are far from 0
    but close together, such as times; otherwise it is 0.
    """

    unit: float
    """0: no logarithms. Otherwise the scale is nearly linear for numbers below the unit, and logarithmic above."""
    mean: float
    deviation: float
    centre: float = 0.0
    edges: tuple[float, ...] = ()
    """Lower bounds (float32) of all bins except the first, minus `centre`; empty if there are no bins."""

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
        """Return the scale as an array for kernels."""
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
    may choose 8, 16 or 32 quantile bins. It does so if a model with a rate per bin explains the `labels` (float64, one
    per cell; NaN if missing) better than a line. The difference must exceed 10 / rows nats per row, after a penalty of
    1 / rows for each bin beyond the first.

    Otherwise ``auto`` compares lines with and without logarithms, and chooses the better one if the difference is at
    least 2 / rows nats per row. If the difference is smaller, or if there are no labels, it chooses logarithms for long
    tails: the farthest value is more than 10 deviations from the mean, and less than half as many after logarithms.

    For integers, the unit of logarithms is 1. For other numbers, half or a hundredth of the magnitudes are below the
    unit: the fraction that explains the labels better, or half if there are no labels. ``log-bins`` uses the smaller
    unit.
    """
    cells = list(cells)
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell) and is_number(cell)]
    rows = [row for row in rows if math.isfinite(float(cells[row]))]
    return fit_numbers(np.array([float(cells[row]) for row in rows]), how, None if labels is None else labels[rows])


def fit_numbers(numbers: Doubles, how: str, known: Doubles | None = None) -> Scale:
    """Choose the scale as :func:`fit_scale` does, for finite float64 numbers. `known` are their labels, or None."""
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
    """Candidates for the scale and the bins of a column's numbers, fitted to the labels."""

    plain: Scale
    line: Scale
    """The scale on which a line fits better: plain or logarithmic."""
    bins: tuple[Scale, ...]
    """Quantile bins for each of :data:`TRIED_BINS`; `line` if all numbers are equal or labels are unknown."""
    gains: tuple[float, ...]
    """For each number of bins, the total gain over a line in nats, minus one per bin; -inf if labels are unknown."""

    @property
    def usual(self) -> Scale:
        """The choice of ``auto``, which ignores other columns."""
        best = max(range(len(_USUAL_BINS)), key=lambda place: self.gains[place])
        return self.bins[best] if self.gains[best] > _NONLINEAR else self.line


def explain_numbers(numbers: Doubles, known: Doubles | None, chance: float = 0.0) -> ExplainedNumbers:
    """Return the candidates for finite float64 numbers. `known` are their labels (NaN: missing), or None.

    `chance` is the gain in nats by which the best of many columns may be better with logarithms by chance.
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
    """Return the standard scale, and the distance of the farthest number from the mean, in deviations."""
    (mean, deviation), farthest = _standardise(numbers.tolist())
    centre = float(np.float32(mean)) if _FAR * deviation < abs(mean) <= MAX_FLOAT32 else 0.0
    return Scale(0.0, mean, deviation, centre), farthest


def _log_scale(numbers: Doubles, centre: float, known: Doubles | None) -> tuple[Scale, float, float]:
    """Return the logarithmic scale, the farthest logarithm's distance from the mean in deviations, and the loss."""
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
    """Return candidates for the unit of logarithms. The most likely unit comes first."""
    sizes = np.abs(numbers[numbers != 0])
    if not len(sizes) or (numbers == np.rint(numbers)).all():
        return [1.0]
    found = [float(np.quantile(sizes, share, method="lower")) for share in _UNIT_SHARES]
    return [float(f"{unit:.3g}") or sys.float_info.min for unit in found]


def _line_loss(numbers: Doubles, labels: Doubles) -> float:
    known = np.isfinite(labels)
    return line_loss(numbers[known], labels[known])


def _standardise(numbers: list[float]) -> tuple[tuple[float, float], float]:
    """Return mean and deviation, from exact sums, and the farthest number's distance from the mean in deviations."""
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
        """Scale the batch's values in place. Return the rows, with bins instead of numbers."""
        if batch.values is None or not len(self._seeds):
            return batch
        self._scale_columns(batch.indptr, batch.keys, batch.values, self._seeds, self._centres, self._scales)
        return batch if self._bins is None else self._bins.apply(batch)

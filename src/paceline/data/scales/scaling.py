"""The scale, or the bins, of the numbers of a column, found on rows spread over the files.

Gradients of a linear model are proportional to its features' values, so columns of thousands and of thousandths would
need different learning rates. A row lacks a missing number, which thus counts as the mean of a standardised column.
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
"""The methods without a parameter; ``quantile:N`` is another one."""
KEPT_SCALES = ("auto", "standard", "log", "log-bins")
"""The methods whose scales converted data stores."""
_QUANTILES = re.compile(r"quantile:([0-9]{1,9})")
TRIED_BINS = (8, 16, 32, 64)
"""The numbers of bins by quantiles that are tried."""
_USUAL_BINS = TRIED_BINS[:3]
_NONLINEAR = 10.0  # nats: bins of a column with a linear effect seldom explain more
_HEAVY = 10.0  # the largest of 20,000 exponential variables lies 9 deviations above the mean
_LEAST_ROWS = 20
_FAR = 1000.0  # deviations from 0: float32 has 14 bits left for a deviation
_EVIDENCE = 2.0  # nats: one scale is e^2 times as likely as the other
_UNIT_SHARES = (0.5, 0.01)  # of the sizes other than 0 that are smaller than a unit


@dataclass(frozen=True, slots=True)
class Scale:
    """x becomes (x - mean) / deviation; with a `unit` u, sign(x) log(1 + |x|/u) replaces x.

    With the deviation 0 numbers are unchanged, and with `edges` they become categories. Numbers are rounded to float32
    first, less `centre`, which is in the middle of numbers that lie close together and far from 0, such as times.
    """

    unit: float
    """0 for no logarithms. Otherwise smaller numbers are nearly linear, and larger ones logarithmic."""
    mean: float
    deviation: float
    centre: float = 0.0
    edges: tuple[float, ...] = ()
    """Lower bounds of all bins but the first, for numbers less `centre` (float32); none without bins."""

    @classmethod
    def from_fields(cls, fields: Sequence[Any]) -> Scale:
        """Return the scale of :meth:`to_fields`. Raises TypeError and ValueError."""
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
    """Return the scale of a column, given a sample of its cells. `how` is a method, but not ``none``.

    ``quantile:N`` cuts the numbers into N bins, ``log-bins`` into bins of their logarithms (:mod:`.bins`). ``auto``
    takes 8, 16 or 32 bins by quantiles if a rate (a mean) per bin explains the `labels` (float64, one per cell; NaN if
    missing) better than a line by more than 10 / rows nats per row, with a penalty of 1 / rows for each bin beyond the
    first.

    Otherwise ``auto`` takes logarithms if they explain the labels better by 2 / rows nats per row or more, and does not
    if they explain them worse by as much. In between, and without labels, it takes them if a value is more than 10
    deviations from the mean, and less than half as many after logarithms.

    The unit of logarithms is 1 for integers. Otherwise half of the magnitudes are below it, or a hundredth of them,
    whichever explains the labels better; half without labels. Bins use the smaller one.
    """
    cells = list(cells)
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell) and is_number(cell)]
    rows = [row for row in rows if math.isfinite(float(cells[row]))]
    return fit_numbers(np.array([float(cells[row]) for row in rows]), how, None if labels is None else labels[rows])


def fit_numbers(numbers: Doubles, how: str, known: Doubles | None = None) -> Scale:
    """Do the same as :func:`fit_scale`, for finite float64 numbers. `known` are their labels, or None."""
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
    """The better scale for a line: the plain one or logarithms."""
    bins: tuple[Scale, ...]
    """Bins by quantiles for each of :data:`TRIED_BINS`; the line's scale for equal numbers, or unknown labels."""
    gains: tuple[float, ...]
    """The total gain in nats of each of the bins over a line, less one per bin; -inf for unknown labels."""

    @property
    def usual(self) -> Scale:
        """The choice of ``auto`` for this column alone."""
        best = max(range(len(_USUAL_BINS)), key=lambda place: self.gains[place])
        return self.bins[best] if self.gains[best] > _NONLINEAR else self.line


def explain_numbers(numbers: Doubles, known: Doubles | None, chance: float = 0.0) -> ExplainedNumbers:
    """Return the fit of numbers (finite float64) to the labels `known` (NaN if missing), or None.

    `chance` is the gain in nats that logarithms of one column among many may have by chance.
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
    """Return the scale for a line, and the distance of the farthest number from the mean, in deviations."""
    (mean, deviation), farthest = _standardise(numbers.tolist())
    centre = float(np.float32(mean)) if _FAR * deviation < abs(mean) <= MAX_FLOAT32 else 0.0
    return Scale(0.0, mean, deviation, centre), farthest


def _log_scale(numbers: Doubles, centre: float, known: Doubles | None) -> tuple[Scale, float, float]:
    """Return the scale of logarithms, the distance of the farthest from their mean in deviations, and a line's loss."""
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
    """Return mean, deviation, and the distance of the farthest number from the mean in deviations.

    Sums are exact, so the result is equal on all machines.
    """
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
    """Scales, and bins, of the numeric columns `names`, whose numbers were read less `centres`."""

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
        """Scale the values of the batch, and return the rows with bins in place of numbers."""
        if batch.values is None or not len(self._seeds):
            return batch
        self._scale_columns(batch.indptr, batch.keys, batch.values, self._seeds, self._centres, self._scales)
        return batch if self._bins is None else self._bins.apply(batch)

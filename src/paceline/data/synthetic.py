"""Generate synthetic click logs of any size from a known model, so that the best possible AUC and log loss are known.

A row has 13 integers and 26 categories, like Criteo's rows. The label is drawn from a logistic model over the features
of :mod:`paceline.data`. A feature's weight is a function of its key. The key of an integer x is that of its category
⌊ln(x)²⌋. A missing value is a category too. No trained model is better than the true probabilities, except by chance.

The same spec gives the same bytes on every machine. Random bits are PCG64's raw output, and rows are looked up in
tables of integers. The tables use only operations that are exact in IEEE 754 or :mod:`decimal`. No kernel is compiled,
so a short log is written quickly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import LENGTH_MULTIPLIER, MASK, hash_bytes, hash_end, hash_word
from paceline.kernels.text.criteo import (
    CRITEO_CATEGORIES,
    CRITEO_FEATURES,
    CRITEO_INTEGERS,
    field_seed,
    integer_category,
)
from paceline.output_files import replacing

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


class _IntegerShape(NamedTuple):
    """A field of integers ⌊exp(N)⌋ + shift, where N is normal with mean ln(median) and deviation `spread`."""

    median: int
    spread: str
    """The standard deviation of the natural logarithm, as text for conversion to Decimal."""
    shift: int
    missing: int
    """The number of rows without the field, per thousand."""
    effect: int
    """The standard deviation of the field's contribution to the logit, in thousandths."""


class _CategoryShape(NamedTuple):
    """A field of categories; the frequency of the k-th category is proportional to 1 / (k + offset)."""

    vocabulary: int
    offset: int
    missing: int
    effect: int


_INTEGERS = (
    _IntegerShape(2, "1.4", 0, 450, 280),
    _IntegerShape(8, "2.0", -3, 0, 240),
    _IntegerShape(7, "1.5", 0, 215, 220),
    _IntegerShape(5, "1.0", 0, 217, 220),
    _IntegerShape(2800, "2.2", 0, 26, 280),
    _IntegerShape(35, "1.8", 0, 223, 300),
    _IntegerShape(4, "1.5", 0, 43, 280),
    _IntegerShape(9, "1.0", 0, 5, 200),
    _IntegerShape(40, "1.5", 0, 43, 220),
    _IntegerShape(1, "0.8", 0, 450, 200),
    _IntegerShape(2, "0.9", 0, 43, 260),
    _IntegerShape(1, "1.0", 0, 765, 140),
    _IntegerShape(5, "1.1", 0, 217, 260),
)

CATEGORIES = (
    _CategoryShape(1_460, 0, 0, 160),
    _CategoryShape(583, 2, 0, 200),
    _CategoryShape(100_000, 1, 34, 80),
    _CategoryShape(60_000, 2, 34, 80),
    _CategoryShape(305, 0, 0, 200),
    _CategoryShape(24, 0, 121, 240),
    _CategoryShape(12_500, 8, 0, 120),
    _CategoryShape(633, 0, 0, 200),
    _CategoryShape(12, 0, 0, 240),
    _CategoryShape(30_000, 4, 0, 80),
    _CategoryShape(5_683, 6, 0, 120),
    _CategoryShape(90_000, 1, 34, 80),
    _CategoryShape(3_194, 6, 0, 160),
    _CategoryShape(27, 1, 0, 240),
    _CategoryShape(14_992, 4, 0, 120),
    _CategoryShape(80_000, 1, 34, 80),
    _CategoryShape(10, 0, 0, 240),
    _CategoryShape(5_652, 4, 0, 120),
    _CategoryShape(2_173, 1, 440, 160),
    _CategoryShape(15, 0, 440, 240),
    _CategoryShape(90_000, 1, 34, 80),
    _CategoryShape(18, 0, 763, 240),
    _CategoryShape(15, 1, 0, 240),
    _CategoryShape(50_000, 2, 34, 80),
    _CategoryShape(105, 1, 440, 200),
    _CategoryShape(40_000, 1, 440, 80),
)

assert (len(_INTEGERS), len(CATEGORIES)) == (CRITEO_INTEGERS, CRITEO_CATEGORIES)

_CHUNK_ROWS = 8192
_PILOT_ROWS = 1 << 15  # weights and intercept are scaled on this number of rows
_TRAIN, _EVAL, _PILOT = range(3)  # streams of random bits
_SEGMENTS = 1 << 16
_UNIT = 256  # units per logit of 1
_MAX_LOGIT = 16 * _UNIT
_ROW_WORDS = 20  # 39 fields and a label, 32 bits each
_TAB, _NEWLINE, _ZERO = 9, 10, 48
_CELL = np.dtype([("text", "<u8"), ("end", "u1")])
assert _CELL.itemsize == 9


@dataclass(frozen=True, kw_only=True)
class ClickLogSpec:
    """Settings of :func:`write_click_log`. The seed determines the model and the categories."""

    rows: int = 1_000_000
    """Rows of the training log. A longer log begins with the rows of a shorter log."""
    eval_rows: int = 100_000
    """Rows of the evaluation file, if there is one."""
    seed: int = 0
    click_share: float = 0.25
    """The mean probability of a click, to within about 1%."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.eval_rows < 1:
            raise UsageError(f"{self.rows} rows and {self.eval_rows} to evaluate: expected at least 1 row per file")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"the seed is {self.seed}: expected an integer from 0 to 2^64-1")
        if not 0.01 <= self.click_share <= 0.99:
            raise UsageError(f"the share of clicks is {self.click_share}: expected 0.01 to 0.99")


@dataclass(frozen=True, kw_only=True)
class ClickLogTruth:
    """Metrics of the true model on the evaluation file, or on the log if there is no evaluation file."""

    best_auc: float
    """The exact AUC of the true probabilities for the drawn labels; NaN if all labels are equal."""
    best_log_loss: float
    """The mean log loss of the true probabilities, in nats."""
    examples: int
    """The number of rows in the evaluated file."""
    clicks: int
    """The number of rows with label 1 in the evaluated file."""


def write_click_log(
    path: str | Path, spec: ClickLogSpec | None = None, *, eval_path: str | Path | None = None
) -> ClickLogTruth:
    """Write a synthetic click log in Criteo's format (tab-separated, about 244 bytes per row, not compressed).

    `path` gets ``spec.rows`` rows. `eval_path`, if given, gets ``spec.eval_rows`` other rows from the same model, and
    the returned truth then describes these rows. A file gets its name when it is complete, and replaces an older file.
    Needs about 50 MB of memory, and two seconds per million rows. Raises DataError if a file cannot be written.
    """
    spec = ClickLogSpec() if spec is None else spec
    if eval_path is not None and os.path.realpath(path) == os.path.realpath(eval_path):
        raise UsageError(f"both files are {path}. Pass another name for the evaluation rows")
    model = ClickModel(spec)
    histogram = _write(Path(path), model, _TRAIN, spec.rows)
    if eval_path is not None:
        histogram = _write(Path(eval_path), model, _EVAL, spec.eval_rows)
    return _truth(histogram)


def _write(path: Path, model: ClickModel, stream: int, rows: int) -> Ints:
    """Write one file. Return the number of rows by label (first axis) and logit (second axis, in units)."""
    histogram = np.zeros((2, 2 * _MAX_LOGIT + 1), np.int64)
    try:
        with replacing(path) as aside, open(aside, "wb") as file:
            for cells, logits in model.chunks(stream, rows):
                text = cells.reshape(-1).view(np.uint8)
                file.write(text[text != 0].data)
                labels = cells["text"][:, 0] == _ZERO + 1
                histogram[0] += np.bincount(logits[~labels], minlength=histogram.shape[1])
                histogram[1] += np.bincount(logits[labels], minlength=histogram.shape[1])
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}. The click log is incomplete") from error
    return histogram


def _truth(histogram: Ints) -> ClickLogTruth:
    """Compute the exact AUC and the log loss of the true probabilities, given the counts of :func:`_write`."""
    no_clicks, clicks = histogram
    total, total_clicks = int(histogram.sum()), int(clicks.sum())
    pairs = total_clicks * (total - total_clicks)
    below = np.cumsum(no_clicks) - no_clicks
    # Python integers, because the sum reaches 2^63 at about a billion rows.
    twice = sum(c * (2 * b + n) for c, b, n in zip(*(a.tolist() for a in (clicks, below, no_clicks)), strict=True))
    loss = 0.0
    for threshold, n, c in zip(click_thresholds().tolist(), no_clicks.tolist(), clicks.tolist(), strict=True):
        if n or c:
            probability = threshold / 2**32
            loss -= c * math.log(probability) + n * math.log1p(-probability)
    return ClickLogTruth(
        best_auc=twice / (2 * pairs) if pairs else math.nan,
        best_log_loss=loss / total,
        examples=total,
        clicks=total_clicks,
    )


def click_thresholds() -> Ints:
    """Return probabilities times 2^32, rounded. Element i is for the logit (i - _MAX_LOGIT) / _UNIT."""
    with localcontext() as context:
        context.prec = 25
        step, power, one = (Decimal(1) / _UNIT).exp(), Decimal(1), Decimal(1)
        upper = []
        for _ in range(_MAX_LOGIT + 1):
            upper.append(int((Decimal(2**32) * power / (power + one)).to_integral_value()))
            power *= step
    return np.array([2**32 - x for x in upper[:0:-1]] + upper, dtype=np.int64)


class _Field(NamedTuple):
    """The values of a field: distribution, text and weights."""

    first: npt.NDArray[np.uint32]
    """The first value of each segment. A draw's upper 16 bits select the segment. The last value means missing."""
    width: npt.NDArray[np.uint32]
    """The number of values of each segment. A draw's lower 16 bits select the value."""
    text: npt.NDArray[Any]
    """Little-endian uint64 [values]: up to eight characters, the first in the lowest byte, padded with zeros."""
    weight: npt.NDArray[np.int32]
    """The weight of each value in units of logit, [values]."""

    def draw(self, bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        segment = bits >> np.uint32(16)
        values: npt.NDArray[np.uint32] = (bits & np.uint32(0xFFFF)) * self.width[segment]
        values >>= np.uint32(16)
        values += self.first[segment]
        return values


class ClickModel:
    """The true model of a spec, and rows drawn from it."""

    def __init__(self, spec: ClickLogSpec) -> None:
        self._seed = spec.seed
        self.click_thresholds = click_thresholds()
        bits = next(_random_bits(spec.seed, _PILOT, _PILOT_ROWS, _PILOT_ROWS))
        logits = np.zeros(_PILOT_ROWS, np.int64)
        self.fields = []
        shapes: list[_IntegerShape | _CategoryShape] = [*_INTEGERS, *CATEGORIES]
        for number, shape in enumerate(shapes, 1):
            if isinstance(shape, _IntegerShape):
                field = _integer_field(shape, spec.seed, number)
            else:
                field = _category_field(shape, spec.seed, number)
            values = field.draw(bits[:, number])
            weight = _scaled(field.weight, values, shape.effect)
            logits += weight[values]
            self.fields.append(field._replace(weight=weight))
        self.intercept = self._find_intercept(logits, spec.click_share)

    def _find_intercept(self, logits: Ints, share: float) -> int:
        """Return the smallest intercept, in units, for which the pilot rows' mean probability is at least `share`."""
        low, high = -_MAX_LOGIT, _MAX_LOGIT
        while low < high:
            middle = (low + high) // 2
            if int(self.click_thresholds[self._places(logits, middle)].sum()) < share * 2**32 * len(logits):
                low = middle + 1
            else:
                high = middle
        return low

    @staticmethod
    def _places(logits: Ints, intercept: int) -> Ints:
        return np.clip(logits + (intercept + _MAX_LOGIT), 0, 2 * _MAX_LOGIT)

    def chunks(self, stream: int, rows: int) -> Iterator[tuple[npt.NDArray[Any], Ints]]:
        """Yield a stream's rows: cells [n, 40], valid until the next step, and logits [n] as indices of thresholds."""
        buffer = np.zeros((_CHUNK_ROWS, 1 + CRITEO_FEATURES), _CELL)
        buffer["end"] = _TAB
        buffer["end"][:, -1] = _NEWLINE
        for bits in _random_bits(self._seed, stream, rows, _CHUNK_ROWS):
            cells = buffer[: len(bits)]
            logits = np.zeros(len(bits), np.int64)
            for number, field in enumerate(self.fields, 1):
                values = field.draw(bits[:, number])
                cells["text"][:, number] = field.text[values]
                logits += field.weight[values]
            places = self._places(logits, self.intercept)
            cells["text"][:, 0] = _ZERO + (bits[:, 0] < self.click_thresholds[places])
            yield cells, places


def _random_bits(seed: int, stream: int, rows: int, chunk_rows: int) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield 32 random bits for each label and field, uint32 [n, 40]. The bits do not depend on the size of chunks."""
    # Use the raw output, because the methods of Generator may change between versions of NumPy (NEP 19).
    source = np.random.PCG64([seed, stream])
    for start in range(0, rows, chunk_rows):
        count = min(chunk_rows, rows - start)
        raw = np.asarray(source.random_raw(count * _ROW_WORDS), dtype="<u8")
        yield raw.view("<u4").astype(np.uint32, copy=False).reshape(count, 2 * _ROW_WORDS)


def _segments(shares: npt.NDArray[np.float64], missing: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return :attr:`_Field.first` and :attr:`_Field.width` for values with these shares."""
    cumulative = np.cumsum(shares)  # cumsum adds in order, so the result is the same on all machines
    num_present = _SEGMENTS * (1000 - missing) // 1000
    edges = np.searchsorted(cumulative, np.arange(num_present) * (cumulative[-1] / num_present), side="right")
    edges = np.append(edges, len(shares)).astype(np.uint32)
    first = np.full(_SEGMENTS, len(shares), np.uint32)
    width = np.zeros(_SEGMENTS, np.uint32)
    first[:num_present] = edges[:-1]
    width[:num_present] = np.diff(edges)
    return first, width


def _integer_field(shape: _IntegerShape, seed: int, number: int) -> _Field:
    """Return integers whose logarithm is a scaled sum of four bytes, nearly normal up to three deviations."""
    shares = np.ones(1)
    for _ in range(4):
        shares = np.convolve(shares, np.ones(256))  # exact, because the integers are below 2^53
    with localcontext() as context:
        context.prec = 25
        step = (Decimal(shape.spread) / Decimal("147.8")).exp()
        number_of_medians = step**-510
        integers = []
        for _ in range(len(shares)):
            integers.append(int(shape.median * number_of_medians) + shape.shift)
            number_of_medians *= step
    assert len(str(integers[-1])) <= 8
    text = np.array([str(x).encode() for x in integers] + [b""], dtype="S8").view("<u8")
    categories = np.array([integer_category(x) & MASK for x in integers], dtype=np.uint64)
    return _Field(*_segments(shares, shape.missing), text, _weights(categories, seed, number))


def _category_field(shape: _CategoryShape, seed: int, number: int) -> _Field:
    ranks = np.arange(shape.vocabulary)
    names = ranks.astype(np.uint64) + np.uint64(hash_bytes(bytes([number]), seed) & 0xFFFFFFFF)
    names = (names * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)  # a bijection, like the next step
    names ^= names >> np.uint64(15)
    nibbles = (names[:, None] >> np.arange(28, -4, -4).astype(np.uint64)) & np.uint64(15)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles.astype(np.int64)]
    text = np.zeros(shape.vocabulary + 1, "<u8")
    text[:-1] = digits.view("<u8").reshape(-1)
    words = text[:-1].astype(np.uint64)
    shares = 1.0 / (ranks + (1 + shape.offset))
    return _Field(*_segments(shares, shape.missing), text, _weights(words, seed, number))


def _weights(words: Words, seed: int, number: int) -> npt.NDArray[np.int32]:
    """Return raw weights of values of eight bytes, and of the missing value, as functions of their keys."""
    field = field_seed(number)
    add_word: Any = hash_word  # typed as Any, because the hash functions accept arrays too
    finish: Any = hash_end
    start = np.uint64(field ^ (8 * LENGTH_MULTIPLIER & MASK))
    keys = np.append(finish(add_word(start, words)), np.uint64(hash_bytes(b"", field)))
    random: Words = finish(add_word(np.uint64(seed), keys))
    parts = [(random >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
    return (sum(parts, np.zeros(len(keys), np.uint64)).astype(np.int64) - 0x1FFFE).astype(np.int32)


def _scaled(raw: npt.NDArray[np.int32], values: npt.NDArray[np.uint32], effect: int) -> npt.NDArray[np.int32]:
    """Return the weights in units, with mean 0 and a deviation of `effect` thousandths over the pilot's values."""
    seen = raw[values].astype(np.int64)
    mean = int(seen.sum()) // len(seen)
    deviation = math.isqrt(int(((seen - mean) ** 2).sum()) // len(seen))
    scaled = (raw.astype(np.int64) - mean) * (effect * _UNIT) // (1000 * max(deviation, 1))
    return np.clip(scaled, -_MAX_LOGIT, _MAX_LOGIT).astype(np.int32)

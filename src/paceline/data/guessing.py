"""Guess the kinds of columns from rows spread over the files.

The rules are in guides/data.md. They use a column's distinct values and the frequencies of these values. The
result for the same files is always the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import shorten
from paceline.data.columns import Columns, Guess, Guesses, check_distinct, find_label, resolve_column
from paceline.data.dialect import PLACE, check_header, is_missing, is_number
from paceline.data.sampling import TextTable
from paceline.data.scales.one_column import line_loss, table_loss
from paceline.data.scales.scaling import signed_logs
from paceline.errors import UsageError
from paceline.kernels.text.values import split_words

NUM_EXAMPLES = 3
IN_LISTS = "in lists"
"""The stated reason for columns of lists, which are always categorical."""

LEAST_ROWS = 50  # in fewer rows, all values may be distinct by chance
_FEW, _ROWS_PER_VALUE = 64, 20
_LARGE_DIGITS, _INEXACT_DIGITS = 10, 16  # a float64 has 15 digits
_INTEGER = re.compile(r"[+-]?[0-9]+(?:\.0)?")
_PADDED = re.compile(r"[+-]?0[0-9]+")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_WITH_SIGN = re.compile(r"[+-]?[$€£¥] ?[+-]?[0-9][0-9.,]*|[+-]?[0-9][0-9.,]* ?[%€£¥]")
_ODD_NUMBERS = (
    (_WITH_SIGN, "currency or percent signs", "without"),
    (_THOUSANDS, "commas between thousands", "without (if they are decimal commas, with points)"),
    (_DECIMAL_COMMA, "decimal commas", "with points (where semicolons separate the columns: sed 's/,/./g')"),
)
_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.I)
_CODE_NAME = re.compile(r"(?:^|[_\s.-]|[a-z](?=I|C|Z|T))(?:id|uid|uuid|guid|code|zip|zipcode|type|category)s?$", re.I)
_ROW_NAME = re.compile(r"(?:unnamed: ?[0-9]+|row[ ._]?(?:names?|numbers?)|index)?", re.I)
"""Names that pandas and R give to columns of row numbers, usually empty."""
_BINS = 8
_FEW_DISTINCT = "integers, few distinct"
_MANY_DISTINCT = "integers, each in many rows"
# nats: a categorical column becomes numeric unless a rate for each value explains the labels better than a line by at
# least this, and by at least the logarithm of the number of columns
_LITTLE_EVIDENCE = 2.0
# nats: a numeric column becomes categorical if a rate for each value explains the labels better than a line by more
_EVIDENCE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading data. The kinds of columns that no option names are guessed."""

    label: str | None = None
    """The column of the label, by name or number."""
    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    """Columns to leave out; ``*`` stands for all columns without another option."""
    header: str = "auto"
    max_malformed: float = 0.05
    """The largest allowed fraction of malformed rows."""

    def __post_init__(self) -> None:
        check_header(self.header)
        if not 0 <= self.max_malformed <= 1:
            raise UsageError(f"--max-malformed {self.max_malformed:g}: expected a fraction from 0 to 1")

    @property
    def given(self) -> list[str]:
        default = ReadOptions()
        names = ("label", "categorical", "numeric", "text", "ignore", "header")
        return [f"--{name}" for name in names if getattr(self, name) != getattr(default, name)]

    @property
    def names(self) -> list[str]:
        given = (self.label, *self.categorical, *self.numeric, *self.text, *self.ignore)
        return [name for name in given if name and name != "*"]

    def fit(self, path: str, columns: Columns, names: Sequence[str]) -> bool:
        """Return whether files with columns `names` that were converted with `columns` satisfy the options."""
        label = columns.label if self.label is None else resolve_column(path, names, self.label, "--label")
        given, known = self.kinds(path, names, label), columns.kinds
        has_same_ignored = "*" not in given or {*columns.names} <= {*given, columns.label, columns.weight}
        default = "numeric" if columns.is_open else "ignore"
        fitting = (known.get(name, default) == kind for name, kind in given.items())
        return label == columns.label and self.header in ("auto", columns.header) and has_same_ignored and all(fitting)

    def kinds(self, path: str, names: Sequence[str], label: str) -> dict[str, str]:
        """Return the given kinds. Raises UsageError if a column is unknown, has two kinds, or is the label."""
        found: dict[str, str] = {}
        for kind in ("categorical", "numeric", "text", "ignore"):
            for name in getattr(self, kind):
                is_all = name == "*" and kind == "ignore"
                resolved = name if is_all else resolve_column(path, names, name, f"--{kind}")
                if found.setdefault(resolved, kind) != kind:
                    raise UsageError(
                        f"--{kind} {name}: --{found[resolved]} names this column too. Leave one option out"
                    )
        if label in found:
            raise UsageError(f"--{found[label]} {label}: this column is the label. Leave it out, or change --label")
        return found


NO_OPTIONS: Final = ReadOptions()
"""No option: the kinds of all columns are guessed."""


def guess_columns(path: str, sample: TextTable, options: ReadOptions = NO_OPTIONS, weight: str = "") -> Guesses:
    """Guess the kinds of the columns of `sample` that `options` do not name.

    `weight` is the column with the examples' weights, if any. Messages name `path`. Raises UsageError if there is no
    label, or no other column.
    """
    label = options.label
    label = find_label(path, sample.names) if label is None else resolve_column(path, sample.names, label, "--label")
    guesses = []
    check_distinct(path, sample.names)
    given = options.kinds(path, sample.names, label)
    default = "ignore" if "*" in given else None
    _check_commas(path, sample, [name for name in sample.names if given.get(name, default) in (None, "numeric")])
    sample = _without_copies(sample)
    labels = sample.labels(label)
    has_names = not all(map(PLACE.fullmatch, sample.names))
    for name, type in zip(sample.names, sample.types, strict=True):
        cells = sample.column(name)
        counts = sample.counts(name)
        known = "label" if name == label else "weight" if weight and name == weight else None
        has_no_name = PLACE.fullmatch(name) is not None and has_names
        chosen = given.get(name, default)
        if known is not None:
            kind, reason = known, ""
        elif chosen is not None:
            kind, reason = ("left out", "ignored") if chosen == "ignore" else (chosen, "named")
        else:
            kind, reason = judge_column("" if has_no_name else name, cells, counts, type)
        if labels is not None and reason in (_FEW_DISTINCT, _MANY_DISTINCT):
            kind, reason = _judge_by_label(cells, labels, kind, reason, len(sample.names))
        guesses.append(_describe(name, kind, reason, counts))
    categorical, numeric, text = (
        tuple(guess.name for guess in guesses if guess.kind == kind) for kind in ("categorical", "numeric", "text")
    )
    if not (categorical or numeric or text):
        reasons = "; ".join(f"'{guess.name}' {guess.reason}" for guess in guesses if guess.kind == "left out")
        raise UsageError(f"{path} has no column to learn from: {reasons or 'it has only the label'}")
    classes = sample.classes(label)
    columns = Columns(label, categorical, numeric, weight=weight, classes=classes, text=text, header=options.header)
    return Guesses(columns, tuple(guesses), len(sample.rows))


def _check_commas(path: str, sample: TextTable, names: Sequence[str]) -> None:
    """Raise UsageError if numbers have commas or signs, because they would be read as text."""
    for name in names:
        cells = [cell.strip() for cell in sample.column(name) if not is_missing(cell)]
        num_numbers = sum(map(is_number, cells))
        for pattern, marks, advice in _ODD_NUMBERS:
            odd = [cell for cell in cells if pattern.fullmatch(cell)]
            if len(odd) > len(cells) / 2 and num_numbers + len(odd) == len(cells):
                shown = next((cell for cell in odd if not _THOUSANDS.fullmatch(cell)), odd[0])
                raise UsageError(
                    f"{path} has numbers with {marks}, such as '{shown}' in column '{name}'. Write them {advice}, or "
                    f"pass --categorical {name} if they are text"
                )


def _without_copies(sample: TextTable) -> TextTable:
    """Remove duplicate rows, so that a column may identify rows. Keep them if most rows are duplicates."""
    rows = list(dict.fromkeys(map(tuple, sample.rows)))
    return sample if 2 * len(rows) < len(sample.rows) else TextTable(sample.names, sample.types, list(map(list, rows)))


def describe_named(sample: TextTable, columns: Columns) -> Guesses:
    """Return the kinds of columns that the user named, and the words of the labels."""
    if not columns.classes:
        columns = replace(columns, classes=sample.classes(columns.label))
    guesses, kinds = [], columns.kinds
    for name, type in zip(sample.names, sample.types, strict=True):
        reason = "not named" if name not in kinds else IN_LISTS if type == "list" else ""
        guesses.append(_describe(name, kinds.get(name, "left out"), reason, sample.counts(name)))
    return Guesses(columns, tuple(guesses), len(sample.rows))


def _describe(name: str, kind: str, reason: str, counts: Mapping[str, int]) -> Guess:
    return Guess(name, kind, reason, len(counts), tuple(list(counts)[:NUM_EXAMPLES]))


def judge_column(name: str, cells: Sequence[str], counts: Mapping[str, int], type: str = "") -> tuple[str, str]:
    """Return the kind of a column other than the label, and the reason.

    `name` is empty if the header has no name. `cells` are in the order of the rows, `counts` has the frequencies of
    nonempty cells, and `type` is a type of :class:`TextTable`.
    """
    if type == "nested":
        return "left out", "holds structures"
    present = [cell for cell in counts if not is_missing(cell)]
    if not present:
        return "left out", "has no value in the sampled rows"
    if type == "list":
        return "categorical", IN_LISTS
    num_rows = sum(counts[cell] for cell in present)
    all_distinct = len(present) == num_rows >= LEAST_ROWS
    words = [cell for cell in present if not is_number(cell) and not _INFINITE.fullmatch(cell.strip())]
    if words or type in ("text", "boolean"):
        if 2 * len(present) > num_rows >= LEAST_ROWS and _are_sentences(present):
            return "text", "each word is a feature"
        if all_distinct:
            return "left out", "identifies rows: text, all distinct"
        if len(words) == 1 and len(present) > _FEW:
            return "categorical", f"text: numbers, but for '{shorten(words[0])}'"
        return "categorical", "text"
    if not all(map(_INTEGER.fullmatch, present)):
        return "numeric", "numbers"
    integers = [_integer(cell) for cell in cells if cell in counts and not is_missing(cell)]
    return _judge_integers(name, integers, [*dict.fromkeys(cell.removesuffix(".0") for cell in present)])


def _are_sentences(cells: Sequence[str]) -> bool:
    """Return whether most texts have blanks, and most of their words (at least two per text) occur in several texts."""
    words = [{*split_words(cell.encode("utf-8", "replace"))} for cell in cells]
    counts = Counter(word for text in words for word in text)
    have_blanks = sum(" " in cell for cell in cells) > len(cells) / 2
    return have_blanks and counts.total() >= max(2 * len(cells), 2 * sum(count == 1 for count in counts.values()))


def _integer(cell: str) -> int:
    return int(cell.removesuffix(".0"))


def _judge_integers(name: str, values: Sequence[int], texts: Sequence[str]) -> tuple[str, str]:
    num_rows, num_distinct = len(values), len(texts)
    digits = max(len(text.lstrip("+-")) for text in texts)
    is_named_code = _CODE_NAME.search(name) is not None
    if num_distinct == num_rows >= LEAST_ROWS and (
        is_named_code
        or _ROW_NAME.fullmatch(name)
        or digits >= _LARGE_DIGITS
        or _is_counter(values)
        or _is_uniform(values)
    ):
        return "left out", "identifies rows: integers, all distinct"
    if any(map(_PADDED.fullmatch, texts)):
        return "categorical", "integers with leading zeros"
    if digits >= _INEXACT_DIGITS:
        return "categorical", f"integers of {digits} digits"
    if num_distinct <= 2:
        return "numeric", "integers"
    if is_named_code:
        return "categorical", "integers, named as codes"
    if num_distinct <= _FEW and num_rows >= _ROWS_PER_VALUE * num_distinct:
        return "categorical", _FEW_DISTINCT
    if num_rows >= _ROWS_PER_VALUE * num_distinct and _are_far_from_zero(values):
        return "categorical", "integers, large and close together"
    if _are_codes(values):
        return "categorical", "integers that repeat like codes"
    return "numeric", _MANY_DISTINCT if num_rows >= _ROWS_PER_VALUE * num_distinct else "integers"


def _judge_by_label(
    cells: Sequence[str], labels: npt.NDArray[np.float64], kind: str, reason: str, num_columns: int
) -> tuple[str, str]:
    """Return the kind of a column of frequent integers, and the reason. Two models of the labels are compared.

    The column is numeric if a line explains the labels better, and categorical if a rate for each value, with a penalty
    for its parameters, is better. If there are many columns (`num_columns`), some have such rates by chance.
    """
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell) and not math.isnan(labels[row])]
    numbers, labels = np.array([_integer(cells[row]) for row in rows], np.float64), labels[rows]
    line = min(line_loss(numbers, labels), line_loss(signed_logs(numbers, 1.0), labels))
    table = table_loss(np.unique(numbers, return_inverse=True)[1], labels)
    better = (line - table) * len(rows)
    if kind == "categorical" and better < max(_LITTLE_EVIDENCE, math.log(num_columns)):
        return "numeric", f"{reason}, and the label changes evenly with them"
    if kind == "numeric" and better > _EVIDENCE:
        return "categorical", f"{reason}, and the label does not change evenly with them"
    return kind, reason


def _is_counter(values: Sequence[int]) -> bool:
    """Return whether distinct values increase or decrease from row to row."""
    return all(a < b for a, b in pairwise(values)) or all(a > b for a, b in pairwise(values))


def _is_uniform(values: Sequence[int]) -> bool:
    """Return whether many distinct values are spread evenly over their range, as identifiers usually are."""
    ordered = sorted(values)
    low, width = ordered[0], ordered[-1] - ordered[0]
    quarters = (abs((ordered[len(ordered) * k // 4] - low) / width - k / 4) for k in (1, 2, 3))
    return len(values) >= 1000 and all(distance < 0.05 for distance in quarters)


def _are_far_from_zero(values: Sequence[int]) -> bool:
    """Return whether the middle 80% of values are much larger than their differences, as 100013 and 100217 are."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[len(ordered) - 1 - len(ordered) // 10]
    return min(abs(low), abs(high)) > 20 * (high - low) > 0


def _are_codes(values: Sequence[int]) -> bool:
    """Return whether values repeat more than twice as often as if they were smoothly distributed over their range.

    The middle 80% of the rows, without a value that most rows have, are split into bins with equal numbers of rows. In
    a bin with m rows and R possible values, a locally uniform distribution has R(1 - exp(-m/R)) distinct values on
    average. Amounts, which are mostly round numbers, are not codes.
    """
    if sum(value % 5 == 0 for value in values) * 2 > len(values):
        return False
    most, count = Counter(values).most_common(1)[0]
    ordered = sorted(value for value in values if value != most) if count * 2 > len(values) else sorted(values)
    middle = ordered[len(ordered) // 10 : len(ordered) - len(ordered) // 10]
    if len(middle) < 20 * _BINS:
        return False
    step = math.gcd(*(value - middle[0] for value in middle)) or 1
    found = expected = 0.0
    for at in range(_BINS):
        part = middle[at * len(middle) // _BINS : (at + 1) * len(middle) // _BINS]
        possible = (part[-1] - part[0]) // step + 1
        found += len(set(part))
        expected += possible * -math.expm1(-len(part) / possible)
    return found < 0.5 * expected

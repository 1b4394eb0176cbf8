"""Read labels from cells, and convert them for a data set.

A text describes the conversion, so it can be sent to other processes. ``numbers`` means unchanged numbers. ``clicks``
means 1 for a label above 0, otherwise 0. ``clicks:2`` means 1 for the label 2, otherwise 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import shorten
from paceline.data.dialect import is_missing, is_number
from paceline.errors import UsageError
from paceline.kernels.text.values import LABEL_WORDS, MAX_FLOAT32

NUMBERS, CLICKS = "numbers", "clicks"
MOST_CLASSES = 100
_BLANKS = " \t\r\n"
_NEGATIONS = ("no", "not", "non", "un")


def clicks_where(positive: float | None) -> str:
    """Return the conversion to clicks with this positive label; None: all labels above 0 are positive."""
    return CLICKS if positive is None else f"{CLICKS}:{positive!r}"


def positive_in(labels: str) -> float | None:
    """Return the single positive label of a conversion, or None. Raises UsageError if `labels` is invalid."""
    kind, colon, positive = labels.partition(":")
    if labels in (NUMBERS, CLICKS):
        return None
    if kind != CLICKS or not colon or not is_number(positive):
        raise UsageError(f"labels={labels!r}: expected {NUMBERS}, {CLICKS}, or {CLICKS}:2 for the positive label 2")
    return float(positive)


def read_as(labels: str, found: npt.NDArray[np.float32], *, unknown: bool = False) -> None:
    """Replace labels (float32) in place by 1 and 0, unless `labels` is numbers. If `unknown`, NaN remains."""
    if labels == NUMBERS:
        return
    positive = positive_in(labels)
    is_known = found == found if unknown else True
    if positive is None:
        np.greater(found, 0, out=found, where=is_known)
    else:
        np.equal(found, np.float32(positive), out=found, where=is_known)


def parse_positive(text: str) -> float | str:
    """Parse the label in an option: a number, or a word for :func:`resolve_positive`. Raises UsageError."""
    if not text.strip() or (is_number(text) and abs(float(text)) > MAX_FLOAT32):
        raise UsageError(f"--positive {text}: expected a finite number or a word")
    return float(text) if is_number(text) else text.strip(_BLANKS)


def resolve_positive(positive: float | str | None, classes: Sequence[str]) -> float | None:
    """Return the number of the label `positive`, given the words that are labels (`classes`, empty for numbers).

    Return None if this label is already the positive one. Raises UsageError for an unknown word.
    """
    if not isinstance(positive, str):
        return positive
    if not classes:
        label = read_label(positive)
        if label is None:
            raise UsageError(
                f"--positive {positive}: the labels of this data are numbers, because some are numbers or there are "
                f"not 2 to {MOST_CLASSES} words. Pass a number, or one of {', '.join(LABEL_WORDS)}"
            )
        return label
    if positive not in classes:
        raise UsageError(f"--positive {positive}: no sampled row has this label. The labels are {_listed(classes)}")
    at = list(classes).index(positive)
    return None if len(classes) == 2 and at == 1 else float(at)


def find_classes(cells: Iterable[str]) -> tuple[str, ...]:
    """Return the words that are labels; word i is the label i. Return no words if labels are numbers.

    Labels are numbers if all words stand for 0 or 1, as no and yes do. There must be words for both, or a single word.
    Otherwise the words are the labels. If there are two words, the second one in alphabetical order is the label 1. But
    a word for 0, or the negation of the other word, such as "not spam", is the label 0.
    """
    words = {cell.strip(_BLANKS) for cell in cells if not is_missing(cell)}
    known = {read_label(word) for word in words}
    is_one_number = len(known) == 1 and len({word[0].lower() for word in words}) > 1  # T and Y both mean 1
    are_words = (None in known or is_one_number) and not any(map(is_number, words))
    if not are_words or not 2 <= len(words) <= MOST_CLASSES or not all(word.isprintable() for word in words):
        return ()
    found = sorted(words)
    return tuple(sorted(found, key=lambda word: _usual_place(word, words)) if len(found) == 2 else found)


def _usual_place(word: str, words: set[str]) -> float:
    """Return 0 or 1 if `word`, one of two `words`, usually means this number; otherwise 0.5."""
    negated = {f"{prefix}{blank}{name}".casefold() for prefix in _NEGATIONS for blank in ("", *"-_ ") for name in words}
    if word.casefold() in negated:
        return 0.0
    return LABEL_WORDS.get(word.lower(), 0.5)


def read_label(cell: str, classes: Sequence[str] = ()) -> float | None:
    """Return a cell's label: its number, or its word's number (index in `classes`, if any). None if invalid."""
    if classes:
        word = cell.strip(_BLANKS)
        return float(classes.index(word)) if word in classes else None
    if not is_number(cell):
        return LABEL_WORDS.get(cell.strip().lower())
    return float(cell) if abs(float(cell)) <= MAX_FLOAT32 else None


def count_labels(cells: Iterable[str], classes: Sequence[str] = ()) -> dict[float, int]:
    """Return the number of cells with each label, read by :func:`read_label`; invalid cells are skipped."""
    return dict(Counter(value for cell in cells if (value := read_label(cell, classes)) is not None))


def describe_no_numbers(cells: Iterable[str]) -> str | None:
    """Describe texts found instead of labels or weights. Return None if a cell is valid or all are missing."""
    texts: dict[str, None] = {}
    for cell in cells:
        if read_label(cell) is not None:
            return None
        if not is_missing(cell):
            texts[cell] = None
    shown = [f"'{shorten(text)}'" for text in list(texts)[:3]]
    if not shown:
        return None
    if len(texts) > len(shown):
        return f"texts such as {', '.join(shown)}"
    return f"text, {shown[0]}" if len(shown) == 1 else f"texts, {', '.join(shown[:-1])} and {shown[-1]}"


def find_label_words(cells: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({cell.strip().lower() for cell in cells} & set(LABEL_WORDS)))


def describe_label_words(words: Sequence[str], labels: str = NUMBERS) -> str:
    positive = positive_in(labels)
    numbers = {word: LABEL_WORDS[word] if positive is None else float(LABEL_WORDS[word] == positive) for word in words}
    return f"labels are words, which are read as numbers: {', '.join(f'{word} as {numbers[word]:g}' for word in words)}"


def describe_classes(classes: Sequence[str], labels: str = NUMBERS) -> str:
    if labels == NUMBERS:
        numbered = ", ".join(f"{word} as {at}" for at, word in enumerate(classes))
        return f"labels are words, which are read as numbers: {numbered}"
    positive = positive_in(labels)
    at = 1 if positive is None else int(positive)
    if len(classes) > 2:
        return f"labels are words: {classes[at]} is 1, the positive label, and the other {len(classes) - 1} are 0"
    text = f"labels are words: {classes[1 - at]} is 0, and {classes[at]} is 1, the positive label"
    return text if positive is not None else f"{text} (--positive '{classes[0]}' swaps them)"


def describe_not_binary(found: Mapping[float, int], labels: str = CLICKS, classes: Sequence[str] = ()) -> str | None:
    """Describe labels that are not two classes, although clicks are expected; otherwise return None.

    `classes` are the words that are labels; empty if labels are numbers.
    """
    values, positive = sorted(found), positive_in(labels)
    listed = _listed([classes[int(value)] if classes else f"{value:g}" for value in values])
    if positive is not None:
        if not values or np.float32(positive) in np.array(values, np.float32):
            return None
        return f"labels are {listed}, without {positive:g}, the positive label"
    if labels == NUMBERS or len(values) < 2 or (len(values) == 2 and values[0] <= 0 < values[1]):
        return None
    return f"labels are {listed}, expected two" + ("" if classes else ": 0 and 1, or -1 and 1")


def describe_one_label(found: Mapping[float, int], labels: str = CLICKS, classes: Sequence[str] = ()) -> str | None:
    """Describe the only label of the sampled rows. Return None if there are several labels, or none."""
    if len(found) != 1 or labels == NUMBERS:
        return None
    (value,) = found
    label = classes[int(value)] if classes else f"{value:g}"
    return f"all labels in the sampled rows are {label}, so a model has nothing to distinguish"


def _listed(labels: Sequence[str]) -> str:
    shown = [f"'{label}'" if "," in label else label for label in labels[:10]]
    if len(labels) > len(shown):
        return ", ".join([*shown, "..."])
    return ", ".join(shown) if len(shown) < 2 else f"{', '.join(shown[:-1])} and {shown[-1]}"

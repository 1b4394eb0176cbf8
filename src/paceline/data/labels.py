"""Labels: what a cell says, and as what a data set gives the numbers that stand in files.

As what labels are read is a text, so that it can travel: ``numbers`` as they stand; ``clicks``, which is 1 above 0 and
0 elsewhere; or ``clicks:2``, which is 1 where a label is 2 and 0 elsewhere.
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
    """As what labels of clicks are read: `positive` is the label that is 1; None: those above 0 are."""
    return CLICKS if positive is None else f"{CLICKS}:{positive!r}"


def positive_in(labels: str) -> float | None:
    """The label that is 1 where labels are read as `labels`; None if that is not one label.

    :exc:`UsageError` if labels cannot be read so.
    """
    kind, colon, positive = labels.partition(":")
    if labels in (NUMBERS, CLICKS):
        return None
    if kind != CLICKS or not colon or not is_number(positive):
        raise UsageError(f"labels={labels!r}: expected {NUMBERS}, {CLICKS}, or {CLICKS}:2 where 2 is the positive one")
    return float(positive)


def read_as(labels: str, found: npt.NDArray[np.float32], *, unknown: bool = False) -> None:
    """Write into `found`, float32 as files have them, what they are read as; NaN stays where some are `unknown`."""
    if labels == NUMBERS:
        return
    positive = positive_in(labels)
    is_known = found == found if unknown else True
    if positive is None:
        np.greater(found, 0, out=found, where=is_known)
    else:
        np.equal(found, np.float32(positive), out=found, where=is_known)


def parse_positive(text: str) -> float | str:
    """The label that `text` names: a number, or a word, which :func:`resolve_positive` takes. Raises UsageError."""
    if not text.strip() or (is_number(text) and abs(float(text)) > MAX_FLOAT32):
        raise UsageError(f"--positive {text}: labels are finite numbers, or words")
    return float(text) if is_number(text) else text.strip(_BLANKS)


def resolve_positive(positive: float | str | None, classes: Sequence[str]) -> float | None:
    """The number of the label that is `positive` where labels are the words `classes`, or, if those are none, numbers.

    None if it is the usual one. Raises UsageError for a word that is no label.
    """
    if not isinstance(positive, str):
        return positive
    if not classes:
        label = read_label(positive)
        if label is None:
            raise UsageError(
                f"--positive {positive}: labels of this data are read as numbers, because some of them are numbers or "
                f"there are not 2 to {MOST_CLASSES} words: give a number, or one of {', '.join(LABEL_WORDS)}"
            )
        return label
    if positive not in classes:
        raise UsageError(f"--positive {positive}: no label is that in the rows looked at: they are {_listed(classes)}")
    at = list(classes).index(positive)
    return None if len(classes) == 2 and at == 1 else float(at)


def find_classes(cells: Iterable[str]) -> tuple[str, ...]:
    """Return the words that labels are, in the order of their numbers; none if labels are numbers.

    All distinct words decide. Words for 0 and 1, such as no and yes, are numbers only if there are no other words and
    both numbers, or one word, occur. Of two words the second in alphabetical order is 1. A word for 0, and the negation
    of the other, such as "not spam", is 0.
    """
    words = {cell.strip(_BLANKS) for cell in cells if not is_missing(cell)}
    known = {read_label(word) for word in words}
    is_one_number = len(known) == 1 and len({word[0].lower() for word in words}) > 1  # T and Y, or F and N
    are_words = (None in known or is_one_number) and not any(map(is_number, words))
    if not are_words or not 2 <= len(words) <= MOST_CLASSES or not all(word.isprintable() for word in words):
        return ()
    found = sorted(words)
    return tuple(sorted(found, key=lambda word: _usual_place(word, words)) if len(found) == 2 else found)


def _usual_place(word: str, words: set[str]) -> float:
    """Whether a word of two is usually 0 or 1; 0.5 if nothing says so."""
    negated = {f"{prefix}{blank}{each}".casefold() for prefix in _NEGATIONS for blank in ("", *"-_ ") for each in words}
    if word.casefold() in negated:
        return 0.0
    return LABEL_WORDS.get(word.lower(), 0.5)


def read_label(cell: str, classes: Sequence[str] = ()) -> float | None:
    """The label that a cell holds: a number, or a word for one, of `classes` if there are any; None if neither."""
    if classes:
        word = cell.strip(_BLANKS)
        return float(classes.index(word)) if word in classes else None
    return float(cell) if is_number(cell) else LABEL_WORDS.get(cell.strip().lower())


def count_labels(cells: Iterable[str], classes: Sequence[str] = ()) -> dict[float, int]:
    """How often each label is there, as :func:`read_label` reads it; what is no label is passed over."""
    return dict(Counter(value for cell in cells if (value := read_label(cell, classes)) is not None))


def describe_no_numbers(cells: Iterable[str]) -> str | None:
    """Say which texts stand where labels, or weights, should; None if one of them can be read, or there is none."""
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
    """The words that labels are written as, if they are, such as yes and no."""
    return tuple(sorted({cell.strip().lower() for cell in cells} & set(LABEL_WORDS)))


def describe_label_words(words: Sequence[str], labels: str = NUMBERS) -> str:
    """Say what words are taken for in a data set whose labels are read as `labels`."""
    positive = positive_in(labels)
    numbers = {word: LABEL_WORDS[word] if positive is None else float(LABEL_WORDS[word] == positive) for word in words}
    return f"labels are words, which are read as numbers: {', '.join(f'{word} as {numbers[word]:g}' for word in words)}"


def describe_classes(classes: Sequence[str], labels: str = NUMBERS) -> str:
    """Say what the words `classes` are taken for in a data set whose labels are read as `labels`."""
    if labels == NUMBERS:
        numbered = ", ".join(f"{word} as {at}" for at, word in enumerate(classes))
        return f"labels are words, which are read as numbers: {numbered}"
    positive = positive_in(labels)
    at = 1 if positive is None else int(positive)
    if len(classes) > 2:
        return f"labels are words: {classes[at]} is 1, the positive one, and the {len(classes) - 1} others are 0"
    said = f"labels are words: {classes[1 - at]} is 0, and {classes[at]} is 1, the positive one"
    return said if positive is not None else f"{said} (--positive '{classes[0]}' turns them round)"


def describe_not_binary(found: Mapping[float, int], labels: str = CLICKS, classes: Sequence[str] = ()) -> str | None:
    """Say what is wrong with labels that are to be read as clicks; None for two classes, or one.

    `classes` are the words that labels are, if they are.
    """
    values, positive = sorted(found), positive_in(labels)
    listed = _listed([classes[int(value)] if classes else f"{value:g}" for value in values])
    if positive is not None:
        if not values or np.float32(positive) in np.array(values, np.float32):
            return None
        return f"labels are {listed}, and none is {positive:g}, the positive one"
    if labels == NUMBERS or len(values) < 2 or (len(values) == 2 and values[0] <= 0 < values[1]):
        return None
    return f"labels are {listed}, expected two" + ("" if classes else ": 0 and 1, or -1 and 1")


def describe_one_label(found: Mapping[float, int], labels: str = CLICKS, classes: Sequence[str] = ()) -> str | None:
    """Say which label all rows have that were looked at; None if they have several, or none."""
    if len(found) != 1 or labels == NUMBERS:
        return None
    (value,) = found
    label = classes[int(value)] if classes else f"{value:g}"
    return f"all labels in the rows looked at are {label}, so that there is nothing to tell apart"


def _listed(labels: Sequence[str]) -> str:
    """The first labels, as a sentence has them."""
    shown = list(labels[:10])
    if len(labels) > len(shown):
        return ", ".join([*shown, "..."])
    return ", ".join(shown) if len(shown) < 2 else f"{', '.join(shown[:-1])} and {shown[-1]}"

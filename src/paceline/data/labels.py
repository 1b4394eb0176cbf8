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
from paceline.kernels.text.reference import LABEL_WORDS, MAX_FLOAT32

NUMBERS, CLICKS = "numbers", "clicks"


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


def parse_positive(text: str) -> float:
    """The label that `text` names, a number or a word for one. Raises UsageError."""
    label = read_label(text)
    if label is None or abs(label) > MAX_FLOAT32:
        raise UsageError(
            f"--positive {text}: labels are finite numbers, or one of {', '.join(LABEL_WORDS)}: write other words as "
            "numbers, 1 for the positive one and 0 for the others"
        )
    return label


def read_label(cell: str) -> float | None:
    """The label that a cell holds: a number, or a word for one; None if neither."""
    return float(cell) if is_number(cell) else LABEL_WORDS.get(cell.strip().lower())


def count_labels(cells: Iterable[str]) -> dict[float, int]:
    """How often each label is there; what is no label is passed over."""
    return dict(Counter(value for value in map(read_label, cells) if value is not None))


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


def describe_not_binary(found: Mapping[float, int], labels: str = CLICKS) -> str | None:
    """Say what is wrong with labels that are to be read as clicks; None for two classes, or one."""
    values, positive = sorted(found), positive_in(labels)
    shown = [f"{value:g}" for value in values[:10]]
    if len(values) > len(shown):
        shown.append("...")
    listed = ", ".join(shown) if len(shown) < 2 or shown[-1] == "..." else f"{', '.join(shown[:-1])} and {shown[-1]}"
    if positive is not None:
        if not values or np.float32(positive) in np.array(values, np.float32):
            return None
        return f"labels are {listed}, and none is {positive:g}, the positive one"
    if labels == NUMBERS or len(values) < 2 or (len(values) == 2 and values[0] <= 0 < values[1]):
        return None
    return f"labels are {listed}, expected two: 0 and 1, or -1 and 1"

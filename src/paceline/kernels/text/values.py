"""The spellings of values in text: numbers, missing values, labels, categories and words."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import numpy.typing as npt

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "."})
"""The spellings of a missing number, in lower case. Upper-case letters are accepted too."""

LABEL_WORDS = {**dict.fromkeys(("true", "t", "yes", "y"), 1.0), **dict.fromkeys(("false", "f", "no", "n"), 0.0)}
"""The words that a file may use for the labels 1 and 0, in lower case. Upper-case letters are accepted too."""

MAX_FLOAT32 = 3.4028235677973362e38
"""The largest double that rounds to a finite float32."""

_WHOLE = re.compile(rb"-?[0-9]+\.0")
_DECIMAL = re.compile(r"(-?)([0-9]+)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]+))?")
_WORD = re.compile(rb"(?:[A-Za-z]|(?!\xe2\x80)[\xc3-\xff][\x80-\xbf]*)+")


def category_text(text: bytes) -> bytes:
    """Return the bytes of a category from which its key is computed: a whole number loses a final ``.0``.

    Some programs write integers with ``.0`` if other numbers of the column are missing.
    """
    return text[:-2] if _WHOLE.fullmatch(text) else text


def split_words(text: bytes) -> list[bytes]:
    """Return the words of a text. A word is a run of letters; ASCII letters are converted to lower case.

    All characters from U+00C0 on count as letters, except the punctuation from U+2000 to U+203F.
    """
    return [word.lower() for word in _WORD.findall(text)]


def number_text(text: str) -> str:
    """Return a common spelling for all spellings of a JSON number, such as ``1000``, ``1000.0`` and ``1e3``.

    The key of the category is computed from this spelling. Integers without point and exponent do not change. Other
    numbers are written as Arrow writes them: with an exponent if the magnitude is at least 10^18 or below 10^-6,
    without zeros at the end of the fraction, and without a point if there is no fraction.
    """
    found = _DECIMAL.fullmatch(text)
    if found is None or (found[3] is None and found[4] is None):
        return text
    sign, whole, fraction = found[1], found[2], found[3] or ""
    digits = (whole + fraction).lstrip("0")
    place = len(digits) - len(fraction) + int(found[4] or 0)  # digits before the point, without leading zeros
    digits = digits.rstrip("0")
    if not digits:
        return "0"
    if not -5 <= place <= 18:
        return f"{sign}{digits[0]}{'.' * (len(digits) > 1)}{digits[1:]}e{place - 1:+d}"
    if place <= 0:
        return f"{sign}0.{'0' * -place}{digits}"
    return f"{sign}{digits[:place].ljust(place, '0')}{'.' * (len(digits) > place)}{digits[place:]}"


@cache
def powers_of_ten() -> npt.NDArray[np.float64]:
    """Return the powers 10^0 to 10^75, each rounded to the nearest float64."""
    return np.array([float(f"1e{exponent}") for exponent in range(76)], dtype=np.float64)

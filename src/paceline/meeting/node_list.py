"""Slurm's lists of nodes, such as ``gpu[01-03,07],login``, and of numbers per node, such as ``2(x3),1``. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Final

from paceline.errors import UsageError, printable

MAX_NODES: Final = 100_000
"""The maximum number of names in a list. A damaged list may have a range that is too large for memory."""
_SHOWN_CHARS: Final = 80
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def parse_node_list(text: str, name: str = "the node list") -> tuple[str, ...]:
    """Return the names in a list of nodes, in order. Raises UsageError, whose text contains the `name` of the list."""
    names: list[str] = []
    for pattern in _split(text, name):
        names += itertools.islice(_expand(pattern, text, name), MAX_NODES + 1)
        if len(names) > MAX_NODES:
            raise _unreadable(text, name, f"it has more than {MAX_NODES:,} names")
    return tuple(names)


def parse_repeated(text: str, name: str) -> tuple[int, ...]:
    """Return the numbers of a list with repetitions: ``2(x3),1`` gives (2, 2, 2, 1). Raises UsageError if invalid."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part)
        times = 0 if found is None else int(found[2] or 1)
        if found is None or not 0 < times <= MAX_NODES - len(numbers):
            raise _unreadable(text, name, "expected numbers such as 2(x3),1")
        numbers += [int(found[1])] * times
    return tuple(numbers)


def _split(text: str, name: str) -> Iterator[str]:
    """Yield the parts of a list of nodes, which are separated by commas outside of brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _unreadable(text, name, "a bracket has no partner")
        if character == "," and not depth:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _unreadable(text, name, "a bracket has no partner")
    yield text[start:]


def _expand(pattern: str, text: str, name: str) -> Iterator[str]:
    """Yield the names that one part of the list describes: one for each combination of the numbers in its brackets."""
    pieces: list[Sequence[str]] = []
    for index, piece in enumerate(re.split(r"[\[\]]", pattern)):
        numbers = itertools.islice(_numbers(piece, text, name), MAX_NODES + 1)
        pieces.append(tuple(numbers) if index % 2 else (piece,))
    for words in itertools.product(*pieces):
        found = "".join(words)
        if not found or not found.isprintable() or any(character.isspace() for character in found):
            raise _unreadable(text, name, "a name is empty or contains a space")
        yield found


def _numbers(ranges: str, text: str, name: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (0, -1) if found is None else (int(found[1]), int(found[2] or found[1]))
        if found is None or last < first:
            raise _unreadable(text, name, f"expected a number or an ascending range instead of {part!r}")
        if last - first >= MAX_NODES:
            raise _unreadable(text, name, f"it has more than {MAX_NODES:,} names")
        for number in range(first, last + 1):
            yield str(number).zfill(len(found[1]))


def _unreadable(text: str, name: str, reason: str) -> UsageError:
    return UsageError(f"{name} is {printable(text, _SHOWN_CHARS)!r}: {reason}, as in gpu[01-03,07],login")

"""The coordinator's table: collect the requests of all ranks, and find requests that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from paceline.errors import name_ranks
from paceline.protocol.negotiation.requests import (
    DIVIDE_ROWS,
    HAVE_DIFFERENT_ROWS,
    Key,
    NegotiatedResponse,
    NegotiationDecision,
    NegotiationReport,
    TensorRequest,
)


class RequestTable:
    """The incomplete requests: some ranks have not requested the same name yet."""

    def __init__(self, process_sets: Mapping[int, tuple[int, ...]]) -> None:
        """`process_sets` contains the ranks of each process set. Its owner adds and removes process sets."""
        self._process_sets = process_sets
        self._requests: dict[Key, dict[int, TensorRequest]] = {}
        self._sets: dict[str, set[int]] = {}
        """The process sets of the incomplete requests of each name."""
        self._joined: list[int] = []

    def missing(self) -> dict[Key, tuple[int, ...]]:
        """Return the ranks that each incomplete request waits for."""
        return {key: tuple(sorted(self._missing(key))) for key in self._requests}

    def add(self, reports: Sequence[NegotiationReport]) -> NegotiationDecision:
        """Return the decision after the report of each rank."""
        changed: dict[Key, None] = {}
        invalid: set[int] = set()
        for rank, report in enumerate(reports):
            invalid.update(report.invalid)
            if report.joins and rank not in self._joined:
                self._joined.append(rank)
                changed.update(dict.fromkeys(self._requests))
            for request in report.requests:
                self._requests.setdefault(request.key, {})[rank] = request
                self._sets.setdefault(request.name, set()).add(request.process_set)
                changed[request.key] = None
        responses = [self._complete(key) for key in changed if not self._missing(key)]
        for name in dict.fromkeys(name for _, name in changed):
            responses += self._find_different_sets(name)
        last_joined = -1
        if len(self._joined) == len(reports):
            last_joined = self._joined[-1]
            self._joined.clear()
        return NegotiationDecision(tuple(responses), tuple(sorted(invalid)), tuple(sorted(self._joined)), last_joined)

    def remove_set(self, number: int) -> None:
        """Drop the requests of a process set that was removed."""
        for key in [key for key in self._requests if key[0] == number]:
            self._remove(key)

    def _missing(self, key: Key) -> set[int]:
        """Return the ranks that have neither requested the operation nor joined."""
        return {*self._process_sets[key[0]]} - {*self._joined} - self._requests[key].keys()

    def _complete(self, key: Key) -> NegotiatedResponse:
        requests = self._remove(key)
        first = requests[min(requests)]
        error = find_mismatch(requests)
        if not error and first.root in self._joined:
            error = describe_joined_root(first)
        return NegotiatedResponse(first, error)

    def _remove(self, key: Key) -> dict[int, TensorRequest]:
        self._sets[key[1]].discard(key[0])
        if not self._sets[key[1]]:
            del self._sets[key[1]]
        return self._requests.pop(key)

    def _find_different_sets(self, name: str) -> list[NegotiatedResponse]:
        """Return errors if ranks wait for each other, because they requested `name` in different process sets."""
        keys = [(number, name) for number in sorted(self._sets.get(name, ()))]
        if len(keys) < 2:
            return []
        requested = {rank for key in keys for rank in self._requests[key]}
        if not all(self._missing(key) <= requested for key in keys):
            return []
        sides = [
            f"{name_ranks(sorted(self._requests[key]))} used process set {key[0]} of "
            f"{name_ranks(self._process_sets[key[0]])}"
            for key in keys
        ]
        error = f"Mismatched process sets for {name!r}: {'; '.join(sides)}. Pass the same process set on all ranks"
        return [NegotiatedResponse(next(iter(self._remove(key).values())), error) for key in keys]


def _shape_to_compare(request: TensorRequest) -> str:
    shape = [str(length) for length in request.shape]
    if request.operation in HAVE_DIFFERENT_ROWS:
        shape[:1] = ["*"] if shape else []
    return f"[{', '.join(shape)}]"


_Describe: TypeAlias = Callable[[TensorRequest], object]
_CHECKS: Final[tuple[tuple[str, str, _Describe], ...]] = (
    # The title of the error (`%s` is the operation), its verb, and the value that must be equal.
    ("operations", "did an", lambda request: request.operation.upper()),
    ("data types", "had type", lambda request: request.dtype),
    ("reduction operation", "specified reduction", lambda request: request.reduction),
    ("prescale and/or postscale factors", "used", lambda request: (request.prescale, request.postscale)),
    ("%s tensor shapes", "sent a tensor of shape", _shape_to_compare),
    ("%s root ranks", "specified root rank", lambda request: request.root),
    ("%s CPU/GPU device selection", "specified device", lambda request: request.device.upper()),
    ("groups", "specified group", lambda request: request.group),
)


def find_mismatch(requests: Mapping[int, TensorRequest]) -> str:
    """Return the error for requests of one name, by rank. Empty if the ranks can run the operation."""
    first = requests[min(requests)]
    common = first.common()
    are_equal = all(request.common() == common for request in requests.values())
    for title, verb, describe in () if are_equal else _CHECKS:
        sides: dict[str, list[int]] = {}
        for rank in sorted(requests):
            sides.setdefault(str(describe(requests[rank])), []).append(rank)
        if len(sides) > 1:
            values = list(sides)
            by_rank = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in sides.items())
            return (
                f"Mismatched {title.replace('%s', first.operation.upper())}: One rank {verb} {values[0]}, but another "
                f"rank {verb} {values[1]}. In {first.operation} {first.name!r}, {by_rank}. Pass equal values on all "
                "ranks"
            )
    if first.operation in DIVIDE_ROWS and not first.shape:
        return (
            f"{first.operation} {first.name!r}: got a tensor of 0 dimensions, expected one or more, because its rows "
            "are divided; pass tensor.reshape(1)"
        )
    return ""


def describe_joined_root(request: TensorRequest) -> str:
    return (
        f"{request.operation} {request.name!r}: its root, rank {request.root}, has joined and has no tensor; choose a "
        "root that has not joined"
    )

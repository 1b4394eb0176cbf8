"""Create the ABORT message and the error of each rank for a failed call. Pure.

All ranks raise the same kind of error with the same text; for a mismatch, each rank adds its own call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from paceline.collectives.calls import CollectiveCall, describe_mismatch
from paceline.collectives.network.frames import Abort, Head
from paceline.errors import CollectiveError, MismatchError, RankLostError, name_ranks
from paceline.transport.decoding import UNREADABLE, register_type

_REFUSES: Final = "the group refuses further work"
_MAX_TEXT: Final = 100_000
_SAME: Final = f"every rank must make the same calls in the same order with the same shapes and dtypes, and {_REFUSES}"


class CurrentCall(NamedTuple):
    """A call from one rank's view."""

    group: str
    rank: int
    call: CollectiveCall
    sequence: int

    def __str__(self) -> str:
        return f"{self.call}, call {self.sequence} of group {self.group!r}"


def lost(place: CurrentCall, ranks: tuple[int, ...]) -> Abort:
    """Return the ABORT for ranks that died or left."""
    text = f"{name_ranks(ranks)} died or left during {place}; {_REFUSES}"
    return Abort("lost", text, ranks, {}, place.sequence)


def late(place: CurrentCall, culprits: Mapping[int, str], timeout_s: float) -> Abort:
    """Return the ABORT for ranks that delayed a call beyond its timeout."""
    told = "; ".join(f"rank {rank} {what}" for rank, what in culprits.items())
    text = f"{place} did not finish within {timeout_s:.3g} s: {told}; {_REFUSES}"
    return Abort("lost", text, tuple(culprits), {}, place.sequence)


def failed(place: CurrentCall, error: BaseException) -> Abort:
    """Return the ABORT for an error of this rank."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = f"rank {place.rank} failed during {place}, with {what}; {_REFUSES}"
    return Abort("error", text[:_MAX_TEXT], (place.rank,), {}, place.sequence)


def of_error(place: CurrentCall, error: BaseException) -> Abort:
    """Return the ABORT for an error of this rank; errors of groups are forwarded unchanged."""
    if isinstance(error, CollectiveError):
        return msgspec.structs.replace(abort_of(error), sequence=place.sequence)
    return failed(place, error)


def abort_of(error: CollectiveError) -> Abort:
    """Return the ABORT for an error with a complete text."""
    text = str(error)[:_MAX_TEXT]
    if isinstance(error, RankLostError):
        return Abort("lost", text, error.ranks, {}, -1)
    return Abort("mismatch" if isinstance(error, MismatchError) else "error", text, (), {}, -1)


def garbled(place: CurrentCall, rank: int, error: Exception) -> Abort:
    """Return the ABORT for a rank that sent invalid bytes."""
    text = f"rank {rank} sent invalid bytes during {place} ({error}); {_REFUSES}"
    return Abort("error", text, (rank,), {}, place.sequence)


def disagreement(place: CurrentCall, calls: Mapping[int, CollectiveCall]) -> Abort:
    """Return the ABORT for ranks in different calls of one number."""
    told = {place.rank: place.call, **calls}
    return Abort("mismatch", str(describe_mismatch(told, place.group, place.sequence)), (), told, place.sequence)


def unexpected(place: CurrentCall, rank: int, frame: Head) -> Abort:
    """Return the ABORT for a message of another call or length."""
    header = frame.header
    try:
        theirs = msgspec.msgpack.decode(frame.text, type=register_type(CollectiveCall))
    except UNREADABLE as error:
        return garbled(place, rank, error)
    calls = {place.rank: place.call, rank: theirs}
    if header.sequence == place.sequence and theirs != place.call:
        text = str(describe_mismatch(calls, place.group, place.sequence))
        return Abort("mismatch", text, (), calls, place.sequence)
    if header.sequence != place.sequence:
        text = (
            f"the ranks of group {place.group!r} are not in the same call: rank {place.rank} is in call "
            f"{place.sequence}, {place.call}, and rank {rank} in call {header.sequence}, {theirs}; {_SAME}"
        )
    else:
        text = (
            f"rank {rank} sent a message of {header.nbytes} bytes that rank {place.rank} did not expect in {place}: "
            f"they disagree about sizes or about the algorithm; {_REFUSES}"
        )
    return Abort("mismatch", text, (), {}, place.sequence)


def received(place: CurrentCall, abort: Abort) -> Abort:
    """Return the ABORT of another rank; for a mismatch, add this rank's call."""
    if abort.kind != "mismatch" or not abort.calls or abort.sequence != place.sequence:
        return abort
    return msgspec.structs.replace(abort, calls={**abort.calls, place.rank: place.call})


def to_error(abort: Abort, group: str) -> CollectiveError:
    """Return the error that a rank raises for an ABORT."""
    if abort.kind == "lost":
        return RankLostError(abort.message, abort.ranks)
    if abort.kind == "error":
        return CollectiveError(abort.message)
    if abort.calls:
        return describe_mismatch(abort.calls, group, abort.sequence)
    return MismatchError(abort.message)

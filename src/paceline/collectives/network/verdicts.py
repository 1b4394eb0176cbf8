"""What is said when a call fails: the ABORT for the others, and the error that each rank raises. Pure.

Every rank raises the same kind of error with the same text, except that for a mismatch each adds its own call to those
of which it was told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from paceline.collectives.calls import CollectiveCall, describe_mismatch, name_ranks
from paceline.collectives.network.frames import Abort, Head
from paceline.errors import CollectiveError, MismatchError, RankLostError
from paceline.transport.decoding import UNREADABLE, known

_REFUSES: Final = "the group refuses further work"
_MAX_TEXT: Final = 100_000
_SAME: Final = f"every rank must make the same calls in the same order with the same shapes and dtypes, and {_REFUSES}"


class CurrentCall(NamedTuple):
    """A call as one rank is in it."""

    group: str
    rank: int
    call: CollectiveCall
    sequence: int

    def __str__(self) -> str:
        return f"{self.call}, call {self.sequence} of group {self.group!r}"


def lost(place: CurrentCall, ranks: tuple[int, ...]) -> Abort:
    """Some ranks died or left."""
    text = f"{name_ranks(ranks)} died or left during {place}; {_REFUSES}"
    return Abort("lost", text, ranks, {}, place.sequence)


def late(place: CurrentCall, culprits: Mapping[int, str], timeout_s: float) -> Abort:
    """Some ranks kept a call from coming to its end in time."""
    told = "; ".join(f"rank {rank} {what}" for rank, what in culprits.items())
    text = f"{place} did not finish within {timeout_s:.3g} s: {told}; {_REFUSES}"
    return Abort("lost", text, tuple(culprits), {}, place.sequence)


def failed(place: CurrentCall, error: BaseException) -> Abort:
    """This rank itself failed."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = f"rank {place.rank} failed during {place}, with {what}; {_REFUSES}"
    return Abort("error", text[:_MAX_TEXT], (place.rank,), {}, place.sequence)


def of_error(place: CurrentCall, error: BaseException) -> Abort:
    """This rank gives up because of an error that others should hear of as it is, if it is one of a group's."""
    if isinstance(error, CollectiveError):
        return msgspec.structs.replace(abort_of(error), sequence=place.sequence)
    return failed(place, error)


def abort_of(error: CollectiveError) -> Abort:
    """Return what others should hear of an error that has all to say in its text."""
    text = str(error)[:_MAX_TEXT]
    if isinstance(error, RankLostError):
        return Abort("lost", text, error.ranks, {}, -1)
    return Abort("mismatch" if isinstance(error, MismatchError) else "error", text, (), {}, -1)


def garbled(place: CurrentCall, rank: int, error: Exception) -> Abort:
    """A rank sent bytes that are no message."""
    text = f"what rank {rank} sent during {place} cannot be read ({error}); {_REFUSES}"
    return Abort("error", text, (rank,), {}, place.sequence)


def disagreement(place: CurrentCall, calls: Mapping[int, CollectiveCall]) -> Abort:
    """Ranks are in different calls of one number."""
    told = {place.rank: place.call, **calls}
    return Abort("mismatch", str(describe_mismatch(told, place.group, place.sequence)), (), told, place.sequence)


def unexpected(place: CurrentCall, rank: int, frame: Head) -> Abort:
    """A rank sent a message of another call, or one of another length."""
    header = frame.header
    try:
        theirs = msgspec.msgpack.decode(frame.text, type=known(CollectiveCall))
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
    """Another rank told us; for a mismatch, our own call belongs to the picture."""
    if abort.kind != "mismatch" or not abort.calls or abort.sequence != place.sequence:
        return abort
    return msgspec.structs.replace(abort, calls={**abort.calls, place.rank: place.call})


def to_error(abort: Abort, group: str) -> CollectiveError:
    """Return what a rank raises."""
    if abort.kind == "lost":
        return RankLostError(abort.message, abort.ranks)
    if abort.kind == "error":
        return CollectiveError(abort.message)
    if abort.calls:
        return describe_mismatch(abort.calls, group, abort.sequence)
    return MismatchError(abort.message)

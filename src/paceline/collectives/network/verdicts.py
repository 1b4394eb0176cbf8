"""Create the ABORT message of a failed call, from which each rank makes the error that it raises. Pure.

All ranks raise an error with the same text. If the ranks made different calls, each rank adds its own call to the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall, describe_mismatch
from paceline.collectives.network.frames import Head
from paceline.decoded_types import register_type
from paceline.errors import CollectiveError, name_ranks
from paceline.transport.decoding import UNREADABLE

_REFUSES: Final = "the group refuses further work"
_MAX_TEXT: Final = 100_000
_SAME: Final = f"every rank must make the same calls in the same order with the same shapes and dtypes, and {_REFUSES}"


class CurrentCall(NamedTuple):
    """The current call of this rank, for error messages."""

    group: str
    rank: int
    call: CollectiveCall
    sequence: int

    def __str__(self) -> str:
        return f"{self.call}, call {self.sequence} of group {self.group!r}"


def waiting(current: CurrentCall, ranks: tuple[int, ...], waited_s: float) -> str:
    """Return the message of a rank that waits until shortly before the timeout."""
    return f"paceline: rank {current.rank} has waited {waited_s:.3g} s for {name_ranks(ranks)} in {current}"


def lost(current: CurrentCall, ranks: tuple[int, ...]) -> Abort:
    text = f"{name_ranks(ranks)} died or left during {current}; {_REFUSES}"
    return Abort("lost", text, ranks, {}, current.sequence)


def late(current: CurrentCall, culprits: Mapping[int, str], timeout_s: float) -> Abort:
    reasons = "; ".join(f"rank {rank} {reason}" for rank, reason in culprits.items())
    text = f"{current} did not finish within {timeout_s:.3g} s: {reasons}; {_REFUSES}"
    return Abort("lost", text, tuple(culprits), {}, current.sequence)


def failed(current: CurrentCall, error: BaseException) -> Abort:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = f"rank {current.rank} failed during {current}, with {reason}; {_REFUSES}"
    return Abort("error", text[:_MAX_TEXT], (current.rank,), {}, current.sequence)


def of_error(current: CurrentCall, error: BaseException) -> Abort:
    """Return the ABORT message for ``error``. It contains the text of a CollectiveError; for other errors, the text
    names this call."""
    if isinstance(error, CollectiveError):
        return msgspec.structs.replace(Abort.of(error), sequence=current.sequence)
    return failed(current, error)


def garbled(current: CurrentCall, rank: int, error: Exception) -> Abort:
    text = f"rank {rank} sent invalid bytes during {current} ({error}); {_REFUSES}"
    return Abort("error", text, (rank,), {}, current.sequence)


def disagreement(current: CurrentCall, calls: Mapping[int, CollectiveCall]) -> Abort:
    all_calls = {current.rank: current.call, **calls}
    text = str(describe_mismatch(all_calls, current.group, current.sequence))
    return Abort("mismatch", text, (), all_calls, current.sequence)


def unexpected(current: CurrentCall, rank: int, frame: Head) -> Abort:
    header = frame.header
    try:
        peer_call = msgspec.msgpack.decode(frame.text, type=register_type(CollectiveCall))
    except UNREADABLE as error:
        return garbled(current, rank, error)
    calls = {current.rank: current.call, rank: peer_call}
    if header.sequence == current.sequence and peer_call != current.call:
        text = str(describe_mismatch(calls, current.group, current.sequence))
        return Abort("mismatch", text, (), calls, current.sequence)
    if header.sequence != current.sequence:
        text = (
            f"the ranks of group {current.group!r} are not in the same call: rank {current.rank} is in call "
            f"{current.sequence}, {current.call}, and rank {rank} in call {header.sequence}, {peer_call}; {_SAME}"
        )
    else:
        text = (
            f"rank {rank} sent an unexpected message of {header.nbytes} bytes to rank {current.rank} in {current}: "
            f"the ranks disagree about sizes or about the algorithm; {_REFUSES}"
        )
    return Abort("mismatch", text, (), {}, current.sequence)


def received(current: CurrentCall, abort: Abort) -> Abort:
    """Return the ABORT for this rank's error, given another rank's ABORT. If the ABORT reports a mismatch in the
    current call, add this rank's call.
    """
    if abort.kind != "mismatch" or not abort.calls or abort.sequence != current.sequence:
        return abort
    return msgspec.structs.replace(abort, calls={**abort.calls, current.rank: current.call})

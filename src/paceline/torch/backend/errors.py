"""Errors for PyTorch programs: each is an error of Paceline and a ``DistBackendError`` (a RuntimeError)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NamedTuple

from torch.distributed import DistBackendError

from paceline.errors import (
    CollectiveError,
    DeadlineError,
    GroupClosedError,
    MismatchError,
    PacelineError,
    PeerError,
    RankLostError,
)


class BackendError(PeerError, DistBackendError):
    """An error caused by another rank, if no other class of this module fits."""


class BackendCollectiveError(CollectiveError, DistBackendError):
    """See :class:`CollectiveError`."""


class BackendMismatchError(MismatchError, DistBackendError):
    """See :class:`MismatchError`."""


class BackendRankLostError(RankLostError, DistBackendError):
    """See :class:`RankLostError`."""


class BackendGroupClosedError(GroupClosedError, DistBackendError):
    """See :class:`GroupClosedError`."""


class BackendDeadlineError(DeadlineError, DistBackendError):
    """See :class:`DeadlineError`."""


_WAITED: Final = re.compile(r"\b(with)?in [\d.e+-]+ s\b")
_RANK: Final = re.compile(r"\branks? \d")
_MOST_SHOWN: Final = 8
_KINDS: dict[type[PacelineError], type[DistBackendError]] = {
    CollectiveError: BackendCollectiveError,
    MismatchError: BackendMismatchError,
    GroupClosedError: BackendGroupClosedError,
    DeadlineError: BackendDeadlineError,
}


class Terms(NamedTuple):
    """Properties of a process group that its error messages need."""

    timeout: timedelta
    global_ranks: tuple[int, ...] = ()
    """The rank in the whole program of each rank of this group; empty if both numbers are always equal."""


def in_torch_terms(error: BaseException, terms: Terms) -> BaseException:
    """Convert a peer's error to an error of ``torch.distributed``.

    Return other errors, such as UsageError, unchanged.
    """
    if not isinstance(error, PeerError) or isinstance(error, DistBackendError):
        return error
    if isinstance(error, RankLostError):
        text = str(error)
        if _WAITED.search(text):
            # PyTorch's own tests expect the word "timeout" in the error of a wait that timed out.
            text += f"; the timeout of this process group is {terms.timeout.total_seconds():g} s"
        return BackendRankLostError(text + _numbering(text, terms.global_ranks, error.ranks), error.ranks)
    text = str(error)
    return _KINDS.get(type(error), BackendError)(text + _numbering(text, terms.global_ranks))


def _numbering(text: str, global_ranks: Sequence[int], named: Sequence[int] = ()) -> str:
    """Return a text with the rank in the program of each group rank in `text`; "" if the numbers are equal."""
    if not _RANK.search(text) or all(rank == number for number, rank in enumerate(global_ranks)):
        return ""
    shown = [rank for rank in named if rank < len(global_ranks)] or range(len(global_ranks))
    listed = ", ".join(f"{rank} is rank {global_ranks[rank]}" for rank in shown[:_MOST_SHOWN])
    more = ", ..." if len(shown) > _MOST_SHOWN else ""
    return f"; ranks are numbers in this process group: {listed}{more} of the program"

"""Define the message with the reason for a group's end. Ranks send it to each other, so all raise one error. Pure."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from paceline.collectives.calls import CollectiveCall, describe_mismatch
from paceline.errors import CollectiveError, MismatchError, RankLostError

_MAX_TEXT: Final = 100_000


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """The reason for the end of a group. The first rank that detects it sends this message to the other ranks."""

    kind: Literal["mismatch", "lost", "error"]
    message: str
    ranks: tuple[int, ...] = ()
    """The ranks that were lost, or the rank that failed."""
    calls: dict[int, CollectiveCall] = {}
    """If the ranks made different calls, the calls that are known, by rank; empty for other reasons."""
    sequence: int = -1

    @classmethod
    def of(cls, error: BaseException) -> Abort:
        kind: Literal["mismatch", "lost", "error"] = "error"
        if isinstance(error, MismatchError):
            kind = "mismatch"
        elif isinstance(error, RankLostError):
            kind = "lost"
        return cls(kind, str(error)[:_MAX_TEXT], tuple(getattr(error, "ranks", ())))

    def error(self, group: str) -> CollectiveError:
        if self.kind == "lost":
            return RankLostError(self.message, self.ranks)
        if self.kind == "error":
            return CollectiveError(self.message)
        return describe_mismatch(self.calls, group, self.sequence) if self.calls else MismatchError(self.message)

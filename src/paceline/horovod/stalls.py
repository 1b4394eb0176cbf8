"""Find operations that some ranks have requested and other ranks have not, for a long time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.errors import name_ranks
from paceline.protocol.negotiation.requests import Key

_MOST_SHOWN: Final = 6
"""Names per missing rank in a warning."""


class StallInspector:
    """Decides when to warn of the coordinator's incomplete requests, and when to end them."""

    def __init__(self, warning_s: float, failure_s: float) -> None:
        """A `failure_s` of 0 means that the ranks wait forever."""
        self._warning_s, self._failure_s = warning_s, failure_s
        self._since: dict[Key, float] = {}
        self._warned: set[Key] = set()

    def inspect(self, missing: Mapping[Key, tuple[int, ...]], now_s: float) -> tuple[str, dict[Key, str]]:
        """Return a warning, or an empty text, and the errors of the requests that waited too long.

        `missing` has the ranks that each request waits for.
        """
        self._since = {key: self._since.get(key, now_s) for key in missing}
        self._warned &= missing.keys()
        late = [key for key in missing if now_s - self._since[key] >= self._warning_s and key not in self._warned]
        self._warned.update(late)
        ranks: dict[int, list[str]] = {}
        for key in late:
            for rank in missing[key]:
                ranks.setdefault(rank, []).append(key[1])
        warning = ""
        if ranks:
            lines = [f"{rank}: {_shorten(names)}" for rank, names in sorted(ranks.items())]
            warning = (
                "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
                f"waiting for remainder of ranks for more than {self._warning_s:g} seconds. Check that all ranks call "
                "the same operations. Missing ranks:\n" + "\n".join(lines)
            )
        failed = {
            key: f"{key[1]!r} has waited for {name_ranks(missing[key])} for {self._failure_s:g} s "
            "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS). Check that all ranks call the same operations"
            for key in missing
            if 0 < self._failure_s <= now_s - self._since[key]
        }
        return warning, failed


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return f"[{shown}, ... {len(names) - _MOST_SHOWN} more]" if len(names) > _MOST_SHOWN else f"[{shown}]"

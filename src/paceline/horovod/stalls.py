"""Find operations that wait for ranks for a long time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from paceline.errors import name_ranks
from paceline.observe.stuck.report import format_call
from paceline.observe.stuck.stacks import StackFrame
from paceline.protocol.negotiation.requests import Key

_MOST_SHOWN: Final = 6
"""Names per missing rank in a warning."""


class StallInspector:
    """Decides when incomplete requests cause a warning, and when they end Horovod."""

    def __init__(self, warning_s: float, failure_s: float) -> None:
        """A `failure_s` of 0 means that the ranks wait forever."""
        self._warning_s, self._failure_s = warning_s, failure_s
        self._since: dict[Key, float] = {}
        self._warned: set[Key] = set()

    def find_late(self, missing: Mapping[Key, tuple[int, ...]], time_s: float) -> tuple[list[Key], list[Key]]:
        """Return the requests to warn of, and the requests that have waited too long.

        `missing` contains the ranks that each request waits for.
        """
        if not missing:
            self._since.clear()
            self._warned.clear()
            return [], []
        self._since = {key: self._since.get(key, time_s) for key in missing}
        self._warned &= missing.keys()
        waits_s = {key: time_s - since_s for key, since_s in self._since.items()}
        late = [key for key in missing if waits_s[key] >= self._warning_s and key not in self._warned]
        return late, [key for key in missing if 0 < self._failure_s <= waits_s[key]]

    def describe(
        self, missing: Mapping[Key, tuple[int, ...]], time_s: float, stacks: Sequence[Sequence[StackFrame]]
    ) -> tuple[str, str]:
        """Return a warning, and the error that ends Horovod on all ranks. Either text may be empty.

        `stacks` has the calls of each rank's script, the innermost last.
        """
        late, failed = self.find_late(missing, time_s)
        self._warned.update(late)
        ranks: dict[int, list[str]] = {}
        for key in late:
            for rank in missing[key]:
                ranks.setdefault(rank, []).append(key[1])
        warning = error = ""
        if ranks:
            found = [
                "\n  ".join([f"{rank}: {_shorten(names)}", *map(format_call, stacks[rank])])
                for rank, names in sorted(ranks.items())
            ]
            warning = (
                "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
                f"waiting for remainder of ranks for more than {self._warning_s:g} seconds. Check that all ranks call "
                "the same operations. Missing ranks:\n" + "\n".join(found)
            )
        if failed:
            ranks_of_first = missing[failed[0]]
            places = "; ".join(
                " executes ".join([f"rank {rank}", *map(format_call, stacks[rank][-1:])]) for rank in ranks_of_first
            )
            error = (
                f"{failed[0][1]!r} has waited for {name_ranks(ranks_of_first)} for {self._failure_s:g} s "
                f"(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS): {places}. Check that all ranks call the same operations"
            )
        return warning, error


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return f"[{shown}, ... {len(names) - _MOST_SHOWN} more]" if len(names) > _MOST_SHOWN else f"[{shown}]"

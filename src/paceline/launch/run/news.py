"""What ``paceline run`` says of processes that died and were replaced: kept until somebody has time to say it.

Who hears of it is in a hurry: the thread of the link to the scheduler, which sends heartbeats too, and must not be held
up by whoever reads standard error.
"""

from __future__ import annotations

from collections.abc import Iterable


class News:
    """Lines to be said. That a server died is one of them when another one has joined: it may be one too many."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._notes: dict[str, str] = {}  # by the place of a server, in the order of the deaths
        self._known: set[int] | None = None

    def add(self, line: str) -> None:
        """Say a line soon."""
        self._lines.append(line)

    def add_when_replaced(self, place: str, line: str) -> None:
        """Say a line when another server has joined. Of a place whose line is waiting the first one counts."""
        self._notes.setdefault(place, line)

    def take_servers(self, incarnations: Iterable[int], *, is_lost: bool) -> None:
        """Take who is there, and whether something is lost, which is then all there is to say."""
        now = set(incarnations)
        joined = set() if self._known is None else now - self._known
        self._known = now | (self._known or set())
        for place in [] if is_lost else list(self._notes)[: len(joined)]:
            self._lines.append(self._notes.pop(place))

    def take_lines(self) -> list[str]:
        """Return what is to be said now, and forget it."""
        lines, self._lines = self._lines, []
        return lines

"""How many answers of one connection are due to a request number, where it is not one to a request in flight."""

from __future__ import annotations


class DueAnswers:
    """Answers to requests that went out twice over one connection, and to requests that were given up, the orphans."""

    def __init__(self) -> None:
        self._repeated: dict[int, int] = {}
        self._orphans: dict[int, int] = {}

    def sent_again(self, number: int) -> None:
        """Note that a request in flight goes out once more over the connection."""
        self._repeated[number] = self._repeated.get(number, 1) + 1

    def heard(self, number: int) -> None:
        """Take note of an answer to a request in flight, whatever it says."""
        due = self._repeated.pop(number, 1) - 1
        if due:
            self._repeated[number] = due

    def given_up(self, number: int, *, is_due: bool) -> int:
        """Take note that nobody waits for a request any more; return how many answers to it are due.

        `is_due`: whether one would be if it has gone out once.
        """
        due = self._repeated.pop(number, int(is_due))
        if due:
            self._orphans[number] = due
        return due

    def orphan_heard(self, number: int) -> bool:
        """Take an answer that no request waits for any more; return False if none was due either."""
        due = self._orphans.pop(number, 0)
        if due > 1:
            self._orphans[number] = due - 1
        return due > 0

    def disconnected(self) -> int:
        """Expect nothing any more; return how many orphans were due."""
        orphans = sum(self._orphans.values())
        self._orphans.clear()
        self._repeated.clear()
        return orphans

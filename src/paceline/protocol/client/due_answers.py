"""The number of answers that one connection still owes to a request number, if it is not 1."""

from __future__ import annotations


class DueAnswers:
    """Answers to requests that were sent twice on one connection, and to abandoned requests (orphans)."""

    def __init__(self) -> None:
        self._repeated: dict[int, int] = {}
        self._orphans: dict[int, int] = {}

    def sent_again(self, number: int) -> None:
        """Record that a request in flight is sent again on the connection."""
        self._repeated[number] = self._repeated.get(number, 1) + 1

    def received(self, number: int) -> None:
        """Record any answer to a request in flight."""
        due = self._repeated.pop(number, 1) - 1
        if due:
            self._repeated[number] = due

    def given_up(self, number: int, *, is_due: bool) -> int:
        """Record that a request is abandoned; return the number of answers that are due.

        `is_due`: whether one answer is due if the request was sent once.
        """
        due = self._repeated.pop(number, int(is_due))
        if due:
            self._orphans[number] = due
        return due

    def orphan_received(self, number: int) -> bool:
        """Record an answer to an abandoned request; return False if none was due."""
        due = self._orphans.pop(number, 0)
        if due > 1:
            self._orphans[number] = due - 1
        return due > 0

    def disconnected(self) -> int:
        """Drop all due answers; return the number of orphans among them."""
        orphans = sum(self._orphans.values())
        self._orphans.clear()
        self._repeated.clear()
        return orphans

"""Servers that one has to fill: which buckets were sent to them whole, which they have confirmed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from paceline.protocol.buckets import Buckets, count
from paceline.protocol.replication.events import Instruction, ReportFilled

_REPORT_BUCKETS: Final = 64


class Fills:
    """The fills of one server, by one map; `numbers` gives those by which buckets are confirmed."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._wanted: dict[int, Buckets] = {}  # target → what it is being filled with
        self._sent: dict[int, Buckets] = {}  # of these, the ones that were sent to it
        self._confirmed: dict[int, Buckets] = {}  # of those, the ones that it has confirmed
        self._reported: dict[int, Buckets] = {}
        self._states: dict[int, tuple[int, int]] = {}  # number → target, bucket that is on its way

    @property
    def targets(self) -> tuple[int, ...]:
        """The servers that are being filled."""
        return tuple(self._wanted)

    def wanted(self, target: int) -> Buckets:
        """Return what a server is being filled with."""
        return self._wanted.get(target, 0)

    def unsent(self, target: int) -> Buckets:
        """Return what was not sent to a server yet: of these buckets it gets no push."""
        return self._wanted.get(target, 0) & ~self._sent.get(target, 0)

    def change(self, wanted: Mapping[int, Buckets], *, follows: bool) -> None:
        """Take another map's fills; `follows`: no map was missed, so what was confirmed is there still."""
        confirmed = self._confirmed if follows else {}
        self._wanted = dict(wanted)
        self._confirmed = {target: confirmed.get(target, 0) & buckets for target, buckets in wanted.items()}
        self._sent = dict(self._confirmed)
        self._reported, self._states = {}, {}  # what is on its way is of an older version: it is not taken

    def is_sending(self, target: int) -> bool:
        """Whether a bucket is on its way to a server."""
        return any(state[0] == target for state in self._states.values())

    def send(self, target: int, left: Buckets) -> tuple[int, int]:
        """Take the first bucket of `left` as sent; return its number and the bucket."""
        bucket = (left & -left).bit_length() - 1
        self._sent[target] |= 1 << bucket
        number = next(self._numbers)
        self._states[number] = (target, bucket)
        return number, bucket

    def lose(self, target: int) -> None:
        """Have those buckets sent again to a server that it has not confirmed."""
        self._states = {number: state for number, state in self._states.items() if state[0] != target}
        if target in self._wanted:
            self._sent[target] = self._confirmed[target]

    def confirm(self, target: int, number: int) -> bool:
        """Take a server's word that it has the bucket with a number; return whether that is news."""
        state = self._states.pop(number, None)
        if state is None or state[0] != target:
            return False
        self._confirmed[target] |= 1 << state[1]
        return True

    def to_report(self, target: int) -> Buckets:
        """Return what a server has confirmed, if it is time to report that; else none."""
        confirmed = self._confirmed[target]
        news = confirmed & ~self._reported.get(target, 0)
        if not news or (confirmed != self._wanted[target] and count(news) < _REPORT_BUCKETS):
            return 0
        self._reported[target] = confirmed
        return confirmed

    def reports(self, target: int, version: int) -> list[Instruction]:
        """Return the report of what a server has confirmed, as of a version, if it is time for one."""
        filled = self.to_report(target)
        return [ReportFilled(version, target, filled)] if filled else []

    def validate(self) -> None:
        """Assert the invariants."""
        for target, wanted in self._wanted.items():
            assert not self._sent[target] & ~wanted
            assert not self._confirmed[target] & ~self._sent[target]

"""Fills: the complete buckets that a server sends to new successors, and their confirmations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from paceline.protocol.buckets import Buckets, count
from paceline.protocol.replication.events import Instruction, ReportFilled

_REPORT_BUCKETS: Final = 64


class Fills:
    """The fills of one server in one view. `numbers` yields numbers that identify buckets in confirmations."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._wanted: dict[int, Buckets] = {}  # target → the buckets that it needs
        self._sent: dict[int, Buckets] = {}
        self._confirmed: dict[int, Buckets] = {}
        self._reported: dict[int, Buckets] = {}
        self._states: dict[int, tuple[int, int]] = {}  # number → target, bucket in flight

    @property
    def targets(self) -> tuple[int, ...]:
        """The servers that are being filled."""
        return tuple(self._wanted)

    def wanted(self, target: int) -> Buckets:
        """Return the buckets that a server is being filled with."""
        return self._wanted.get(target, 0)

    def unsent(self, target: int) -> Buckets:
        """Return the buckets not yet sent to a server: it receives no pushes to them."""
        return self._wanted.get(target, 0) & ~self._sent.get(target, 0)

    def change(self, wanted: Mapping[int, Buckets], *, follows: bool) -> None:
        """Set the fills of a new view. Confirmations stay valid if it `follows`, so that no view was missed."""
        confirmed = self._confirmed if follows else {}
        self._wanted = dict(wanted)
        self._confirmed = {target: confirmed.get(target, 0) & buckets for target, buckets in wanted.items()}
        self._sent = dict(self._confirmed)
        self._reported, self._states = {}, {}  # targets reject buckets of older views

    def is_sending(self, target: int) -> bool:
        """Whether a bucket is in flight to a server."""
        return any(state[0] == target for state in self._states.values())

    def send(self, target: int, left: Buckets) -> tuple[int, int]:
        """Record the first bucket of `left` as sent; return its number and the bucket."""
        bucket = (left & -left).bit_length() - 1
        self._sent[target] |= 1 << bucket
        number = next(self._numbers)
        self._states[number] = (target, bucket)
        return number, bucket

    def forget_unconfirmed(self, target: int) -> None:
        """Mark the buckets that a server has not confirmed as unsent."""
        self._states = {number: state for number, state in self._states.items() if state[0] != target}
        if target in self._wanted:
            self._sent[target] = self._confirmed[target]

    def confirm(self, target: int, number: int) -> bool:
        """Record a server's confirmation of a bucket by number; return whether it is new."""
        state = self._states.pop(number, None)
        if state is None or state[0] != target:
            return False
        self._confirmed[target] |= 1 << state[1]
        return True

    def to_report(self, target: int) -> Buckets:
        """Return the confirmed buckets if a report is due: all are confirmed, or many since the last one; else 0."""
        confirmed = self._confirmed[target]
        news = confirmed & ~self._reported.get(target, 0)
        if not news or (confirmed != self._wanted[target] and count(news) < _REPORT_BUCKETS):
            return 0
        self._reported[target] = confirmed
        return confirmed

    def reports(self, target: int, version: int) -> list[Instruction]:
        """Return the report of a server's confirmed buckets if one is due."""
        filled = self.to_report(target)
        return [ReportFilled(version, target, filled)] if filled else []

    def validate(self) -> None:
        """Assert the invariants."""
        for target, wanted in self._wanted.items():
            assert not self._sent[target] & ~wanted
            assert not self._confirmed[target] & ~self._sent[target]

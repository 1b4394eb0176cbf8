"""The scheduler's notes for the operator of the cluster."""

from __future__ import annotations

from collections.abc import Callable

from paceline.protocol import Member
from paceline.protocol.buckets import Buckets, count
from paceline.protocol.scheduler.events import PROCESS_ENDED


class Notes:
    """Reports to the operator; the arguments are those of :class:`~paceline.ps.scheduler.Scheduler`."""

    def __init__(self, on_note: Callable[[str], None], on_loss: Callable[[str], None], *, reports_ends: bool) -> None:
        self.note = on_note
        self.reports_ends = reports_ends
        self._on_loss = on_loss

    def declared_dead(self, member: Member, reason: str) -> None:
        """Report a dead member, unless its launcher reports the end of its process."""
        if reason != PROCESS_ENDED or self.reports_ends:
            self.note(f"{member.role.value} {member.rank} ({member.node}) is declared dead: {reason}")

    def lost(self, buckets: Buckets) -> None:
        """Report the loss of buckets."""
        self._on_loss(f"{count(buckets)} buckets of the tables are lost: no live server has them")

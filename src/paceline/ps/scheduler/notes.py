"""The scheduler's notes for the operator of the cluster."""

from __future__ import annotations

from collections.abc import Callable

from paceline.protocol import Member
from paceline.protocol.buckets import Buckets, count
from paceline.protocol.scheduler.events import PROCESS_ENDED


class Notes:
    """The arguments are those of :class:`~paceline.ps.scheduler.Scheduler`."""

    def __init__(self, on_note: Callable[[str], None], on_loss: Callable[[str], None], *, tells_ends: bool) -> None:
        self.note = on_note
        self.tells_ends = tells_ends
        self._on_loss = on_loss

    def declared_dead(self, member: Member, reason: str) -> None:
        """Tell that a member is dead; its launcher may say of a process that it has ended."""
        if reason != PROCESS_ENDED or self.tells_ends:
            self.note(f"{member.role.value} {member.rank} ({member.node}) is declared dead: {reason}")

    def lost(self, buckets: Buckets) -> None:
        """Tell that nobody has these buckets any more."""
        self._on_loss(f"{count(buckets)} buckets of the tables are lost: no server that lives has them")

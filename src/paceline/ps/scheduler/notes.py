"""The scheduler's notes for the operator of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from paceline.protocol import Member
from paceline.protocol.buckets import Buckets, count
from paceline.protocol.scheduler.events import PROCESS_ENDED
from paceline.ps.messages import Settings

_MAY_DIFFER: Final = ("cluster", "heartbeat_timeout_s")


class Notes:
    """The arguments are those of :class:`~paceline.ps.scheduler.Scheduler`."""

    def __init__(self, on_note: Callable[[str], None], on_loss: Callable[[str], None], *, tells_ends: bool) -> None:
        self.note = on_note
        self.tells_ends = tells_ends
        self._on_loss = on_loss
        self._other_clusters: set[str] = set()  # the reported ones

    def declared_dead(self, member: Member, reason: str) -> None:
        """Tell that a member is dead; its launcher may say of a process that it has ended."""
        if reason != PROCESS_ENDED or self.tells_ends:
            self.note(f"{member.role.value} {member.rank} ({member.node}) is declared dead: {reason}")

    def lost(self, buckets: Buckets) -> None:
        """Tell that nobody has these buckets any more."""
        self._on_loss(f"{count(buckets)} buckets of the tables are lost: no server that lives has them")

    def has_settings(self, theirs: Settings, ours: Settings) -> bool:
        """Return whether a cluster that may be taken over has the scheduler's settings; tell once if not."""
        for name in Settings.__struct_fields__:
            if name in _MAY_DIFFER:
                continue
            expected, got = getattr(ours, name), getattr(theirs, name)
            if expected != got:
                if theirs.cluster not in self._other_clusters:
                    self._other_clusters.add(theirs.cluster)
                    self.note(
                        f"members of a cluster with {name}={got} want to be taken over, and this scheduler was "
                        f"started with {name}={expected}: start it with the settings of the one before"
                    )
                return False
        return True

"""What a process knows of itself as a member, and of the cluster's views: pure, it is told and says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from paceline.errors import ProtocolError
from paceline.protocol.jobs import JobMemory
from paceline.protocol.scheduler import KnownViews
from paceline.ps import messages
from paceline.ps.messages import ClusterMap, KnownTable, MapChange

_FIRST_HEARTBEAT_S: Final = 0.1  # until the scheduler says how often: often enough for the shortest patience

VIEWS: Final = (ClusterMap, MapChange, messages.PrepareMap, messages.Promise, messages.CommitMap)
"""The notices that :class:`MemberState` is there for; others are told to the process."""


class MemberState:
    """One process's membership, from its registration on."""

    def __init__(self) -> None:
        self.registration: messages.Register | None = None
        self.welcome: messages.Welcome | None = None
        """The newest answer to the registration; None before it is a member."""
        self.heartbeat_s = _FIRST_HEARTBEAT_S
        self.maps: KnownViews[ClusterMap] = KnownViews()
        self.is_leaving = False
        """Whether it has asked for its release."""
        self.is_released = False
        self.is_over = False
        """Whether the scheduler has said that there is nothing to come back to."""

    def welcomed(self, welcome: messages.Welcome) -> ClusterMap | None:
        """Take a welcome; return its map if that is new."""
        self.welcome, self.heartbeat_s = welcome, welcome.heartbeat_s
        return self._commit(welcome.cluster)

    def take(self, notice: msgspec.Struct) -> tuple[ClusterMap | None, msgspec.Struct | None]:
        """Take a notice; return the new map that is to be acted on, and what is to be answered."""
        match notice:
            case ClusterMap():
                return self._commit(notice), None
            case MapChange():
                return self._commit(self._changed(notice)), None
            case messages.PrepareMap(map=cluster):
                whole = self._changed(cluster) if isinstance(cluster, MapChange) else cluster
                is_kept = self.maps.prepare(whole)
                return None, messages.Prepared(term=whole.term, epoch=whole.epoch) if is_kept else None
            case messages.Promise(term=term):
                return None, messages.Promised(term=term) if self.maps.promise(term) else None
            case messages.CommitMap():
                known = self.maps.prepared
                if known is not None and known.order == (notice.term, notice.epoch):
                    return self._commit(known), None
            case messages.Ended():
                self.is_released = self.is_over = True
            case messages.Expelled():
                self.is_over = True
        return None, None

    def rejoin(self, tables: Iterable[KnownTable], job: JobMemory | None) -> messages.Rejoin:
        """Return what a scheduler is told to which this member comes."""
        registration, welcome, newest = self.registration, self.welcome, self.maps.newest
        assert registration is not None
        assert welcome is not None
        assert newest is not None
        return messages.Rejoin(
            node=registration.node,
            role=registration.role,
            rank=welcome.rank,
            incarnation=welcome.incarnation,
            endpoint=registration.endpoint,
            process=registration.process,
            settings=welcome.settings,
            cluster=newest,
            promised=self.maps.promised,
            has_committed=self.maps.is_committed,
            former=() if self.maps.former is None else self.maps.former.of_role("server"),
            is_leaving=self.is_leaving,
            tables=tuple(tables),
            job=job,
        )

    def _commit(self, cluster: ClusterMap) -> ClusterMap | None:
        return cluster if self.maps.commit(cluster) else None

    def _changed(self, change: MapChange) -> ClusterMap:
        base = self.maps.committed
        if base is None:
            raise ProtocolError("the scheduler has sent what changed in a map that it has not sent")
        return change.apply(base)

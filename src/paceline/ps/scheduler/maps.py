"""Views as they travel: whole, or as what they differ by from the one that a member has; which one each has."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.protocol import Member, Role
from paceline.protocol.buckets import to_bytes
from paceline.protocol.scheduler import View
from paceline.ps.messages import ClusterMap, CommitMap, GroupInfo, MapChange, MemberInfo, PrepareMap, ProcessIdentity
from paceline.transport import Endpoint, Peer

ROLES = {"server": Role.SERVER, "worker": Role.WORKER, "observer": Role.OBSERVER}


def role_of(name: str) -> Role:
    """Return the role of this name. Raises UsageError."""
    role = ROLES.get(name)
    if role is None:
        raise UsageError(f"role {name!r}: expected one of {', '.join(ROLES)}")
    return role


def map_of(view: View, *, num_waiting: int = 0) -> ClusterMap:
    """Return a view as it travels."""
    return ClusterMap(
        term=view.term,
        epoch=view.epoch,
        members=tuple([_info(member) for member in view.members]),
        version=view.version,
        groups=_groups(view),
        last_incarnation=view.last_incarnation,
        is_partial=view.is_partial,
        former_voters=view.former_voters,
        num_waiting=num_waiting,
    )


def change_of(base: View, view: View) -> MapChange:
    """Return what a view differs by from another one."""
    before, after = set(base.members), set(view.members)
    return MapChange(
        base=base.epoch,
        term=view.term,
        epoch=view.epoch,
        version=view.version,
        last_incarnation=view.last_incarnation,
        joined=tuple([_info(member) for member in view.members if member not in before]),
        gone=tuple([member.incarnation for member in base.members if member not in after]),
        groups=None if view.groups == base.groups else _groups(view),
        former_voters=view.former_voters,
    )


def view_of(cluster: ClusterMap) -> View:
    """Return the view that a map stands for."""
    return View(
        term=cluster.term,
        epoch=cluster.epoch,
        version=cluster.version,
        members=tuple([member_of(info) for info in cluster.members]),
        groups=cluster.chain_groups(),
        last_incarnation=cluster.last_incarnation,
        is_partial=cluster.is_partial,
        former_voters=cluster.former_voters,
    )


def member_of(info: MemberInfo) -> Member:
    """Return a member as the rules know it."""
    return Member(info.node, ROLES[info.role], info.rank, info.incarnation, info.endpoint, info.process)


class SentViews:
    """The views that each connection was sent. Workers are told of them only where the buckets are."""

    def __init__(self) -> None:
        self._routes = View(is_partial=True)  # what workers are told of the committed view
        self._told: dict[Peer, View] = {}  # the last committed view that was sent
        self._prepared: dict[Peer, View] = {}  # the last view that was sent to be prepared

    def forget(self, peer: Peer) -> None:
        """Forget a connection."""
        self._told.pop(peer, None)
        self._prepared.pop(peer, None)

    def welcome(self, peer: Peer, role: Role, committed: View) -> ClusterMap:
        """Return the committed view for a member that is welcomed."""
        view = self._told[peer] = self._routes if role is Role.WORKER else committed
        return map_of(view)

    def prepare(self, peer: Any, view: View) -> PrepareMap:
        """Return a view to be prepared."""
        told = self._told.get(peer)
        self._prepared[peer] = view
        return PrepareMap(map=map_of(view) if told is None else change_of(told, view))

    def commit(self, view: View) -> None:
        """Note that a view is committed."""
        routes = view.without_workers()
        if routes.term != self._routes.term or not routes.same_servers(self._routes):
            self._routes = routes  # else workers have what there is to know

    def publish(self, peer: Peer, view: View) -> CommitMap | MapChange | None:
        """Return what a member is told of the view that is committed; None if it has what there is to know."""
        told = self._told.get(peer)
        if told is None or told is self._routes or told.order >= view.order:
            return None
        seen = self._told[peer] = self._routes if told.is_partial else view
        if self._prepared.get(peer) is view:
            return CommitMap(term=view.term, epoch=view.epoch)
        return change_of(told, seen)


def _info(member: Member) -> MemberInfo:
    assert member.address is None or isinstance(member.address, Endpoint)
    assert member.process is None or isinstance(member.process, ProcessIdentity)
    return MemberInfo(
        node=member.node,
        role=member.role.value,
        rank=member.rank,
        incarnation=member.incarnation,
        endpoint=member.address,
        process=member.process,
    )


def _groups(view: View) -> tuple[GroupInfo, ...]:
    return tuple([GroupInfo(group.members, group.filling, to_bytes(group.buckets)) for group in view.groups])

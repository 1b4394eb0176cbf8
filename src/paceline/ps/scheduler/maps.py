"""Views as they travel: whole, or as what they differ by from the one that a member has."""

from __future__ import annotations

from paceline.protocol import Member, Role
from paceline.protocol.buckets import to_bytes
from paceline.protocol.scheduler import View
from paceline.ps.messages import ClusterMap, GroupInfo, MapChange, MemberInfo, Process
from paceline.transport import Endpoint

ROLES = {"server": Role.SERVER, "worker": Role.WORKER, "observer": Role.OBSERVER}


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


def _info(member: Member) -> MemberInfo:
    assert member.address is None or isinstance(member.address, Endpoint)
    assert member.process is None or isinstance(member.process, Process)
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

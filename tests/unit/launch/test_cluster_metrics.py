"""Failovers, and the events of members that join and leave."""

from __future__ import annotations

from paceline.launch.cluster_metrics import compare_views
from paceline.protocol import Member, Role
from paceline.protocol.chains import ChainGroup
from paceline.ps import messages
from paceline.transport import Address


def view(epoch: int, servers: tuple[int, ...], chains: tuple[tuple[int, ...], ...]) -> messages.View:
    """Return a view whose servers have their rank as incarnation, and whose worker has incarnation 9."""
    members = [Member("host", Role.SERVER, rank, rank, Address("tcp", "host", 1)) for rank in servers]
    groups = tuple(ChainGroup(chain, None, bytes([1 << number])) for number, chain in enumerate(chains))
    return messages.View(epoch=epoch, members=(*members, Member("host", Role.WORKER, 0, 9)), groups=groups)


def test_a_successor_replaces_a_lost_primary() -> None:
    before = view(1, (1, 2), ((1, 2), (2, 1)))
    assert compare_views(before, view(2, (2,), ((2,),))) == (
        1,
        ["view 2: server 1 leaves, and its successor takes over"],
    )


def test_a_lost_server_without_replicas_is_no_failover() -> None:
    before = view(1, (1, 2), ((1,), (2,)))
    assert compare_views(before, view(2, (2, 3), ((3,), (2,)))) == (
        0,
        ["view 2: server 3 joins", "view 2: server 1 leaves, and no server has a replica of its rows"],
    )
    both = view(1, (1, 2, 3), ((1, 2), (3,)))
    assert compare_views(both, view(2, (3,), ((), (3,)))) == (
        0,
        ["view 2: server 1 leaves, and no server has a replica of its rows", "view 2: server 2 leaves"],
    )

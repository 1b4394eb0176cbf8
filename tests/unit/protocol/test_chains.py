"""The planner of chains: examples, and joins, deaths, leaves and fills in any order."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.random_examples import num_examples

from paceline.errors import UsageError
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import ALL, buckets_in
from paceline.protocol.chains import (
    Chain,
    Planner,
    chain_group,
    chains_of,
    groups_of,
    lost_buckets,
)
from paceline.protocol.placement import place


def started(num_servers: int, num_buckets: int = 8, replicas: int = 0) -> tuple[Planner, dict[int, int]]:
    """Return a planner and its servers, with incarnations 100, 101, … and ranks 0, 1, …"""
    servers = {100 + rank: rank for rank in range(num_servers)}
    planner = Planner(num_buckets, replicas)
    planner.start(servers)
    return planner, servers


def fill(planner: Planner, servers: dict[int, int], server: int, buckets: int, *absent: Collection[int]) -> None:
    """Commit the chains, and report buckets of a server as filled. `absent`: the leaving and the silent servers."""
    planner.restore(planner.groups, [(server, buckets)])
    planner.servers_changed(servers, *absent)


def fill_all(planner: Planner, servers: dict[int, int], *absent: Collection[int], limit: int = 50) -> int:
    """Finish all fills; return the number of filled buckets."""
    num_filled = 0
    for _ in range(limit):
        fills = [group for group in planner.groups if group.filling is not None]
        if not fills:
            return num_filled
        for group in fills:
            assert group.filling is not None
            num_filled += group.buckets.bit_count()
            fill(planner, servers, group.filling, group.buckets, *absent)
    raise AssertionError(f"fills do not end within {limit} rounds: {planner.groups}")


def is_stable(planner: Planner) -> bool:
    return planner.version > 0 and all(group.filling is None for group in planner.groups)


def held(planner: Planner, server: int) -> int:
    """Return the buckets whose chain contains a server, as a member or as the server that is being filled."""
    return sum(group.buckets for group in planner.groups if server == group.filling or server in group.members)


def placed(servers: dict[int, int], num_buckets: int, replicas: int) -> tuple[Chain, ...]:
    by_rank = {rank: server for server, rank in servers.items()}
    chains = place(num_buckets, sorted(by_rank), replicas)
    return tuple(Chain(tuple(by_rank[rank] for rank in chain)) for chain in chains)


def test_the_start_follows_placement() -> None:
    planner, servers = started(3, replicas=1)
    assert planner.chains == placed(servers, 8, 1)
    assert planner.version == 1
    assert is_stable(planner)
    planner.servers_changed(servers)
    assert planner.version == 1


def test_before_the_start_nothing_changes() -> None:
    planner = Planner()
    assert planner.version == 0
    assert planner.chains == ()
    assert planner.groups == ()
    planner.servers_changed({100: 0})
    fill(planner, {100: 0}, 100, ALL)
    assert planner.version == 0
    assert held(planner, 100) == planner.member_of(100) == lost_buckets(planner.groups) == 0
    assert not is_stable(planner)


def test_an_impossible_start() -> None:
    planner = Planner()
    with pytest.raises(UsageError, match="No servers"):
        planner.start({})
    with pytest.raises(UsageError, match="duplicate"):
        planner.start({100: 0, 101: 0})
    planner.start({100: 0})
    with pytest.raises(UsageError, match="only once"):
        planner.start({100: 0})


def test_a_newcomer_is_filled_and_then_takes_over() -> None:
    planner, servers = started(2)
    servers[102] = 2
    before = planner.chains
    planner.servers_changed(servers)
    assert planner.version == 2
    moving = held(planner, 102)
    for bucket, chain in enumerate(planner.chains):
        assert chain == Chain(before[bucket].members, 102 if moving >> bucket & 1 else None)
    half = moving & 0b1111
    fill(planner, servers, 102, half)
    assert {planner.chains[bucket] for bucket in buckets_in(half)} == {Chain((102,))}
    version = planner.version  # a repeated report has no effect
    fill(planner, servers, 102, half)
    assert planner.version == version
    fill(planner, servers, 102, moving)
    assert planner.chains == placed(servers, 8, 0)
    assert is_stable(planner)


def test_a_join_fills_only_one_share() -> None:
    planner, servers = started(2, NUM_BUCKETS)
    planner.servers_changed({**servers, 102: 2})
    assert fill_all(planner, servers) <= 1.2 * NUM_BUCKETS / 3
    assert is_stable(planner)


def test_the_successor_is_primary_immediately_after_a_death() -> None:
    planner, servers = started(3, replicas=1)
    before = planner.chains
    del servers[100]
    planner.servers_changed(servers)
    assert planner.version == 2
    for old, new in zip(before, planner.chains, strict=True):
        survivors = tuple(server for server in old.members if server != 100)
        assert new.members == survivors
        assert new.filling == (None if len(survivors) == 2 else ({101, 102} - {*survivors}).pop())
    fill_all(planner, servers)
    assert planner.chains == placed(servers, 8, 1)


def test_a_bucket_without_a_member_stays_lost() -> None:
    planner, servers = started(2)
    own_buckets = held(planner, 101)
    planner.servers_changed({100: 0})
    assert lost_buckets(planner.groups) == own_buckets
    assert planner.version == 2
    assert lost_buckets(planner.groups) == own_buckets
    assert {planner.chains[bucket] for bucket in buckets_in(own_buckets)} == {Chain(())}
    assert is_stable(planner)
    version = planner.version  # lost buckets cannot be filled
    planner.servers_changed(servers)
    assert planner.version == version
    assert held(planner, 101) == 0
    version = planner.version
    fill(planner, servers, 101, own_buckets)
    assert planner.version == version


def test_a_filling_server_leaves_the_chain_when_the_last_member_or_itself_dies() -> None:
    planner, servers = started(1)
    planner.servers_changed({**servers, 101: 1})
    moving = held(planner, 101)
    planner.servers_changed(servers)
    assert planner.version == 3
    assert planner.chains == placed(servers, 8, 0)
    version = planner.version
    fill(planner, servers, 101, moving)
    assert planner.version == version
    planner.servers_changed({**servers, 102: 1})
    planner.servers_changed({102: 1})
    assert lost_buckets(planner.groups) == 0xFF
    assert planner.version == 5
    assert held(planner, 102) == 0


def test_a_fill_stops_if_placement_no_longer_needs_it() -> None:
    planner, servers = started(1, 64, replicas=2)
    servers[101] = 1
    planner.servers_changed(servers)
    servers[102] = 2
    version = planner.version  # server 102 waits until the current fills are complete
    planner.servers_changed(servers)
    assert planner.version == version
    assert held(planner, 101) == (1 << 64) - 1

    planner, servers = started(1, 64)
    servers[101] = 1
    planner.servers_changed(servers)
    began = held(planner, 101)
    servers[102] = 2
    planner.servers_changed(servers)
    for bucket, wanted in enumerate(placed(servers, 64, 0)):
        assert planner.chains[bucket] == (wanted if 100 in wanted.members else Chain((100,), *wanted.members))
    assert held(planner, 101) & began == held(planner, 101) != began  # server 102 gets some buckets instead


def test_a_leaving_server_stays_until_it_is_replaced() -> None:
    planner, servers = started(3, replicas=1)
    own_buckets = held(planner, 100)
    planner.servers_changed(servers, leaving=[100])
    assert held(planner, 100) == own_buckets
    fill_all(planner, servers, [100])
    assert held(planner, 100) == 0
    del servers[100]
    assert planner.chains == placed(servers, 8, 1)
    version = planner.version
    planner.servers_changed(servers)
    assert planner.version == version


def test_no_bucket_moves_if_all_servers_leave() -> None:
    planner, servers = started(2)
    before = planner.chains
    version = planner.version
    planner.servers_changed(servers, leaving=servers)
    assert planner.version == version
    assert planner.chains == before
    assert is_stable(planner)
    # Dead servers leave the chains, also dead servers that were being filled.
    servers[102] = 2
    planner.servers_changed(servers)
    assert held(planner, 102)
    del servers[102]
    planner.servers_changed(servers, leaving=servers)
    assert planner.version == 3
    assert planner.chains == before


def test_a_restarted_server_with_the_same_rank_is_empty() -> None:
    planner, _ = started(2, replicas=1)
    servers = {100: 0, 102: 1}
    planner.servers_changed(servers)
    assert set(planner.chains) == {Chain((100,), 102)}
    fill_all(planner, servers)
    assert planner.chains == placed({100: 0, 102: 1}, 8, 1)


def test_a_silent_server_leaves_the_chains_with_another_member() -> None:
    planner, servers = started(3, replicas=1)
    before = planner.chains
    planner.servers_changed(servers, silent=[100])
    assert planner.version == 2
    for old, new in zip(before, planner.chains, strict=True):
        assert new.members == tuple(server for server in old.members if server != 100)
        assert new.filling == (None if len(new.members) == 2 else ({101, 102} - {*new.members}).pop())
    fill_all(planner, servers, (), [100])
    assert planner.chains == placed({101: 1, 102: 2}, 8, 1)  # the chains are the same as after the server's death


def test_a_silent_server_stays_in_chains_of_silent_servers() -> None:
    planner, servers = started(3, 32)
    own_buckets = planner.member_of(100)
    assert own_buckets
    planner.servers_changed(servers, silent=[100])
    # A silent server may not see a view that starts a fill from it.
    assert planner.version == 1
    assert planner.chains == placed(servers, 32, 0)
    # A fill that has begun before the silence continues.
    servers[103] = 3
    planner.servers_changed(servers)
    assert planner.version == 2
    before = planner.chains
    assert any(planner.chains[bucket].filling == 103 for bucket in buckets_in(own_buckets))
    planner.servers_changed(servers, silent=[100])
    for bucket in buckets_in(own_buckets):
        assert planner.chains[bucket] == before[bucket]
    assert planner.member_of(100) == own_buckets
    assert lost_buckets(planner.groups) == 0


def test_members_stay_if_all_are_silent() -> None:
    planner, servers = started(2, replicas=1)
    before = planner.chains
    version = planner.version
    planner.servers_changed(servers, silent=servers)
    assert planner.version == version
    assert planner.chains == before
    servers[102] = 2
    planner.servers_changed(servers, silent=[100, 101])
    assert [chain.members for chain in planner.chains] == [chain.members for chain in before]
    # One server has died; the other server has the last copy.
    del servers[100]
    planner.servers_changed(servers, silent=[101])
    assert {chain.members for chain in planner.chains} == {(101,)}
    assert lost_buckets(planner.groups) == 0
    del servers[101]
    planner.servers_changed(servers)
    assert lost_buckets(planner.groups) == 0xFF


def test_a_silent_server_is_not_filled() -> None:
    planner, servers = started(1)
    servers[101] = 1
    planner.servers_changed(servers)
    moving = held(planner, 101)
    assert moving
    planner.servers_changed(servers, silent=[101])
    assert planner.version == 3
    assert planner.chains == placed({100: 0}, 8, 0)
    version = planner.version
    fill(planner, servers, 101, moving, (), [101])
    assert planner.version == version
    planner.servers_changed(servers)
    assert planner.version == 4
    assert held(planner, 101) == moving
    fill(planner, servers, 101, moving)
    assert planner.chains == placed(servers, 8, 0)


def test_a_formerly_silent_server_is_filled_again() -> None:
    planner, servers = started(2, replicas=1)
    before = planner.chains
    planner.servers_changed(servers, silent=[101])
    assert set(planner.chains) == {Chain((100,))}
    planner.servers_changed(servers)
    assert set(planner.chains) == {Chain((100,), 101)}
    fill_all(planner, servers)
    assert planner.chains == before


def test_restoring_chains_undoes_a_plan_but_not_its_version() -> None:
    planner, servers = started(2, replicas=1)
    before, groups = planner.chains, planner.groups
    planner.servers_changed({100: 0})
    assert planner.chains != before
    planner.restore(groups)
    assert planner.chains == before
    assert planner.version == 2  # a process may have received the version
    version = planner.version
    planner.servers_changed(servers)
    assert planner.version == version
    planner.servers_changed({100: 0})
    assert planner.version == 3
    planner.validate()


def test_members_have_a_bucket() -> None:
    planner, servers = started(1)
    assert planner.member_of(100) == 0xFF
    planner.servers_changed({**servers, 101: 1})
    assert planner.member_of(101) == 0
    moving = held(planner, 101)
    fill(planner, {**servers, 101: 1}, 101, moving)
    assert planner.member_of(101) == moving
    assert planner.member_of(100) == 0xFF & ~moving


def test_a_planner_is_rebuilt_after_a_restart() -> None:
    planner, servers = started(3, replicas=1)
    servers[103] = 3
    planner.servers_changed(servers)
    again = Planner.rebuild(planner.groups, planner.version, servers, 1)
    assert again.version == 3
    assert again.chains == planner.chains
    fill_all(again, servers)
    assert again.chains == placed(servers, 8, 1)
    # Servers died before the restart, also all servers of a bucket.
    lonely = Planner.rebuild(again.groups, again.version, {100: 0}, 1)
    assert lonely.version == again.version + 1
    assert lost_buckets(lonely.groups) == 0xFF & ~held(again, 100)
    lonely.validate()
    with pytest.raises(UsageError, match="No chains"):
        Planner.rebuild((), 1, servers, 1)


@num_examples(50)
@given(st.lists(st.sampled_from([Chain(()), Chain((1,)), Chain((1, 2)), Chain((1,), 2)]), max_size=20))
def test_groups_represent_the_chains(chains: list[Chain]) -> None:
    groups = groups_of(chains)
    assert chains_of(groups) == tuple(chains)
    assert len(groups) == len(set(chains))


@pytest.mark.parametrize("masks", [(0b11, 0b10), (0b1, 0b100)])
def test_invalid_chains_are_rejected(masks: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="each bucket from 0 on in one group"):
        chains_of([chain_group((1,), None, mask) for mask in masks])


MACHINE_BUCKETS = 12


class PlannerMachine(RuleBasedStateMachine):
    """Servers join, die, leave, become silent and are filled in any order.

    `full` has each pair of a server and a bucket whose data the server holds. The chains must list the same pairs.
    """

    @initialize(num_servers=st.integers(1, 4), replicas=st.integers(0, 2))
    def start(self, num_servers: int, replicas: int) -> None:
        self.planner, self.servers = started(num_servers, MACHINE_BUCKETS, replicas)
        self.replicas = replicas
        self.leaving: set[int] = set()
        self.silent: set[int] = set()
        self.next_incarnation = 200
        self.version = 1
        self.lost = 0
        self.full = {(server, b) for b, chain in enumerate(self.planner.chains) for server in chain.members}

    def follow(self, before: tuple[Chain, ...]) -> None:
        assert (self.planner.version > self.version) == (self.planner.chains != before)
        self.version = self.planner.version
        # A server that leaves a bucket's chain drops the data. A dead server has no data.
        self.full = {(s, b) for s, b in self.full if held(self.planner, s) >> b & 1}
        self.lost = sum(1 << b for b in range(MACHINE_BUCKETS) if not any((s, b) in self.full for s in self.servers))

    def fill_some(self, server: int, mask: int) -> None:
        fill(self.planner, self.servers, server, mask, self.leaving, self.silent)

    def change(self) -> None:
        before = self.planner.chains
        had = {b for s, b in self.full if s in self.servers}
        self.planner.servers_changed(self.servers, self.leaving, self.silent)
        self.follow(before)
        assert had == {b for _, b in self.full}, "a bucket was lost although a server with its data lives"

    @rule(rank=st.integers(0, 5))
    def join(self, rank: int) -> None:
        if rank not in self.servers.values():
            self.servers[self.next_incarnation] = rank
            self.next_incarnation += 1
            self.change()

    @rule(data=st.data(), comes_back=st.booleans())
    def die(self, data: st.DataObject, comes_back: bool) -> None:
        if not self.servers:
            return
        server = data.draw(st.sampled_from(sorted(self.servers)))
        rank = self.servers.pop(server)
        self.leaving.discard(server)
        self.silent.discard(server)
        if comes_back:
            self.servers[self.next_incarnation] = rank
            self.next_incarnation += 1
        self.change()

    @rule(data=st.data())
    def leave_or_stay(self, data: st.DataObject) -> None:
        if self.servers:
            self.leaving ^= {data.draw(st.sampled_from(sorted(self.servers)))}
            self.change()

    @rule(data=st.data())
    def change_silence(self, data: st.DataObject) -> None:
        if self.servers:
            self.silent ^= {data.draw(st.sampled_from(sorted(self.servers)))}
            self.change()

    @rule(data=st.data())
    def plan_and_undo(self, data: st.DataObject) -> None:
        """Undo a plan, except its version."""
        before, groups = self.planner.chains, self.planner.groups
        subset = st.sets(st.sampled_from([*self.servers, 0]))
        living = {server: self.servers[server] for server in data.draw(subset) if server}
        self.planner.servers_changed(living, data.draw(subset), data.draw(subset))
        self.planner.restore(groups)
        self.planner.servers_changed(self.servers, self.leaving, self.silent)
        assert self.planner.chains == before
        assert self.version <= self.planner.version <= self.version + 1
        self.version = self.planner.version

    @rule(mask=st.integers(1, (1 << MACHINE_BUCKETS) - 1), server=st.integers(100, 210))
    def report_of_another_server(self, mask: int, server: int) -> None:
        """A late or false report does not make a server a member."""
        if not any(chain.filling == server for chain in self.planner.chains):
            before = self.planner.chains
            self.fill_some(server, mask)
            assert self.planner.chains == before
            assert self.planner.version == self.version

    @rule(data=st.data(), mask=st.integers(1, (1 << MACHINE_BUCKETS) - 1))
    def fill(self, data: st.DataObject, mask: int) -> None:
        """A server receives some of its buckets, and reports these and other buckets."""
        fills = {chain.filling for chain in self.planner.chains if chain.filling is not None}
        if fills:
            server = data.draw(st.sampled_from(sorted(fills)))
            before = self.planner.chains
            self.full |= {(server, b) for b in buckets_in(mask) if before[b].filling == server}
            self.fill_some(server, mask)
            self.follow(before)

    def is_waiting(self, members: tuple[int, ...]) -> bool:
        """Whether all servers of a bucket are silent, so that no fill is possible."""
        return bool(members) and self.silent.issuperset(members)

    @rule()
    def settle(self) -> None:
        for _ in range(50):
            groups = self.planner.groups
            fills = [group for group in groups if group.filling is not None and not self.is_waiting(group.members)]
            if not fills:
                break
            assert fills[0].filling is not None
            before = self.planner.chains
            self.full |= {(fills[0].filling, b) for b in buckets_in(fills[0].buckets)}
            self.fill_some(fills[0].filling, fills[0].buckets)
            self.follow(before)
        waiting = sum(1 << b for b, chain in enumerate(self.planner.chains) if self.is_waiting(chain.members))
        assert is_stable(self.planner) or waiting
        staying = {server: self.servers[server] for server in self.servers.keys() - self.leaving - self.silent}
        if not staying:
            return
        wanted = placed(staying, MACHINE_BUCKETS, self.replicas)
        for bucket, chain in enumerate(self.planner.chains):
            if not waiting >> bucket & 1:
                assert chain == (Chain(()) if self.lost >> bucket & 1 else wanted[bucket])
        assert not any(held(self.planner, server) & ~waiting for server in self.leaving | self.silent)

    @rule()
    def restart(self) -> None:
        before = self.planner.chains
        planner = Planner.rebuild(
            self.planner.groups, self.version, self.servers, self.replicas, self.leaving, self.silent
        )
        self.version += 1
        assert planner.version == self.version
        assert planner.chains == before
        self.planner = planner

    @invariant()
    def members_have_the_data(self) -> None:
        self.planner.validate()
        assert lost_buckets(self.planner.groups) == self.lost
        assert {(s, b) for b, chain in enumerate(self.planner.chains) for s in chain.members} == self.full


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = num_examples(100, stateful_step_count=30)

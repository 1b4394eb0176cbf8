"""Elastic groups with a coordinator. Ranks are threads, and some ranks become silent or leave."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.waiting import in_thread, wait_until

from paceline.collectives.elastic import ElasticGroup
from paceline.errors import GroupClosedError, MismatchError, RankLostError
from paceline.meeting.coordinator import NUM_RANKS, CoordinatorServer
from paceline.meeting.network_store import NetworkStore, StoreCall
from paceline.protocol.launchers import LauncherHeartbeat, Launchers, RankStart
from paceline.protocol.quorum import Coordinator
from paceline.transport import Address, Hello, make_token


class Training:
    """A coordinator whose ranks are threads."""

    def __init__(self) -> None:
        self.expelled: list[int] = []
        self.token = make_token()
        self.coordinator = Coordinator(range(3), min_ranks=1, max_ranks=3, report_timeout_s=1.0)
        launchers = Launchers(3, timeout_s=30.0, start_by_s=math.inf)
        self.server = CoordinatorServer(
            self.coordinator, launchers, Address("tcp", "127.0.0.1", 0), self.token, None, self.expelled.append
        )
        assert [self.server.started(rank) for rank in range(3)] == [0, 1, 2]

    def join(self, member: int) -> ElasticGroup:
        group = ElasticGroup(
            self.server.address, self.token, member, is_newcomer=member > 2, tls=None, timeout=timedelta(seconds=20)
        )
        try:
            group.enter()
        except BaseException:
            group.close()
            raise
        return group

    def run(self, work: Callable[[ElasticGroup], Any], *members: int) -> list[Any]:
        """Call `work` in a thread for each member; return the results."""

        def start(member: int) -> Any:
            with self.join(member) as group:
                return work(group)

        with ThreadPoolExecutor(len(members)) as pool:
            return list(pool.map(start, members))


@pytest.fixture
def training() -> Iterator[Training]:
    found = Training()
    with found.server:
        yield found


def test_all_ranks_get_the_same_result(training: Training) -> None:
    def work(group: ElasticGroup) -> Any:
        values = np.full(3, group.rank + 1.0)
        total = group.all_reduce(values, out=values)
        return total.tolist(), group.all_gather_objects(group.rank), group.members

    assert training.run(work, 0, 1, 2) == [([6.0] * 3, [0, 1, 2], (0, 1, 2))] * 3


def test_the_remaining_ranks_repeat_an_exchange_after_a_rank_leaves(training: Training) -> None:
    def work(group: ElasticGroup) -> Any:
        group.barrier()
        if group.rank == 0:
            return None
        return group.all_reduce(np.ones(1)).tolist(), group.members, group.quorum

    assert training.run(work, 0, 1, 2) == [None, ([2.0], (1, 2), 2), ([2.0], (1, 2), 2)]


def test_a_departed_rank_counts_as_a_participant(training: Training) -> None:
    """A process leaves the group before it ends, also after an exception."""
    assert not training.coordinator.has_joined(0)
    training.run(lambda group: group.barrier(), 0, 1, 2)
    assert training.coordinator.has_joined(0)
    training.server.ended(0, is_failure=True)
    assert not training.coordinator.has_joined(0)


def test_a_silent_rank_is_expelled_and_cannot_return(training: Training) -> None:
    may_continue = threading.Event()

    def work(group: ElasticGroup) -> Any:
        if group.rank == 1:
            may_continue.wait(20)
            with pytest.raises(RankLostError, match="declared lost"):
                group.barrier()
            return "lost"
        if group.rank == 0:
            group.group.abort()  # this exchange fails although no rank has died
        total = group.all_reduce(np.ones(1)).tolist()
        may_continue.set()
        return total

    assert training.run(work, 0, 1, 2) == [[2.0], "lost", [2.0]]
    assert training.expelled == [1]


def test_the_other_ranks_do_not_wait_for_a_silent_rank_that_is_lost(training: Training) -> None:
    """The silent rank's connections stay open, as after a cut of the network. A call may wait for 20 s."""
    waits, may_end = threading.Event(), threading.Event()

    def work(group: ElasticGroup) -> Any:
        if group.rank == 1:
            may_end.wait(20)
            group.group.abort()
            return None
        waits.set()
        begun_s = time.monotonic()
        total = group.all_reduce(np.ones(1)).tolist()
        may_end.set()
        return total, time.monotonic() - begun_s < 10

    def lose() -> None:
        waits.wait(20)
        time.sleep(0.1)
        training.server.ended(1, is_failure=True)

    with in_thread(lose):
        assert training.run(work, 0, 1, 2) == [([2.0], True), None, ([2.0], True)]


def test_different_calls_are_an_error_on_every_rank(training: Training) -> None:
    def work(group: ElasticGroup) -> Any:
        with pytest.raises(MismatchError):
            group.all_reduce(np.ones(1 + group.rank))
        return group.quorum

    assert training.run(work, 0, 1, 2) == [1, 1, 1]


def test_a_process_is_dismissed_after_the_end(training: Training) -> None:
    training.run(lambda group: group.barrier(), 0, 1, 2)
    assert training.server.started(0) == 3
    for member in range(3):
        training.server.ended(member, is_failure=False)
    with pytest.raises(GroupClosedError, match="has ended"):
        training.join(3)


def test_the_end_of_an_old_connection_does_not_lose_a_launcher_that_is_back(training: Training) -> None:
    hello = Hello(role="launcher", rank=1, extra={NUM_RANKS: 3})
    stores = [NetworkStore(training.server.address, training.token, hello, timeout_s=20.0) for _ in range(2)]
    for store in stores:
        request = LauncherHeartbeat(1, 7) if store is stores[1] else RankStart(1, 7, 0, 0)
        store.call(StoreCall.LAUNCHER, 20.0, body=msgspec.msgpack.encode(request))
    stores[0].close()
    time.sleep(0.2)
    assert training.server.take_notes() == ["node 1 has arrived"]
    stores[1].close()
    notes: list[str] = []

    def has_notes() -> bool:
        notes.extend(training.server.take_notes())
        return bool(notes)

    wait_until(has_notes)
    assert notes == ["node 1 is lost"]


def admit(group: ElasticGroup) -> None:
    """Let the newcomer 3 join after another rank has left."""
    while group.member != 3 and not group.admits_newcomers:
        group.barrier()
        time.sleep(0.01)
    if group.member != 3:
        group.admit(0)
    assert group.has_newcomers


def test_a_newcomer_has_no_effect_before_it_is_ready(training: Training) -> None:
    assert training.server.started(1) == 3
    part = np.zeros(4)
    waited: list[float] = []

    def work(group: ElasticGroup) -> Any:
        if group.member == 1:
            return None
        admit(group)
        operations = ("sum", "mean", "min", "max")
        results = [group.all_reduce(np.array([group.member + 1.0]), operation).tolist() for operation in operations]
        results.append(group.all_gather_objects(group.member))
        if group.heal(lambda inner: False):
            if group.member == 0:
                group.send_part(np.arange(4.0))
            elif group.member == 3:
                group.receive_part(part, waited.append)
        group.barrier()
        results.append(group.contributors)
        assert not group.heal(lambda inner: True)
        return [*results, group.contributors, group.ready, group.all_reduce(np.ones(1)).tolist()]

    without = [[4.0], [2.0], [1.0], [3.0], [0, 2], (0, 2)]
    assert training.run(work, 0, 1, 2, 3) == [
        [*without, (0, 2, 3), (0, 2, 3), [3.0]], None, *[[*without, (0, 2, 3), (0, 2, 3), [3.0]]] * 2
    ]  # fmt: skip
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(waited) == 1


def test_the_transfer_continues_from_another_rank(training: Training) -> None:
    """Rank 0 leaves without sending its part, and rank 2 then has the state."""
    assert training.server.started(1) == 3
    loaded: list[float] = []

    def work(group: ElasticGroup) -> Any:
        if group.member == 1:
            return None
        admit(group)
        may_share = group.heal(lambda inner: False)
        if group.member == 0:
            return None
        if may_share and group.member == 3:
            group.receive_part(np.zeros(4), loaded.append)
        group.barrier()
        before = group.ready, group.rank, group.has_state
        while not all(group.all_gather_objects(group.heal(lambda inner: False))):
            pass  # after a failed vote, only one rank may share
        if group.member == 2:
            group.send_part(np.ones(4))
        else:
            group.receive_part(np.zeros(4), loaded.append)
        group.heal(lambda inner: True)
        return before, group.ready, group.has_state

    _, _, old, new = training.run(work, 0, 1, 2, 3)
    assert old == (((2,), 0, True), (2, 3), True)
    assert new == (((2,), 1, False), (2, 3), True)
    assert len(loaded) == 1


def test_the_other_ranks_continue_without_a_newcomer_that_leaves(training: Training) -> None:
    assert training.server.started(1) == 3

    def work(group: ElasticGroup) -> Any:
        if group.member == 1:
            return None
        admit(group)
        if group.heal(lambda inner: False) and group.member == 0:
            group.send_part(np.zeros(1_000_000))
        if group.member == 3:
            return None
        group.barrier()
        return group.heal(lambda inner: True), group.members, group.ready

    assert training.run(work, 0, 1, 2, 3) == [(False, (0, 2), (0, 2)), None, (False, (0, 2), (0, 2)), None]

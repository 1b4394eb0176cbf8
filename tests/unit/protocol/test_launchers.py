"""The launchers of an elastic training: numbers of processes, lost nodes, and returning nodes."""

from __future__ import annotations

from collections.abc import Sized

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RankLostError, UsageError
from paceline.protocol.launchers import LauncherEnd, LauncherHeartbeat, Launchers, OwnLaunchers, RankEnd, RankStart

TIMEOUT_S = 10.0


def launchers(num_ranks: int = 4) -> Launchers:
    return Launchers(num_ranks, timeout_s=TIMEOUT_S, start_by_s=300.0)


def start(found: Launchers, node: int, rank: int, *, launcher: int = 7, serial: int = 0, time_s: float = 0.0) -> int:
    request = RankStart(node, launcher, serial, rank)
    assert found.request_received(request, time_s) == []
    return found.start(request)


def test_the_first_process_of_a_rank_has_its_number() -> None:
    found = launchers()
    assert [found.new_member(0), start(found, 1, 2), start(found, 1, 3, serial=1)] == [0, 2, 3]
    assert [start(found, 1, 3, serial=2), found.new_member(0)] == [4, 5]


def test_a_repeated_start_has_the_same_number() -> None:
    found = launchers()
    assert [start(found, 1, 2, serial=5) for _ in range(3)] == [2, 2, 2]
    assert found.disconnected(1, 7) == [2]
    assert start(found, 1, 2, serial=5) == 4  # the first process was declared lost


def test_a_silent_launcher_is_lost_and_may_return() -> None:
    found = launchers(2)
    found.new_member(0)
    assert start(found, 1, 1) == 1
    assert found.deadline_s == TIMEOUT_S
    assert found.time_passed(TIMEOUT_S - 1) == []
    assert found.time_passed(TIMEOUT_S) == [1]
    assert not found.are_needed
    assert found.request_received(LauncherHeartbeat(1, 7), 50.0) == []
    assert found.lost_members(1) == (1,)
    found.ended(RankEnd(1, 7, 1, is_failure=True))
    assert found.lost_members(1) == ()
    assert start(found, 1, 1, serial=1, time_s=51.0) == 2
    assert [note.partition(" ")[2][:4] for note in found.notes] == ["1 is", "1 is"]


def test_a_broken_connection_loses_the_ranks_of_the_launcher_once() -> None:
    found = launchers()
    start(found, 1, 2)
    assert found.disconnected(1, 8) == []
    assert found.disconnected(1, 7) == [2]
    assert found.disconnected(1, 7) == []
    assert found.time_passed(2 * TIMEOUT_S) == []


def test_a_new_launcher_replaces_the_former_launcher_of_its_node() -> None:
    found = launchers()
    start(found, 1, 2)
    assert found.request_received(LauncherHeartbeat(1, 8), 1.0) == [2]
    with pytest.raises(RankLostError, match="another launcher has started as node 1"):
        found.request_received(LauncherHeartbeat(1, 7), 2.0)
    assert found.disconnected(1, 7) == []


def test_a_launcher_that_has_ended_is_not_lost() -> None:
    found = launchers(1)
    assert start(found, 1, 0) == 0
    found.ended(RankEnd(1, 7, 0, is_failure=False))
    assert found.launcher_ended(LauncherEnd(1, 7)) == []
    assert found.disconnected(1, 7) == []
    assert not found.are_needed


def test_the_training_starts_without_ranks_that_no_launcher_starts() -> None:
    found = launchers()
    start(found, 1, 2, time_s=295.0)
    assert found.deadline_s == 300.0
    assert found.time_passed(300.0) == [0, 1, 3]
    assert start(found, 0, 0, serial=0, time_s=301.0) == 4


def test_only_its_launcher_can_end_a_member() -> None:
    found = launchers()
    found.new_member(0)
    start(found, 1, 2)
    assert [found.expel(0), found.expel(2)] == [False, True]
    assert found.lost_members(1) == (2,)
    assert found.disconnected(1, 7) == []


def own_start(found: OwnLaunchers, launcher: int, time_s: float = 0.0) -> int:
    request = RankStart(launcher, launcher, 0, None)
    assert found.request_received(request, time_s, f"process {launcher}") == []
    return found.start(request)


def test_a_rank_that_is_its_own_launcher_cannot_return() -> None:
    found = OwnLaunchers(timeout_s=TIMEOUT_S)
    assert [own_start(found, launcher) for launcher in (40, 41, 41)] == [0, 1, 1]
    assert found.disconnected(40, 40) == [0]
    assert found.request_received(LauncherHeartbeat(41, 41), 5.0) == []
    assert found.time_passed(TIMEOUT_S) == []
    assert found.time_passed(5.0 + TIMEOUT_S) == [1]
    for launcher in (40, 41):
        with pytest.raises(RankLostError, match="10 s"):
            found.request_received(LauncherHeartbeat(launcher, launcher), 20.0)
    assert not found.are_needed
    assert [note.partition(" ")[2] for note in found.notes] == [
        "40 has arrived",
        "41 has arrived",
        "40 is lost",
        "41 is lost",
    ]
    assert own_start(found, 42) == 2


def test_many_ranks_that_are_their_own_launchers_leave_no_records() -> None:
    found = OwnLaunchers(timeout_s=TIMEOUT_S)
    for number in range(1000):
        own_start(found, number)
        if number % 2:
            found.disconnected(number, number)
        else:
            found.ended(RankEnd(number, number, number, is_failure=False))
            found.launcher_ended(LauncherEnd(number, number))
        found.notes.clear()
    assert [name for name, value in vars(found).items() if isinstance(value, Sized) and len(value)] == []


def test_only_ranks_without_a_launcher_reach_their_coordinator() -> None:
    OwnLaunchers(timeout_s=TIMEOUT_S).check_size(7, 0)
    launchers(4).check_size(1, 4)
    for found, num_ranks in ((OwnLaunchers(timeout_s=TIMEOUT_S), 4), (launchers(4), 0), (launchers(4), None)):
        with pytest.raises(UsageError):
            found.check_size(1, num_ranks)


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "end", "beat", "cut", "wait", "new", "leave", "expel"]), st.integers(0, 2)),
        max_size=60,
    )
)
def test_each_number_is_used_and_lost_once(events: list[tuple[str, int]]) -> None:
    """With any events, each process has its own number, and is reported as lost at most once."""
    found, time_s = Launchers(3, timeout_s=TIMEOUT_S, start_by_s=25.0), 0.0
    numbers, serials = dict.fromkeys(range(3), 0), iter(range(1000))
    living: dict[int, list[int]] = {node: [] for node in range(3)}
    used: list[int] = []
    lost: list[int] = []
    for event, node in events:
        time_s += 1.0
        launcher = 10 * node + numbers[node]
        if event == "start":
            request = RankStart(node, launcher, next(serials), node)
            lost += found.request_received(request, time_s)
            living[node].append(found.start(request))
            used.append(living[node][-1])
        elif event == "end" and living[node]:
            end = RankEnd(node, launcher, living[node].pop(), is_failure=True)
            lost += found.request_received(end, time_s)
            found.ended(end)
        elif event == "beat":
            lost += found.request_received(LauncherHeartbeat(node, launcher), time_s)
            assert set(found.lost_members(node)) <= set(living[node])
        elif event == "cut":
            lost += found.disconnected(node, launcher)
        elif event == "new":
            numbers[node] += 1
            living[node] = []
        elif event == "leave":
            leave = LauncherEnd(node, launcher)
            lost += found.request_received(leave, time_s)
            lost += found.launcher_ended(leave)
            living[node] = []
        elif event == "expel" and living[node] and living[node][-1] not in lost and found.expel(living[node][-1]):
            lost.append(living[node][-1])
        elif event == "wait":
            time_s += TIMEOUT_S
            lost += found.time_passed(time_s)
    assert len(set(used)) == len(used)
    assert len(set(lost)) == len(lost)

"""Elastic quorums: all surviving ranks commit a step, or no rank commits it, with any deaths, joins and losses."""

from __future__ import annotations

from collections.abc import Iterable, Sized

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.random_examples import num_examples

from paceline.errors import ProtocolError
from paceline.protocol.quorum import (
    AnnounceNewcomers,
    BreakQuorum,
    Coordinator,
    DismissProcess,
    ExpelMember,
    FailTraining,
    JoinRequest,
    LeaveNotice,
    QuorumInstruction,
    QuorumMember,
    QuorumReport,
    RejectMember,
    RetryJoin,
    StartQuorum,
)


def report(member: int, quorum: int, step: int, *, prepared: bool = False, epoch: int | None = None) -> QuorumReport:
    return QuorumReport(member, quorum, step, prepared, True, epoch=epoch)


def started(instructions: Iterable[QuorumInstruction]) -> StartQuorum:
    """Return the start of the only new quorum."""
    (start,) = [instruction for instruction in instructions if isinstance(instruction, StartQuorum)]
    return start


@pytest.fixture
def coordinator() -> Coordinator:
    """Return a coordinator whose first quorum has the members 0, 1 and 2."""
    found = Coordinator(range(3), min_ranks=1, max_ranks=4, report_timeout_s=10.0)
    assert found.joined(JoinRequest(2, 0)) == found.joined(JoinRequest(0, 0)) == []
    assert started(found.joined(JoinRequest(1, 0))) == StartQuorum(1, (0, 1, 2), 0, 3)
    return found


def test_a_step_is_committed_if_one_survivor_committed_it(coordinator: Coordinator) -> None:
    assert coordinator.ended(1, is_failure=True) == [BreakQuorum(1)]
    assert coordinator.reported(report(0, 1, 5), 0.0) == []
    assert started(coordinator.reported(report(2, 1, 4, prepared=True), 0.0)) == StartQuorum(2, (0, 2), 5, 2)


@pytest.mark.parametrize(("is_prepared", "step"), [(True, 5), (False, 4)])
def test_a_step_is_committed_if_all_survivors_are_prepared(
    coordinator: Coordinator, is_prepared: bool, step: int
) -> None:
    coordinator.ended(1, is_failure=True)
    coordinator.reported(report(0, 1, 4, prepared=True), 0.0)
    assert started(coordinator.reported(report(2, 1, 4, prepared=is_prepared), 0.0)).step == step


def test_the_step_of_a_departed_member_is_committed(coordinator: Coordinator) -> None:
    coordinator.ended(1, is_failure=True)
    coordinator.left(LeaveNotice(0, 9))
    assert started(coordinator.reported(report(2, 1, 8, prepared=True), 0.0)) == StartQuorum(2, (2,), 9, 1)


def test_a_newcomer_enters_between_two_steps_and_is_not_ready(coordinator: Coordinator) -> None:
    coordinator.started(3)
    assert coordinator.joined(JoinRequest(3, 2)) == [AnnounceNewcomers(1)]
    coordinator.reported(report(0, 1, 7, epoch=2), 0.0)
    coordinator.reported(report(1, 1, 6, prepared=True), 0.0)
    assert started(coordinator.reported(report(2, 1, 7, epoch=2), 0.0)) == StartQuorum(2, (0, 1, 2, 3), 7, 3)


def test_too_few_members_wait_for_newcomers() -> None:
    coordinator = Coordinator(range(2), min_ranks=2, max_ranks=2, report_timeout_s=10.0)
    coordinator.joined(JoinRequest(0, 0, patience_s=30))
    coordinator.joined(JoinRequest(1, 0, patience_s=30))
    assert coordinator.reported(report(0, 1, 0, epoch=0), 100.0) == []
    assert coordinator.ended(1, is_failure=True) == [BreakQuorum(1)]
    deadline_s = coordinator.deadline_s
    assert deadline_s == 130.0
    coordinator.started(2)
    instructions = coordinator.joined(JoinRequest(2, 0, patience_s=30))
    assert started(instructions) == StartQuorum(2, (0, 2), 0, 1)
    assert coordinator.deadline_s is None
    coordinator.ended(2, is_failure=True)
    assert coordinator.reported(report(0, 2, 0, epoch=0), 200.0) == coordinator.time_passed(229.0) == []
    assert coordinator.time_passed(230.0) == [
        FailTraining("1 rank is left, no new rank has joined within 30 s, and --min-ranks is 2")
    ]


def test_too_few_members_also_wait_if_the_failed_process_had_left_before() -> None:
    coordinator = Coordinator(range(2), min_ranks=2, max_ranks=2, report_timeout_s=10.0)
    for member in range(2):
        coordinator.joined(JoinRequest(member, 0, patience_s=30))
    coordinator.left(LeaveNotice(1, 0))
    assert started(coordinator.reported(report(0, 1, 0, epoch=0), 100.0)).members == (0,)
    assert coordinator.ended(1, is_failure=True) == [BreakQuorum(2)]
    assert coordinator.reported(report(0, 2, 0, epoch=0), 101.0) == []
    assert coordinator.deadline_s == 131.0
    coordinator.started(2)
    assert started(coordinator.joined(JoinRequest(2, 0, patience_s=30))).members == (0, 2)


def test_a_member_without_a_report_is_lost_while_the_others_wait() -> None:
    coordinator = Coordinator(range(3), min_ranks=2, max_ranks=3, report_timeout_s=10.0)
    for member in range(3):
        coordinator.joined(JoinRequest(member, 0, patience_s=30))
    coordinator.ended(1, is_failure=True)
    coordinator.reported(report(0, 1, 0, epoch=0), 100.0)
    assert coordinator.time_passed(110.0) == [BreakQuorum(1), ExpelMember(2)]
    assert coordinator.deadline_s == 130.0
    coordinator.started(3)
    assert started(coordinator.joined(JoinRequest(3, 0))) == StartQuorum(2, (0, 3), 0, 1)


def test_the_last_members_of_a_training_do_not_wait_for_newcomers() -> None:
    coordinator = Coordinator(range(2), min_ranks=2, max_ranks=2, report_timeout_s=10.0)
    for member in range(2):
        coordinator.joined(JoinRequest(member, 0, patience_s=30))
    coordinator.left(LeaveNotice(1, 0))
    coordinator.ended(1, is_failure=False)
    assert started(coordinator.reported(report(0, 1, 0, epoch=0), 100.0)) == StartQuorum(2, (0,), 0, 1)


def test_a_newcomer_of_another_epoch_joins_again(coordinator: Coordinator) -> None:
    coordinator.started(3)
    coordinator.joined(JoinRequest(3, 1))
    for member in (0, 1):
        coordinator.reported(report(member, 1, 7, epoch=2), 0.0)
    instructions = coordinator.reported(report(2, 1, 7, epoch=2), 0.0)
    assert started(instructions).members == (0, 1, 2)
    assert RetryJoin(3) in instructions


def test_no_more_than_max_ranks_enter(coordinator: Coordinator) -> None:
    for member in (3, 4):
        coordinator.started(member)
        coordinator.joined(JoinRequest(member, 0))
    for member in (0, 1):
        coordinator.reported(report(member, 1, 1, epoch=0), 0.0)
    assert started(coordinator.reported(report(2, 1, 1, epoch=0), 0.0)).members == (0, 1, 2, 3)


def test_a_newcomer_waits_for_the_first_quorum() -> None:
    coordinator = Coordinator(range(2), min_ranks=1, max_ranks=2, report_timeout_s=10.0)
    coordinator.joined(JoinRequest(0, 0))
    coordinator.started(2)
    assert coordinator.joined(JoinRequest(2, 0)) == []
    first = [StartQuorum(1, (0,), 0, 1), AnnounceNewcomers(1)]
    assert coordinator.ended(1, is_failure=True) == first


def test_too_few_ranks_end_the_training() -> None:
    coordinator = Coordinator(range(2), min_ranks=2, max_ranks=2, report_timeout_s=10.0)
    coordinator.joined(JoinRequest(0, 0))
    coordinator.joined(JoinRequest(1, 0))
    (failure,) = coordinator.ended(1, is_failure=True)
    assert isinstance(failure, FailTraining)
    assert "1 rank is left" in failure.reason
    assert "--min-ranks is 2" in failure.reason


def test_too_many_changes_end_the_training() -> None:
    coordinator = Coordinator(range(3), min_ranks=1, max_ranks=3, report_timeout_s=10.0, max_changes=1)
    for member in range(3):
        coordinator.joined(JoinRequest(member, 0))
    for member in range(3):  # the quorum breaks, but its members do not change
        found = coordinator.reported(report(member, 1, 0), 0.0)
    assert started(found).members == (0, 1, 2)
    coordinator.ended(2, is_failure=True)
    coordinator.reported(report(0, 2, 0), 0.0)
    assert started(coordinator.reported(report(1, 2, 0), 0.0)).members == (0, 1)
    coordinator.ended(1, is_failure=True)
    (failure,) = coordinator.reported(report(0, 3, 0), 0.0)
    assert isinstance(failure, FailTraining)
    assert "changed more than 1 times (--max-changes" in failure.reason


def test_a_silent_member_is_removed_and_rejected_when_it_returns(coordinator: Coordinator) -> None:
    for member in (0, 1):
        coordinator.reported(report(member, 1, 3), 5.0)
    assert coordinator.time_passed(14.9) == []
    instructions = coordinator.time_passed(15.0)
    assert instructions[:2] == [BreakQuorum(1), ExpelMember(2)]
    assert started(instructions).members == (0, 1)
    assert isinstance(coordinator.reported(report(2, 1, 3), 16.0)[0], RejectMember)
    assert isinstance(coordinator.joined(JoinRequest(2, 0))[0], RejectMember)


def test_a_repeated_report_gets_the_same_answer(coordinator: Coordinator) -> None:
    for member in (0, 1):
        coordinator.reported(report(member, 1, 3), 0.0)
    start = started(coordinator.reported(report(2, 1, 3), 0.0))
    assert coordinator.reported(report(0, 1, 3), 0.0) == [start]
    assert coordinator.joined(JoinRequest(1, 0)) == [start]


def test_a_newcomer_is_dismissed_after_the_training(coordinator: Coordinator) -> None:
    coordinator.started(3)
    coordinator.joined(JoinRequest(3, 0))
    for member in range(3):
        coordinator.left(LeaveNotice(member, 4))
    instructions = [i for member in range(3) for i in coordinator.ended(member, is_failure=False)]
    assert instructions == [DismissProcess(3)]
    coordinator.started(4)
    assert coordinator.joined(JoinRequest(4, 0)) == [DismissProcess(4)]


def test_a_slow_member_leaves_and_enters_again_as_a_newcomer(coordinator: Coordinator) -> None:
    coordinator.left(LeaveNotice(1, 5, will_return=True))
    coordinator.reported(report(0, 1, 5, epoch=0), 0.0)
    assert started(coordinator.reported(report(2, 1, 5, epoch=0), 0.0)) == StartQuorum(2, (0, 2), 5, 2)
    assert coordinator.joined(JoinRequest(1, 0)) == [AnnounceNewcomers(2)]
    coordinator.reported(report(0, 2, 7, epoch=0), 0.0)
    assert started(coordinator.reported(report(2, 2, 7, epoch=0), 0.0)) == StartQuorum(3, (0, 2, 1), 7, 2)


def test_slow_members_are_alive_but_have_no_state() -> None:
    coordinator = Coordinator(range(2), min_ranks=1, max_ranks=2, report_timeout_s=10.0)
    for member in range(2):
        coordinator.joined(JoinRequest(member, 0))
    coordinator.left(LeaveNotice(1, 5, will_return=True))
    (failure,) = coordinator.ended(0, is_failure=True)[-1:]
    assert isinstance(failure, FailTraining)
    assert "no rank is left that has the training's state" in failure.reason


def test_a_slow_member_is_dismissed_after_the_training(coordinator: Coordinator) -> None:
    coordinator.left(LeaveNotice(1, 5, will_return=True))
    for member in (0, 2):
        coordinator.left(LeaveNotice(member, 6))
        coordinator.ended(member, is_failure=False)
    assert coordinator.is_over
    assert coordinator.joined(JoinRequest(1, 0)) == [DismissProcess(1)]


def test_a_state_without_a_source_ends_the_training(coordinator: Coordinator) -> None:
    coordinator.started(3)
    coordinator.joined(JoinRequest(3, 0))
    for member in range(3):
        coordinator.reported(report(member, 1, 1, epoch=0), 0.0)
    for member in range(3):
        coordinator.ended(member, is_failure=True)
    (failure,) = coordinator.reported(QuorumReport(3, 2, 1, False, False), 0.0)
    assert isinstance(failure, FailTraining)


@pytest.mark.parametrize(("gives_state", "num_ready"), [(True, 2), (False, 1)])
def test_a_committed_step_makes_newcomers_ready_only_if_it_gives_the_state(
    coordinator: Coordinator, gives_state: bool, num_ready: int
) -> None:
    coordinator.started(3)
    coordinator.joined(JoinRequest(3, 0))
    for member in range(3):
        coordinator.reported(report(member, 1, 1, epoch=0), 0.0)
    coordinator.ended(0, 1, is_failure=True)
    coordinator.reported(report(2, 2, 2), 0.0)
    start = started(coordinator.reported(QuorumReport(3, 2, 1, True, False, gives_state), 0.0))
    assert start == StartQuorum(3, (2, 3), 2, num_ready)


@pytest.mark.parametrize("is_by_vote", [True, False])
def test_a_newcomer_is_ready_after_the_commit_of_a_step_that_gives_the_state(is_by_vote: bool) -> None:
    member = QuorumMember(3, is_ready=False)
    member.start(StartQuorum(2, (0, 3), 1, 1))
    for gives_state in (False, True):
        member.prepare(gives_state=gives_state)
        assert member.report().gives_state == gives_state
        assert not member.is_ready
        if is_by_vote:
            member.commit()
        else:
            assert member.start(StartQuorum(member.quorum + 1, (0, 3), member.step + 1, 1))
        assert member.is_ready == gives_state


def test_a_newcomer_is_not_ready_after_a_step_that_is_repeated() -> None:
    member = QuorumMember(3, is_ready=False)
    member.start(StartQuorum(2, (0, 3), 1, 1))
    member.prepare(gives_state=True)
    assert not member.start(StartQuorum(3, (0, 3), 1, 1))
    assert not member.is_ready


def test_a_rank_accepts_only_higher_quorum_numbers() -> None:
    member = QuorumMember(1, is_ready=True)
    assert not member.start(StartQuorum(3, (0, 1), 0, 2))
    with pytest.raises(ProtocolError):
        member.start(StartQuorum(3, (0, 1), 0, 2))
    with pytest.raises(ProtocolError):
        member.start(StartQuorum(4, (0, 2), 0, 2))
    with pytest.raises(ProtocolError):
        member.start(StartQuorum(4, (0, 1), 1, 2))


def open_start(*, min_ranks: int = 1) -> Coordinator:
    """Return a coordinator whose first quorum has two places."""
    return Coordinator(min_ranks=min_ranks, max_ranks=3, report_timeout_s=10.0, num_places=2, start_timeout_s=5.0)


def test_the_first_quorum_starts_when_its_places_are_taken() -> None:
    coordinator = open_start()
    for member in range(3):
        coordinator.started(member, 1.0)
    assert [coordinator.is_newcomer(member) for member in range(3)] == [False, False, True]
    assert coordinator.joined(JoinRequest(2, 0)) == coordinator.joined(JoinRequest(0, 0)) == []
    assert started(coordinator.joined(JoinRequest(1, 0))).members == (0, 1)
    assert coordinator.deadline_s is None


def test_the_place_of_a_dead_process_is_free_again() -> None:
    coordinator = open_start(min_ranks=2)
    for member in range(2):
        coordinator.started(member, 1.0)
    coordinator.joined(JoinRequest(0, 0))
    assert coordinator.ended(1, is_failure=True) == []
    coordinator.started(0, 3.0)  # a repeated request does not take the place
    coordinator.started(2, 3.0)
    assert not coordinator.is_newcomer(2)
    assert started(coordinator.joined(JoinRequest(2, 0))).members == (0, 2)


def test_a_newcomer_replaces_an_initial_process_that_dies_before_the_first_quorum() -> None:
    coordinator = open_start(min_ranks=2)
    for member in range(3):
        coordinator.started(member, 1.0)
    assert coordinator.joined(JoinRequest(2, 0)) == coordinator.joined(JoinRequest(0, 0)) == []
    first, announcement = coordinator.ended(1, is_failure=True)
    assert first == StartQuorum(1, (0,), 0, 1)
    assert announcement == AnnounceNewcomers(1)
    assert started(coordinator.reported(report(0, 1, 4, epoch=0), 5.0)) == StartQuorum(2, (0, 2), 4, 1)
    assert coordinator.time_passed(100.0) == []


def test_a_newcomer_dies_before_it_replaces_an_initial_process() -> None:
    coordinator = open_start(min_ranks=2)
    for member in range(3):
        coordinator.started(member, 1.0)
    coordinator.joined(JoinRequest(0, 0))
    assert started(coordinator.ended(1, is_failure=True)).members == (0,)
    (failure,) = coordinator.ended(2, is_failure=True)
    assert isinstance(failure, FailTraining)
    assert "1 rank is left, and --min-ranks is 2" in failure.reason


def test_newcomers_do_not_begin_a_training() -> None:
    """They have computed alone. New processes take the free places."""
    coordinator = open_start()
    for member in range(4):
        coordinator.started(member, 1.0)
    coordinator.joined(JoinRequest(2, 0))
    coordinator.joined(JoinRequest(3, 0))
    assert coordinator.ended(0, 1, is_failure=True) == []
    coordinator.started(4, 2.0)
    assert not coordinator.is_newcomer(4)
    assert started(coordinator.joined(JoinRequest(4, 0))).members == (4,)


def test_the_first_quorum_starts_without_the_missing_processes() -> None:
    coordinator = open_start()
    coordinator.started(0, 1.0)
    coordinator.joined(JoinRequest(0, 0))
    assert coordinator.deadline_s == 6.0
    assert coordinator.time_passed(5.9) == []
    assert started(coordinator.time_passed(6.0)).members == (0,)
    coordinator.started(1, 7.0)
    assert coordinator.is_newcomer(1)


def test_a_process_that_has_started_in_time_is_awaited() -> None:
    coordinator = open_start()
    for member in range(2):
        coordinator.started(member, 1.0)
    coordinator.ended(0, is_failure=True)
    assert coordinator.time_passed(6.0) == []
    assert started(coordinator.joined(JoinRequest(1, 0))).members == (1,)


@pytest.mark.parametrize("is_late", [True, False])
def test_too_few_processes_end_the_training(*, is_late: bool) -> None:
    """A process is missing at the time limit, or dies after it, before it has joined."""
    coordinator = open_start(min_ranks=2)
    coordinator.started(0, 1.0)
    if is_late:
        coordinator.started(1, 1.0)
        assert coordinator.time_passed(6.0) == []
    (failure,) = coordinator.ended(1, is_failure=True) if is_late else coordinator.time_passed(6.0)
    assert isinstance(failure, FailTraining)
    assert "--min-ranks is 2" in failure.reason
    assert coordinator.has_failed


def test_many_reconfigurations_leave_no_state() -> None:
    coordinator = Coordinator(range(3), min_ranks=1, max_ranks=3, report_timeout_s=10.0)
    for member in range(3):
        coordinator.joined(JoinRequest(member, 0))
    for number in range(10_000):
        dead, *living = coordinator.members
        coordinator.ended(dead, is_failure=True)
        coordinator.started(number + 3)
        coordinator.joined(JoinRequest(number + 3, 0))
        for epoch in (None, 0):
            for member in living:
                instructions = coordinator.reported(report(member, coordinator.quorum, number, epoch=epoch), 0.0)
        assert started(instructions).members == (*living, number + 3)
    assert max(len(state) for state in vars(coordinator).values() if isinstance(state, Sized)) <= 3


class Rank:
    """A simulated process: it exchanges gradients, votes, reports, and waits."""

    def __init__(self, member: int, *, is_newcomer: bool) -> None:
        self.rules = QuorumMember(member, is_ready=not is_newcomer)
        self.is_waiting = False
        """Whether the rank waits for the coordinator's answer."""
        self.phase = 0
        """0: contributes to the exchange next; 1: awaits its result; 2: contributes to the vote next; 3: awaits it."""
        self.prepared_in = 0
        """Quorum of the last exchange with a result."""
        self.knows_newcomers = False
        self.pending: JoinRequest | QuorumReport = JoinRequest(member, 0)


class Elastic(RuleBasedStateMachine):
    """Ranks die and join in large numbers, and collectives fail on any subset of ranks.

    Requests and answers are lost. Ranks that are cut off from the coordinator continue after the timeout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator(range(3), min_ranks=1, max_ranks=4, report_timeout_s=10.0)
        self.ranks = {member: Rank(member, is_newcomer=False) for member in range(3)}
        self.next_member = 3
        self.time_s = 0.0
        self.broken: set[int] = set()
        self.contributions: dict[tuple[int, int, str], set[int]] = {}
        """Members that have contributed, by quorum, step and kind of exchange."""
        self.members: dict[int, tuple[int, ...]] = {}
        self.has_announced: set[int] = set()
        self.decisions: dict[tuple[int, int], bool] = {}
        """By quorum and step: whether the coordinator's next quorum commits the step."""
        self.applied: dict[int, set[int]] = {}
        """Members that have committed, by step."""
        self.gives_state: dict[tuple[int, int], bool] = {}
        """By quorum and step: whether the step gives the state to newcomers."""
        self.holders = set(self.ranks)
        """Members that have the state."""
        self.results: dict[int, int] = {}
        """Quorum of the exchange whose result was committed, by step."""
        self.highest = 0

    def living(self) -> list[int]:
        return sorted(self.ranks)

    def carry_out(self, instructions: Iterable[QuorumInstruction], *, is_dropped: bool = False) -> None:
        for instruction in instructions:
            match instruction:
                case StartQuorum():
                    self.highest = max(self.highest, instruction.quorum)
                    assert self.members.setdefault(instruction.quorum, instruction.members) == instruction.members
                    self.broken.update(range(instruction.quorum))
                    for member in instruction.members:
                        rank = self.ranks.get(member)
                        if rank is not None and rank.is_waiting and not is_dropped:
                            self.enter(rank, instruction)
                case AnnounceNewcomers(quorum=quorum):
                    self.has_announced.add(quorum)
                case BreakQuorum(quorum=quorum):
                    self.broken.add(quorum)
                case RejectMember(member=member) | DismissProcess(member=member):
                    self.ranks.pop(member, None)
                case ExpelMember() | RetryJoin():  # a rank without a connection is not killed
                    pass

    def enter(self, rank: Rank, start: StartQuorum) -> None:
        if start.quorum <= rank.rules.quorum:
            return  # an answer to an earlier report
        before = rank.rules.quorum, rank.rules.step
        is_committed = rank.rules.start(start)
        if before[0]:
            assert self.decisions.setdefault((start.quorum, before[1]), is_committed) == is_committed
        if is_committed:
            self.apply(rank)
        assert set(start.members[: start.num_ready]) & {rank.rules.member} <= self.holders
        assert rank.rules.is_ready == (rank.rules.member in start.members[: start.num_ready])
        rank.is_waiting, rank.phase, rank.knows_newcomers = False, 0, False

    def apply(self, rank: Rank) -> None:
        assert self.results.setdefault(rank.rules.step, rank.prepared_in) == rank.prepared_in, "a step has two results"
        if self.gives_state[rank.prepared_in, rank.rules.step - 1]:
            self.holders.add(rank.rules.member)
        self.applied.setdefault(rank.rules.step, set()).add(rank.rules.member)

    def send(self, rank: Rank, is_dropped: bool) -> None:
        rank.is_waiting = True
        request = rank.pending
        if isinstance(request, JoinRequest):
            self.carry_out(self.coordinator.joined(request), is_dropped=is_dropped)
        else:
            self.carry_out(self.coordinator.reported(request, self.time_s), is_dropped=is_dropped)

    def fail(self, rank: Rank, *, is_dropped: bool, epoch: int | None = None) -> None:
        self.broken.add(rank.rules.quorum)  # the rank closes its group
        rank.pending = rank.rules.report(epoch)
        self.send(rank, is_dropped)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def cut_off(self, data: st.DataObject) -> None:
        """Fail a rank's exchange, and lose its report. The report is sent again later."""
        rank = self.ranks[data.draw(st.sampled_from(self.living()))]
        if rank.rules.quorum and not rank.is_waiting:
            self.broken.add(rank.rules.quorum)
            rank.pending, rank.is_waiting = rank.rules.report(), True

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), answer_lost=st.booleans())
    def advance(self, data: st.DataObject, answer_lost: bool) -> None:
        rank = self.ranks[data.draw(st.sampled_from(self.living()))]
        if rank.is_waiting or not rank.rules.quorum:
            self.send(rank, answer_lost)  # the first request, or its repetition after a lost connection
            return
        quorum = rank.rules.quorum
        kind = "exchange" if rank.phase < 2 else "vote"
        given = self.contributions.setdefault((quorum, rank.rules.step, kind), set())
        if rank.phase in (0, 2):
            if quorum in self.broken:
                self.fail(rank, is_dropped=answer_lost)
                return
            if rank.phase == 0 and rank.knows_newcomers:
                self.fail(rank, is_dropped=answer_lost, epoch=0)
                return
            given.add(rank.rules.member)
            rank.phase += 1
        elif given != set(self.members[quorum]):
            if quorum in self.broken:
                self.fail(rank, is_dropped=answer_lost)
        elif quorum in self.broken and data.draw(st.booleans(), label="the result is lost"):
            self.fail(rank, is_dropped=answer_lost)
        elif rank.phase == 1:
            place = quorum, rank.rules.step
            if place not in self.gives_state:
                self.gives_state[place] = data.draw(st.booleans(), label="the step gives the state")
            rank.rules.prepare(gives_state=self.gives_state[place])
            rank.phase, rank.prepared_in = 2, quorum
        else:
            rank.rules.commit()
            rank.phase, rank.knows_newcomers = 0, self.sees_newcomers(quorum, rank.rules.step)
            self.apply(rank)

    def sees_newcomers(self, quorum: int, step: int) -> bool:
        """Return the flag of the vote: all ranks receive its value at the first commit."""
        flags = self.__dict__.setdefault("flags", {})
        return bool(flags.setdefault((quorum, step), quorum in self.has_announced))

    @precondition(lambda self: len(self.ranks) > 1)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.living()))
        quorum = self.ranks.pop(member).rules.quorum
        self.broken.add(quorum)
        self.carry_out(self.coordinator.ended(member, is_failure=True))

    def stragglers(self) -> list[Rank]:
        """Return the ranks that may leave temporarily: ranks between two steps, if another rank has the state."""
        present = [
            rank
            for rank in self.ranks.values()
            if rank.rules.quorum == self.coordinator.quorum and rank.rules.is_ready and not rank.is_waiting
        ]
        return [rank for rank in present if rank.phase == 0 and len(present) > 1]

    @precondition(lambda self: self.coordinator.quorum and self.stragglers())
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        rules = data.draw(st.sampled_from(self.stragglers())).rules
        self.broken.add(rules.quorum)
        self.holders.discard(rules.member)
        self.ranks[rules.member] = Rank(rules.member, is_newcomer=True)
        self.carry_out(self.coordinator.left(LeaveNotice(rules.member, rules.step, will_return=True)))

    @precondition(lambda self: len(self.ranks) < 6)
    @rule(count=st.integers(1, 5))
    def start_processes(self, count: int) -> None:
        for _ in range(count):
            self.coordinator.started(self.next_member)
            self.ranks[self.next_member] = Rank(self.next_member, is_newcomer=True)
            self.next_member += 1

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.time_s += seconds
        self.carry_out(self.coordinator.time_passed(self.time_s))

    @invariant()
    def numbers_grow(self) -> None:
        assert len(self.coordinator.members) <= 4
        assert all(m in self.coordinator.members for m in range(self.next_member) if m in self.coordinator._alive)
        assert self.highest == self.coordinator.quorum

    @invariant()
    def no_survivor_misses_a_step(self) -> None:
        """Check that a living rank is at most one step behind, and has prepared a step committed elsewhere."""
        if self.coordinator.has_failed:
            return
        members = [
            rank.rules for member, rank in self.ranks.items() if member in self.coordinator._alive and rank.rules.quorum
        ]
        top = max((member.step for member in members), default=0)
        for member in members:
            assert member.step + member.is_prepared >= top or member.quorum < self.coordinator.quorum


Elastic.TestCase.settings = num_examples(150, stateful_step_count=60)
TestElastic = Elastic.TestCase

"""The times of rounds of the negotiation, and of the messages that wake other ranks."""

from __future__ import annotations

import pytest

from paceline.protocol.negotiation.schedule import GRACE_S, NO_ROUND, RoundSchedule, ThreadAction


def act(
    schedule: RoundSchedule, time_s: float, *, needs_round: bool = False, has_pending: bool = False
) -> ThreadAction:
    return schedule.next_action(time_s, needs_round=needs_round, has_pending=has_pending)


def begin(schedule: RoundSchedule, time_s: float, *, is_background: bool = False, has_idle_ranks: bool = False) -> bool:
    return schedule.begin_round(time_s, is_background=is_background, has_idle_ranks=has_idle_ranks)


def is_asleep(schedule: RoundSchedule) -> bool:
    return schedule.is_asleep


@pytest.fixture
def awake() -> RoundSchedule:
    """A rank whose background thread is awake after a request at 10 s."""
    schedule = RoundSchedule()
    schedule.request(10.0)
    return schedule


def test_the_background_thread_gives_other_threads_time_to_run_the_round(awake: RoundSchedule) -> None:
    first = act(awake, 10.0, needs_round=True)
    assert not first.runs_round
    assert first.timeout_s == pytest.approx(GRACE_S)
    awake.request(None)  # a later request of the same round
    assert not is_asleep(awake)
    assert act(awake, 10.0 + 1.01 * GRACE_S, needs_round=True).runs_round


def test_the_background_thread_sleeps_if_there_are_no_requests(awake: RoundSchedule) -> None:
    assert 0 < act(awake, 10.0).timeout_s < 0.1
    assert not is_asleep(awake)
    assert act(awake, 10.1).timeout_s > 3600
    assert is_asleep(awake)
    assert act(awake, 10.1, has_pending=True).timeout_s == 1.0


@pytest.mark.parametrize("is_own", [False, True])
def test_a_rank_checks_the_others_after_a_long_wait(is_own: bool) -> None:
    schedule = RoundSchedule()
    act(schedule, 10.0, has_pending=True)
    if is_own:  # a request has woken the thread
        schedule.is_asleep = False
    assert schedule.woken(NO_ROUND) is not is_own
    assert act(schedule, 11.0).runs_round is not is_own


def test_a_round_of_another_rank_is_run_once() -> None:
    schedule = RoundSchedule()
    act(schedule, 10.0)
    assert not schedule.woken(0)
    assert act(schedule, 10.0).runs_round
    schedule.end_vote()
    assert not act(schedule, 10.0).runs_round
    schedule.woken(1)
    schedule.woken(0)  # late
    assert act(schedule, 10.0).runs_round


def test_other_ranks_are_woken_if_a_round_does_not_begin_soon(awake: RoundSchedule) -> None:
    assert not begin(awake, 10.0)
    assert not act(awake, 10.001).wakes_ranks
    assert act(awake, 10.02).wakes_ranks
    assert not act(awake, 10.04).wakes_ranks, "they were woken"
    awake.end_vote()
    awake.is_asleep = False
    are_early = [begin(awake, 11.0) for _ in range(12)]
    assert are_early == [True] * 10 + [False] * 2


def test_a_round_that_begins_soon_wakes_no_ranks(awake: RoundSchedule) -> None:
    for number in range(20):
        assert not begin(awake, 10.0 + number)
        awake.end_vote()
        assert not act(awake, 10.5 + number).wakes_ranks
        awake.is_asleep = False


def test_a_woken_rank_wakes_others_too(awake: RoundSchedule) -> None:
    """The other rank relies on it, because it wakes only some of the ranks."""
    assert not begin(awake, 10.0)
    assert not awake.woken(0)
    assert act(awake, 10.0).wakes_ranks
    awake.end_vote()
    assert not begin(awake, 10.0), "no rank was late"


def test_ranks_are_woken_at_once_if_they_may_have_no_requests(awake: RoundSchedule) -> None:
    assert begin(awake, 10.0, has_idle_ranks=True)
    assert begin(awake, 10.0, is_background=True)
    assert begin(awake, 10.0), "the round before ran in the background"
    assert not begin(awake, 10.0)
    awake.is_asleep = True  # the background thread could not wake them later
    assert begin(awake, 10.0)

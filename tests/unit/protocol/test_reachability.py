"""The choice of the server to expel if live servers do not reach each other: examples, and any reports."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.protocol import Silence
from paceline.protocol.chains import ChainGroup, chain_group
from paceline.protocol.reachability import Reachability, Unreachable

PATIENCE_S = 5.0
BEAT_S = 1.0


def run(
    complaints: dict[int, tuple[int, ...]],
    *,
    servers: tuple[int, ...] = (1, 2, 3, 4, 5),
    groups: tuple[ChainGroup, ...] = (),
    beats: int = 6,
) -> Unreachable | None:
    """Return the decision after a number of heartbeats with these reports of unreachable servers."""
    rule = Reachability(PATIENCE_S)
    for beat in range(beats):
        for server in servers:
            rule.record_heartbeat(server, complaints.get(server, ()), beat * BEAT_S)
            rule.validate()
    return rule.decide(servers, groups, (beats - 1) * BEAT_S)


@pytest.mark.parametrize(
    ("complaints", "goes"),
    [
        ({}, None),
        ({1: (2,)}, Unreachable(2, (1,))),  # the younger server of two
        ({2: (1,)}, Unreachable(2, (1,))),  # whichever server reports it
        ({1: (2,), 2: (1,)}, Unreachable(2, (1,))),  # a pair counts once
        ({1: (2, 3)}, Unreachable(1, (2, 3))),  # the server with the most conflicts
        ({2: (1,), 3: (1,), 4: (1,)}, Unreachable(1, (2, 3, 4))),
        ({1: (2, 3), 2: (1,), 3: (1,)}, Unreachable(1, (2, 3))),
        ({1: (2,), 3: (4,)}, Unreachable(4, (3,))),  # one server at a time
        ({1: (9,)}, None),  # reports about dead servers are ignored
        ({1: (1,)}, None),
    ],
)
def test_the_expelled_server(complaints: dict[int, tuple[int, ...]], goes: Unreachable | None) -> None:
    assert run(complaints) == goes
    assert run(complaints, beats=5) is None  # too early


def test_reports_of_expelled_members_are_dropped_and_other_reports_are_checked_again() -> None:
    rule = Reachability(PATIENCE_S)
    for beat in range(6):
        for server, peers in ((1, ()), (2, (1, 3, 5)), (3, ()), (4, (5,)), (5, (2,))):
            rule.record_heartbeat(server, peers, beat * BEAT_S)
    assert rule.in_doubt == {1, 2, 3, 4, 5}
    assert rule.decide((1, 2, 3, 4, 5), (), 5.0) == Unreachable(2, (1, 3, 5))
    assert rule.in_doubt >= {4, 5}
    assert rule.decide((1, 3, 4, 5), (), 5.0) == Unreachable(5, (4,))
    assert rule.decide((1, 3, 4), (), 5.0) is None
    assert rule.decide((1,), (), 5.0) is None


def test_a_complaint_must_be_repeated() -> None:
    rule = Reachability(PATIENCE_S)
    for beat in range(10):
        rule.record_heartbeat(1, () if beat == 4 else (2,), beat * BEAT_S)
        rule.record_heartbeat(2, (), beat * BEAT_S)
        assert rule.decide((1, 2), (), beat * BEAT_S) is None
    for server, peers in ((1, (2,)), (2, ())):
        rule.record_heartbeat(server, peers, 10.0)
    assert rule.decide((1, 2), (), 10.0) == Unreachable(2, (1,))


def test_the_time_after_the_last_report_is_not_counted() -> None:
    """After the report, the servers may have connected."""
    rule = Reachability(PATIENCE_S)
    for beat in range(5):
        rule.record_heartbeat(1, (2,), beat * BEAT_S)
        rule.record_heartbeat(2, (), beat * BEAT_S)
    rule.record_heartbeat(2, (), 5.5)
    assert rule.decide((1, 2), (), 5.5) is None  # the reports cover 4 s
    rule.record_heartbeat(1, (2,), 5.6)
    assert rule.decide((1, 2), (), 5.6) == Unreachable(2, (1,))
    rule.record_heartbeat(1, (), 5.7)
    assert rule.decide((1, 2), (), 5.7) is None


def test_a_report_about_silent_members_expels_no_server() -> None:
    """Servers 1 and 2 are cut off from server 3 and the scheduler. Server 3 reports both, and is not expelled."""
    rule = Reachability(PATIENCE_S)
    for beat in range(30):
        rule.record_heartbeat(3, (1, 2) if beat > 4 else (), beat * BEAT_S)
        if beat < 2:
            rule.record_heartbeat(1, (), beat * BEAT_S)
            rule.record_heartbeat(2, (), beat * BEAT_S)
        assert rule.decide((1, 2, 3), (), beat * BEAT_S) is None


def test_a_stopped_server_has_time_to_answer() -> None:
    rule = Reachability(PATIENCE_S)
    for beat in range(30):
        rule.record_heartbeat(1, (2,) if 5 <= beat < 14 else (), beat * BEAT_S)
        if not 1 <= beat <= 10:
            rule.record_heartbeat(2, (), beat * BEAT_S)
        assert rule.decide((1, 2), (), beat * BEAT_S) is None, beat
    for beat in range(30, 36):
        rule.record_heartbeat(1, (2,), beat * BEAT_S)
        rule.record_heartbeat(2, (), beat * BEAT_S)
    assert rule.decide((1, 2), (), 35.0) == Unreachable(2, (1,))


@pytest.mark.parametrize(
    ("complaints", "chains", "goes"),
    [
        ({1: (2,)}, [(2,)], 1),  # 2 has the last copy, so the older server is expelled
        ({1: (2,)}, [(2,), (1,)], None),  # both servers have a last copy, so both stay
        ({1: (2,), 3: (4,)}, [(2, 4), (1, 3)], 4),
        ({1: (2,), 3: (4,)}, [(4,), (1, 3)], 3),
        # server 1 has the most conflicts but a last copy, so its peers are expelled one by one
        (
            {1: (2, 3)},
            [(1,)],
            3,
        ),
        ({1: (2, 3)}, [(1,), (2, 3)], 3),
        ({1: (2, 3)}, [(1,), (2,), (3,)], None),
        ({1: (2, 3), 4: (5,)}, [(1,), (4, 5)], 5),  # each pair is independent of the other servers
        ({1: (2, 3), 4: (5,)}, [(1,), (2,), (3,), (4, 5)], 5),
    ],
)
def test_the_last_server_with_a_bucket_is_never_expelled(
    complaints: dict[int, tuple[int, ...]], chains: list[tuple[int, ...]], goes: int | None
) -> None:
    groups = tuple(chain_group(members, None, 1 << bucket) for bucket, members in enumerate(chains))
    decided = run(complaints, groups=groups)
    assert (None if decided is None else decided.server) == goes


def test_the_copy_of_a_silent_server_is_not_counted() -> None:
    """Server 3 dies while servers 1 and 2 are in conflict. Both have the last copy of a bucket, so both stay."""
    rule = Reachability(PATIENCE_S)
    groups = (chain_group((1, 3), None, 0b01), chain_group((3, 2), None, 0b10))
    for beat in range(12):
        for server, peers in ((1, (2,) if beat >= 4 else ()), (2, ()), (3, ())):
            if server != 3 or beat < 7:
                rule.record_heartbeat(server, peers, beat * BEAT_S)
        assert rule.decide((1, 2, 3), groups, beat * BEAT_S) is None, beat
    rule.record_heartbeat(3, (), 11.0)
    assert rule.decide((1, 2, 3), groups, 11.0) == Unreachable(2, (1,))


def test_both_of_two_silent_members_may_have_the_last_copy() -> None:
    rule = Reachability(PATIENCE_S)
    for beat in range(6):
        for server in (1, 2):
            rule.record_heartbeat(server, (2,) if server == 1 else (), beat * BEAT_S)
    groups = (chain_group((1, 2), None, 1),)
    assert rule.decide((1, 2), groups, 5.0 + PATIENCE_S / 2) == Unreachable(2, (1,))
    assert rule.decide((1, 2), groups, 5.1 + PATIENCE_S / 2) is None  # it is unknown which server is dead


def test_patience_is_positive() -> None:
    with pytest.raises(UsageError, match="patience_s=0"):
        Reachability(0.0)


@given(
    st.dictionaries(st.integers(1, 6), st.sets(st.integers(1, 6)), max_size=6),
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=2, unique=True), max_size=4),
)
def test_expulsions_for_any_reports(complaints: dict[int, set[int]], chains: list[list[int]]) -> None:
    """Members are expelled one by one until no two of them are in conflict, or neither of the two may be expelled.

    No bucket is lost. Among the candidates, the member with the most complaints is expelled.
    """
    rule, living = Reachability(PATIENCE_S), set(range(1, 7))
    for beat in range(6):
        for server in living:
            rule.record_heartbeat(server, complaints.get(server, set()), beat * BEAT_S)
    while True:
        groups = [chain_group(tuple(s for s in chain if s in living), None, 1) for chain in chains]
        pairs = {frozenset((a, b)) for a in living for b in complaints.get(a, set()) & living if a != b}
        against = Counter(server for pair in pairs for server in pair)
        last = {group.members[0] for group in groups if len(group.members) == 1}
        assert all(group.members for group in groups)
        decided = rule.decide(living, groups, 5.0)
        rule.validate()
        if decided is None:
            assert against.keys() <= last
            return
        assert decided.server not in last
        assert against[decided.server] == max(count for server, count in against.items() if server not in last)
        assert set(decided.peers) == {other for pair in pairs if decided.server in pair for other in pair} - {
            decided.server
        }
        living.remove(decided.server)
        assert living


def test_a_message_ends_the_report_before_the_next_poll() -> None:
    silence = Silence(1)
    assert [silence.poll((7, 4)) for _ in range(2)] == [(), (4, 7)]
    silence.received(7)
    assert silence.unreachable == (4,)
    silence.received(9)
    assert silence.unreachable == (4,)


def test_silence_is_counted_in_checks() -> None:
    silence = Silence(3)
    assert [silence.poll((7,)) for _ in range(5)] == [(), (), (), (7,), (7,)]  # the first check only starts the count
    silence.received(7)
    assert [silence.poll((7, 4)) for _ in range(4)] == [(), (), (), (4, 7)]
    silence.received(4)
    assert silence.poll((7, 4)) == (7,)
    assert silence.poll((4,)) == ()  # server 7 is no longer linked, so it is dropped
    assert [silence.poll((7,)) for _ in range(4)] == [(), (), (), (7,)]


@given(st.lists(st.sampled_from(["poll", "received"]), max_size=40))
def test_a_server_is_silent_without_messages_between_polls(events: list[str]) -> None:
    silence, num_silent_checks = Silence(), 0
    for event in events:
        if event == "received":
            silence.received(1)
            num_silent_checks = 0
        else:
            num_silent_checks += 1
            assert (silence.poll((1,)) == (1,)) == (num_silent_checks > 5)

"""Which connection goes when too many have proved nothing."""

from __future__ import annotations

from paceline.transport.security.strangers import Complaints, Strangers


def test_below_the_limit_nobody_goes() -> None:
    strangers: Strangers[int] = Strangers(3)
    assert [strangers.enter(number, "a") for number in range(3)] == [None] * 3
    strangers.leave(0)
    strangers.leave(0)
    assert strangers.enter(3, "a") is None
    assert len(strangers) == 3


def test_the_oldest_of_the_source_with_the_most_goes() -> None:
    strangers: Strangers[int] = Strangers(4)
    for number, source in enumerate(("honest", "crowd", "crowd", "crowd")):
        assert strangers.enter(number, source) is None
    assert strangers.enter(4, "crowd") == 1
    assert strangers.enter(5, "crowd") == 2
    assert strangers.enter(6, "another") == 3
    assert len(strangers) == 4


def test_of_equal_sources_the_oldest_goes() -> None:
    strangers: Strangers[int] = Strangers(2)
    assert strangers.enter(0, "a") is None
    assert strangers.enter(1, "b") is None
    assert strangers.enter(2, "c") == 0


def test_many_of_one_source_give_way_one_by_one() -> None:
    strangers: Strangers[int] = Strangers(64)
    gone = [strangers.enter(number, "crowd") for number in range(3000)]
    assert gone == [None] * 64 + list(range(3000 - 64))


def test_of_a_crowd_little_is_said_and_how_many_there_were() -> None:
    complaints = Complaints(burst=3, pause_s=2.0)
    assert [complaints.note(100.0) for _ in range(5)] == [0, 0, 0, None, None]
    assert [complaints.note(102.0), complaints.note(103.0), complaints.note(104.0)] == [2, None, 1]
    assert [complaints.note(1000.0) for _ in range(4)] == [0, 0, 0, None]

"""The choice of the connection to close if there are too many unauthenticated connections."""

from __future__ import annotations

from paceline.transport.security.unauthenticated import LogRateLimit, UnauthenticatedConnections


def test_below_the_limit_no_connection_is_closed() -> None:
    strangers: UnauthenticatedConnections[int] = UnauthenticatedConnections(3)
    assert [strangers.add(number, "a") for number in range(3)] == [None] * 3
    strangers.remove(0)
    strangers.remove(0)
    assert strangers.add(3, "a") is None
    assert len(strangers) == 3


def test_the_oldest_connection_of_the_most_frequent_source_is_closed() -> None:
    strangers: UnauthenticatedConnections[int] = UnauthenticatedConnections(4)
    for number, source in enumerate(("honest", "crowd", "crowd", "crowd")):
        assert strangers.add(number, source) is None
    assert strangers.add(4, "crowd") == 1
    assert strangers.add(5, "crowd") == 2
    assert strangers.add(6, "another") == 3
    assert len(strangers) == 4


def test_among_equal_sources_the_oldest_connection_is_closed() -> None:
    strangers: UnauthenticatedConnections[int] = UnauthenticatedConnections(2)
    assert strangers.add(0, "a") is None
    assert strangers.add(1, "b") is None
    assert strangers.add(2, "c") == 0


def test_many_connections_of_one_source_are_closed_one_by_one() -> None:
    strangers: UnauthenticatedConnections[int] = UnauthenticatedConnections(64)
    crowd = [strangers.add(number, "crowd") for number in range(3000)]
    assert crowd == [None] * 64 + list(range(3000 - 64))


def test_many_messages_are_logged_as_a_count() -> None:
    complaints = LogRateLimit(burst=3, pause_s=2.0)
    assert [complaints.record(100.0) for _ in range(5)] == [0, 0, 0, None, None]
    assert [complaints.record(102.0), complaints.record(103.0), complaints.record(104.0)] == [2, None, 1]
    assert [complaints.record(1000.0) for _ in range(4)] == [0, 0, 0, None]

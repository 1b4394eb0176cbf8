"""The times at which a process tries to reconnect to a scheduler."""

from __future__ import annotations

from paceline.ps.scheduler.link import Reconnection


def test_a_lost_connection_reopens_immediately_and_a_rejected_one_after_a_pause() -> None:
    retry = Reconnection(60.0, time_s=0.0)
    assert retry.lost(10.0, heartbeat_s=1.0) == 0.0
    assert retry.remaining_s(15.0) == 55.0
    retry.connected(15.0)
    assert retry.lost(15.5, heartbeat_s=1.0) > 0.0  # the connection broke after 0.5 s
    assert retry.remaining_s(15.5) == 54.5
    retry.connected(16.0)
    assert retry.lost(18.0, heartbeat_s=1.0) == 0.0  # the connection lasted 2 s
    assert retry.remaining_s(18.0) == 60.0


def test_a_welcome_resets_the_timeout() -> None:
    retry = Reconnection(60.0, time_s=0.0)
    retry.lost(10.0, heartbeat_s=1.0)
    retry.connected(30.0)
    retry.resumed()
    assert retry.lost(30.5, heartbeat_s=1.0) == 0.0
    assert retry.remaining_s(30.5) == 60.0


def test_pauses_grow_up_to_the_heartbeat_and_are_longer_for_another_cluster() -> None:
    retry = Reconnection(60.0, time_s=0.0)
    retry.lost(10.0, heartbeat_s=0.1)
    pauses = [retry.pause_s(10.0, is_elsewhere=False) for _ in range(10)]
    assert max(pauses) <= 0.1
    assert retry.pause_s(10.0, is_elsewhere=True) >= 1.0
    assert retry.pause_s(69.99, is_elsewhere=True) <= 0.011  # at most the remaining time

"""Pauses between attempts."""

from __future__ import annotations

import random

from paceline.transport.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 0.35)
    assert [backoff.next_s() for _ in range(4)] == [0.1, 0.2, 0.35, 0.35]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_no_pause_exceeds_the_remaining_time() -> None:
    backoff = Backoff(1.0, 8.0)
    assert backoff.next_s(0.25) == 0.25
    assert backoff.next_s(-1.0) == 0.0
    assert backoff.next_s() == 4.0


def test_pauses_are_random_within_the_spread() -> None:
    pauses = [Backoff(1.0, 1.0, spread=0.5).next_s() for _ in range(100)]
    assert all(0.5 <= pause <= 1.0 for pause in pauses)
    assert max(pauses) - min(pauses) > 0.1


def test_the_random_state_of_the_program_is_unchanged() -> None:
    before = random.getstate()
    Backoff(1.0, 1.0, spread=0.5).next_s()
    assert random.getstate() == before

"""Timeouts are durations or numbers of seconds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from paceline.collectives import init
from paceline.environment import timedelta_of
from paceline.errors import UsageError


def test_a_timeout_may_be_a_number_of_seconds() -> None:
    assert timedelta_of(2.5) == timedelta(seconds=2.5)
    assert timedelta_of(timedelta(minutes=1)) == timedelta(minutes=1)


@pytest.mark.parametrize("timeout", [-1, True, float("nan"), float("inf"), "5", None, timedelta(seconds=-1)])
def test_other_values_are_rejected(timeout: Any) -> None:
    with pytest.raises(UsageError, match=r"^timeout=.*: expected seconds, or a timedelta"):
        timedelta_of(timeout)


def test_a_group_accepts_seconds() -> None:
    with init(0, 1, timeout=3) as group:
        assert group.timeout == timedelta(seconds=3)
        ticket = group.all_reduce_async(np.ones(1))
        ticket.wait(2)
        other = group.subgroup([0], timeout=1.5)
        assert other is not None
        assert other.timeout == timedelta(seconds=1.5)

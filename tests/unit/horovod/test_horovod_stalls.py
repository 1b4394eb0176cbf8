"""Warnings and errors of operations that wait for ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from paceline.horovod.stalls import StallInspector


def test_a_stall_is_reported_once_with_ranks_and_names() -> None:
    inspector = StallInspector(warning_s=60, failure_s=100)
    missing = {(0, f"t{number}"): (1, 3) if number else (3,) for number in range(9)}
    assert inspector.inspect(missing, 0.0) == ("", {})
    assert inspector.inspect(missing, 59.0) == ("", {})
    warning, failed = inspector.inspect(missing, 60.0)
    assert "1: [t1, t2, t3, t4, t5, t6, ... 2 more]\n3: [t0, t1, t2, t3, t4, t5, ... 3 more]" in warning
    assert failed == {}
    assert inspector.inspect(missing, 61.0) == ("", {})
    warning, failed = inspector.inspect({(0, "t0"): (3,)}, 100.0)
    assert warning == ""
    assert list(failed) == [(0, "t0")]
    assert "'t0'" in failed[0, "t0"]
    assert "rank 3" in failed[0, "t0"]


def test_a_complete_request_is_forgotten() -> None:
    inspector = StallInspector(warning_s=10, failure_s=0)
    inspector.inspect({(0, "a"): (1,)}, 0.0)
    inspector.inspect({}, 5.0)
    assert inspector.inspect({(0, "a"): (1,)}, 12.0) == ("", {})
    assert "1: [a]" in inspector.inspect({(0, "a"): (1,)}, 22.0)[0]
    assert inspector.inspect({(0, "a"): (1,)}, 1e9) == ("", {})

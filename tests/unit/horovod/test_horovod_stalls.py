"""Warnings and errors of operations that wait for ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")
from paceline.horovod.stalls import StallInspector
from paceline.observe.stuck.report import script_calls
from paceline.observe.stuck.stacks import StackFrame

STACKS = [[StackFrame("train.py", 90, "<module>"), StackFrame("train.py", rank, "step")] for rank in range(4)]


def test_a_stall_is_reported_once_with_ranks_and_names_and_lines() -> None:
    inspector = StallInspector(warning_s=60, failure_s=100)
    missing = {(0, f"t{number}"): (1, 3) if number else (3,) for number in range(9)}
    assert inspector.find_late(missing, 0.0) == ([], [])
    assert inspector.find_late(missing, 59.0) == ([], [])
    assert inspector.find_late(missing, 60.0) == (list(missing), [])
    warning, error = inspector.describe(missing, 60.0, STACKS)
    assert (
        "\n1: [t1, t2, t3, t4, t5, t6, ... 2 more]\n  train.py, line 90, in <module>\n  train.py, line 1, in step"
        in warning
    )
    assert (
        "\n3: [t0, t1, t2, t3, t4, t5, ... 3 more]\n  train.py, line 90, in <module>\n  train.py, line 3, in step"
        in warning
    )
    assert error == ""
    assert inspector.find_late(missing, 61.0) == ([], [])
    waiting = {(0, "t0"): (3,)}
    assert inspector.find_late(waiting, 100.0) == ([], [(0, "t0")])
    warning, error = inspector.describe(waiting, 100.0, STACKS)
    assert warning == ""
    assert "'t0'" in error
    assert "rank 3 executes train.py, line 3, in step" in error


def test_a_complete_request_is_forgotten() -> None:
    inspector = StallInspector(warning_s=10, failure_s=0)
    missing = {(0, "a"): (1,)}
    inspector.find_late(missing, 0.0)
    inspector.find_late({}, 5.0)
    assert inspector.find_late(missing, 12.0) == ([], [])
    assert "1: [a]" in inspector.describe(missing, 22.0, STACKS)[0]
    assert inspector.describe(missing, 1e9, STACKS) == ("", "")


def test_the_calls_of_the_script() -> None:
    found: list[StackFrame] = []
    thread = threading.Thread(target=lambda: found.extend(script_calls()))
    thread.start()
    thread.join()  # the main thread executes this line, and the frames of `threading` are left out
    assert found[-1].function == "test_the_calls_of_the_script"
    assert Path(found[-1].file).name == Path(__file__).name

"""The progress of long work: a bar with rate and remaining time on a terminal, and silence elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from paceline.observe.progress import ProgressSnapshot, TrainingProgress, WorkProgress
from paceline.observe.work import SilentWork, show_progress, start_work, track


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def terminal(is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=100, _environ={"TERM": "xterm"}), file


def lines(file: io.StringIO) -> list[str]:
    """Return the distinct lines that were drawn."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    drawn = [line.strip() for line in re.split(r"[\r\n]+", text)]
    return list(dict.fromkeys(line for line in drawn if line))


def test_a_terminal_shows_the_part_the_rate_and_the_remaining_time() -> None:
    console, file = terminal()
    clock = Clock()
    with WorkProgress("reading", 1000, "rows", in_background=False, console=console, clock=clock) as progress:
        for done in range(0, 300, 100):
            clock.now_s += 1
            progress.update(done)
    last = lines(file)[-1]
    assert re.fullmatch(r"━+─+  reading   20%  200 rows  100 rows/s  0:08 left", last), last


def test_work_that_ends_soon_shows_nothing() -> None:
    console, file = terminal()
    with WorkProgress("reading", 10, console=console, clock=Clock()) as progress:
        progress.update(9)
    assert file.getvalue() == ""


def test_steps_whose_number_is_known() -> None:
    console, file = terminal()
    clock = Clock()
    with WorkProgress("starting", 4, in_background=False, console=console, clock=clock) as progress:
        progress.show("first")
        clock.now_s += 4
        progress.show("second")
        progress.write_above(lambda: console.print("a result"))
    shown = lines(file)
    assert shown[0].endswith("first    0%  0:00")
    assert shown[1].endswith("second   25%  0:12 left")
    assert "a result" in shown


def test_a_count_of_other_processes_work() -> None:
    console, file = terminal()
    with WorkProgress("compiling", 8, count=lambda: 2, console=console, clock=Clock()):
        pass
    assert "compiling   25%" in lines(file)[0]


def test_work_within_a_training_replaces_its_line() -> None:
    console, file = terminal()
    clock = Clock()
    with TrainingProgress(console, clock=clock) as training:
        training.update(ProgressSnapshot(examples=5, examples_per_s=1.0))
        with WorkProgress("saving", 4, in_background=False, console=console, clock=clock) as progress:
            progress.show("saving")
        training.update(ProgressSnapshot(examples=7, examples_per_s=1.0))
    shown = lines(file)
    assert any("saving    0%" in line for line in shown)
    assert shown[-1].startswith("7 examples")


def test_redirected_output_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console, file = terminal(is_terminal=False)
    with WorkProgress("reading", 10, count=lambda: 1, console=console) as progress:
        progress.show("more")
        progress.write_above(lambda: print("a result"))
    assert file.getvalue() == ""
    assert capsys.readouterr().out == "a result\n"


def test_only_commands_on_a_terminal_show_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(start_work("reading"), SilentWork)
    show_progress()
    assert isinstance(start_work("reading"), SilentWork)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    try:
        show_progress()
        assert isinstance(start_work("reading"), WorkProgress)
        assert list(track([1, 2, 3], "counting", 3)) == [1, 2, 3]
    finally:
        show_progress(False)
    assert isinstance(start_work("reading"), SilentWork)

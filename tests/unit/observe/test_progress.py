"""The progress line on wide and narrow terminals, in files, and after exceptions."""

from __future__ import annotations

import io
import re
import sys
from datetime import timedelta

import pytest
from rich.console import Console

from paceline.observe.progress import ProgressSnapshot, RateMeter, TrainingProgress

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

SNAPSHOT = ProgressSnapshot(
    done_fraction=0.5,
    examples=500_000,
    examples_per_s=312345.0,
    loss=0.4721,
    staleness_mean=1.25,
    staleness_max=4,
    bytes_per_s=15e6,
    workers=4,
    epoch="1/2",
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def console_for(terminal: bool, width: int = 140) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    environ = {"TERM": "xterm"} if terminal else {}
    return Console(file=file, force_terminal=terminal, width=width, _environ=environ), file


def on_terminal(snapshot: ProgressSnapshot, width: int = 140) -> str:
    """Return the line that remains on a terminal of this width."""
    console, file = console_for(True, width)
    with TrainingProgress(console, clock=Clock()) as progress:
        progress.update(snapshot)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert text.endswith("\n")
    return text[:-1].rpartition("\r")[2]


def test_a_terminal_shows_everything_on_one_line() -> None:
    line = on_terminal(SNAPSHOT)
    for part in ("━━─", " 50%", "epoch 1/2", "312k examples/s", "log loss 0.4721", "staleness 1.2 (max 4)"):
        assert part in line
    for part in ("15.0 MB/s", "4 workers", "0:00"):
        assert part in line


@pytest.mark.parametrize("width", range(1, 141, 3))
def test_the_line_fits_any_terminal(width: int) -> None:
    line = on_terminal(SNAPSHOT, width)
    assert "\n" not in line
    assert 0 < len(line) <= width


def test_a_narrow_terminal_shows_at_least_the_log_loss() -> None:
    assert on_terminal(SNAPSHOT, 24).split("  ")[-1] == "log loss 0.4721"
    assert on_terminal(SNAPSHOT, 5) == " 50%"


def test_progress_is_shown_in_examples_if_the_fraction_is_unknown() -> None:
    snapshot = ProgressSnapshot(examples=250, examples_per_s=10.0)
    unknown = on_terminal(snapshot)
    assert unknown.startswith("250 examples")
    assert "━" not in unknown
    assert "1 worker  " in unknown


def fail_after(progress: TrainingProgress) -> None:
    progress.update(SNAPSHOT)
    raise KeyboardInterrupt


def test_the_cursor_is_shown_again_after_an_exception() -> None:
    console, file = console_for(True)
    progress = TrainingProgress(console, clock=Clock())
    with pytest.raises(KeyboardInterrupt), progress:
        fail_after(progress)
    text = file.getvalue()
    assert text.count(HIDE_CURSOR) == 1
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert "50%" in text
    assert text.endswith((SHOW_CURSOR, "\n"))


def test_the_line_appears_at_the_start_and_no_update_writes_after_the_end() -> None:
    console, file = console_for(True)
    with TrainingProgress(console, clock=Clock()) as progress:
        assert "waiting for the first examples" in file.getvalue()
    length = len(file.getvalue())
    progress.update(SNAPSHOT)
    assert len(file.getvalue()) == length


def test_redirected_output_does_not_appear_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console, file = console_for(True)
    with TrainingProgress(console, clock=Clock()):
        print("a result", file=sys.stdout)
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in file.getvalue()


def test_without_a_terminal_a_plain_line_is_printed_periodically() -> None:
    console, file = console_for(False, width=40)
    clock = Clock()
    with TrainingProgress(console, clock=clock, plain_every=timedelta(seconds=5)) as progress:
        for examples in range(1000, 1121, 10):  # 13 updates, a second apart
            progress.update(ProgressSnapshot(examples=examples, examples_per_s=10.0, loss=0.5))
            clock.now_s += 1
    lines = file.getvalue().splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == ["0:05", "0:10"]
    assert lines[-1] == "1.10k examples  10.0 examples/s  log loss 0.5000  0 B/s  1 worker  0:10"
    assert not any(ord(character) < 32 for line in lines for character in line)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=140, _environ={"TERM": "dumb"})
    with TrainingProgress(console, clock=Clock(), plain_every=timedelta(0)) as progress:
        progress.update(SNAPSHOT)
    assert "\x1b" not in file.getvalue()
    assert file.getvalue().startswith("50%")


def test_an_ascii_terminal_gets_an_ascii_bar() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, force_terminal=True, width=140, _environ={"TERM": "xterm"})
    with TrainingProgress(console, clock=Clock()) as progress:
        progress.update(SNAPSHOT)
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    assert b"##" in file.buffer.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_disabled_progress_line_writes_nothing(terminal: bool) -> None:
    console, file = console_for(terminal)
    with TrainingProgress(console, enabled=False) as progress:
        progress.update(SNAPSHOT)
    assert file.getvalue() == ""


def test_the_default_output_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(plain_every=timedelta(0)) as progress:
        progress.update(SNAPSHOT)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "312k examples/s" in captured.err


def test_rate_of_a_steady_count() -> None:
    meter = RateMeter()
    assert meter.per_s == 0.0
    for step in range(1000):
        meter.add(step * 0.1, step * 30)
        assert meter.per_s == pytest.approx(300 if step else 0)


def test_rate_ignores_counts_before_the_window() -> None:
    meter = RateMeter(timedelta(seconds=2))
    for second in range(10):
        meter.add(second, 100 * second)
    for second in range(10, 13):
        meter.add(second, 900)
    assert meter.per_s == 0.0


def test_rate_of_rare_samples() -> None:
    meter = RateMeter(timedelta(seconds=2))
    meter.add(0, 0)
    meter.add(10, 1000)  # these samples are farther apart than the window
    assert meter.per_s == 100.0


def test_rate_starts_again_when_the_count_falls() -> None:
    meter = RateMeter()
    meter.add(0, 1000)
    meter.add(1, 2000)
    meter.add(2, 50)
    assert meter.per_s == 0.0
    meter.add(3, 80)
    assert meter.per_s == 30.0


def test_a_rate_of_many_samples_needs_little_memory_and_is_exact() -> None:
    meter = RateMeter(timedelta(seconds=1))
    for step in range(100_000):
        meter.add(step / 10_000, step)
    assert meter.per_s == pytest.approx(10_000)
    assert len(meter.samples) < 60


def test_rate_of_samples_at_one_time_is_not_infinite() -> None:
    meter = RateMeter()
    meter.add(1, 10)
    meter.add(1, 20)
    assert meter.per_s == 0.0

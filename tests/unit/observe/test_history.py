"""The figures for people, derived from the metrics, and their display in the terminal."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from paceline.observe.collector import Collector
from paceline.observe.history import MAX_POINTS, SERIES, RunHistory
from paceline.observe.metrics import MetricValues, Samples
from paceline.observe.top import draw


class Clock:
    def __init__(self) -> None:
        self.time_s = 50.0

    def __call__(self) -> float:
        return self.time_s


def samples_at(seconds: float, *, num_ranks: int = 2) -> Samples:
    """Return the metrics of a run that has trained for some seconds; rank 1 is slow, and one server has rows."""
    values = MetricValues()
    for rank in map(str, range(num_ranks)):
        values.set("paceline_examples_total", 100.0 * seconds, rank)
        values.set("paceline_rank_memory_bytes", 1e6, rank)
        values.set("paceline_rank_last_seen_seconds", 0.5, rank)
        values.set("paceline_reported_value", 8.0 / (1 + seconds), rank, "loss")
        shares = {"forward": 0.75, "communication": 0.25} if rank == "1" else {"forward": 0.25, "communication": 0.75}
        for phase, share in shares.items():
            values.set("paceline_step_phase_seconds_total", share * seconds, rank, phase)
        values.set("paceline_step_seconds", [seconds, *[0.0] * 8, 50.0 * seconds, *[0.0] * 8], rank)
    values.set("paceline_wait_seconds_total", 0.5 * seconds, "0", "1")
    values.set("paceline_server_memory_bytes", 2e6, "0")
    values.set("paceline_server_rows", 7.0, "0", "w")
    values.set("paceline_server_received_bytes_total", 600.0 * seconds, "0")
    values.set("paceline_server_sent_bytes_total", 400.0 * seconds, "0")
    values.set("paceline_staleness_pushes", [3.0 * seconds, seconds, *[0.0] * 9], "0", "w")
    values.set("paceline_members", 1.0, "servers")
    return values.samples


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_for(clock: Clock, seconds: int, **options: int) -> RunHistory:
    collector = Collector(clock=clock)
    history = RunHistory("paceline run train.py", collector, clock=clock)
    for second in range(1, seconds + 1):
        clock.time_s += 1.0
        history.write(samples_at(second, **options), is_last=False)
    collector.add_event("an event")
    return history


def test_figures(clock: Clock) -> None:
    state = run_for(clock, 20).state()
    assert (state["title"], state["seconds"], state["has_ended"]) == ("paceline run train.py", 20.0, False)
    assert state["examples"] == 4000
    assert state["examples_per_s"] == pytest.approx(200.0)
    assert state["loss"] == pytest.approx(8 / 21)
    assert state["staleness"] == pytest.approx(3.0)
    assert state["bytes_per_s"] == pytest.approx(1000.0)
    assert state["memory_bytes"] == 4e6
    assert state["wait_share"] == pytest.approx(0.5)
    assert state["ranks"][1]["phases"] == pytest.approx({"forward": 0.75, "communication": 0.25})
    assert state["ranks"][0]["step_s"] == pytest.approx(0.02)
    assert state["servers"] == [
        {"server": 0, "rows": 7.0, "memory_bytes": 2e6, "bytes_per_s": pytest.approx(1000.0), "held": None}
    ]
    assert state["waited_for"] == [{"rank": 1, "waits": {"0": pytest.approx(0.5)}, "total": pytest.approx(0.5)}]
    assert state["events"] == [[20.0, "an event"]]
    assert state["series"]["time"] == [float(second) for second in range(1, 21)]
    assert state["series"]["memory_bytes"] == [4e6] * 20


def test_a_restarted_rank_counts_from_zero(clock: Clock) -> None:
    history = run_for(clock, 10)
    clock.time_s += 1.0
    restarted = samples_at(11)
    restarted["paceline_examples_total"]["0",] = 60.0
    history.write(restarted, is_last=False)
    assert history.state()["examples_per_s"] > 0


def test_series_are_bounded_and_cover_the_whole_run(clock: Clock) -> None:
    state = run_for(clock, 4 * MAX_POINTS).state()
    series = state["series"]
    assert {len(series[name]) for name in ("time", *SERIES)} == {len(series["time"])}
    assert MAX_POINTS // 2 <= len(series["time"]) <= MAX_POINTS
    assert series["time"][0] < 20
    assert series["time"][-1] > 4 * MAX_POINTS - 20
    steps = {after - before for before, after in zip(series["time"], series["time"][1:], strict=False)}
    assert max(steps) <= 2 * min(steps)


def test_the_end_has_the_figures_of_the_whole_run(clock: Clock) -> None:
    history = run_for(clock, 20)
    clock.time_s += 100.0  # outside of the training loop
    history.write(samples_at(21), is_last=True)
    state = history.state()
    assert (state["has_ended"], state["seconds"], state["examples"]) == (True, 120.0, 4200)
    assert state["examples_per_s"] == pytest.approx(200.0)
    assert state["ranks"][1]["phases"] == pytest.approx({"forward": 0.75, "communication": 0.25})
    assert state["series"]["time"][-1] == 20.0
    assert "ended after 2:00" in shown(state)


def test_nothing_is_known_at_first(clock: Clock) -> None:
    history = RunHistory("paceline train", clock=clock)
    assert shown(history.state()).splitlines() == ["paceline train", "running for 0:00"]
    clock.time_s += 1.0
    history.write({}, is_last=False)
    state = history.state()
    assert (state["ranks"], state["loss"], state["examples_per_s"]) == ([], None, 0.0)
    history.write({"paceline_staleness_pushes": {("0", "w"): [math.nan, *[1.0] * 10]}}, is_last=True)
    assert history.state()["has_ended"]


def shown(state: dict[str, Any], most_ranks: int = 20) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(draw(state, 80, most_ranks))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_terminal(clock: Clock) -> None:
    text = shown(run_for(clock, 20).state())
    assert "running for 0:20, 1 server" in text
    assert "200/s" in text
    assert "0.50 s/s" in text
    assert "▒▒▒▒▒···············" in text  # rank 0 mostly waits
    assert "0:20  an event" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_terminal_of_80_columns_has_room_for_all_columns(clock: Clock) -> None:
    state = run_for(clock, 6).state()
    for rank in state["ranks"]:
        rank |= {"examples_per_s": 3980.0, "memory_bytes": 446e6, "step_s": 0.0288}
        rank["phases"] = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer", "other"), 1 / 6)
    text = shown(state)
    assert "…" not in text
    assert "· communication" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_ranks_for_which_all_others_wait_are_named(clock: Clock) -> None:
    history = run_for(clock, 20, num_ranks=4)
    assert (history.state()["stuck_ranks"], history.state()["alarm"]) == ([], None)
    stopped = samples_at(20, num_ranks=4)
    for second in range(1, 12):
        clock.time_s += 1.0
        for rank in "0123":
            phase = "forward" if rank == "2" else "communication"
            before = samples_at(20, num_ranks=4)["paceline_step_phase_seconds_total"][rank, phase]
            assert isinstance(before, float)
            stopped["paceline_step_phase_seconds_total"][rank, phase] = before + second
        history.write({name: dict(values) for name, values in stopped.items()}, is_last=False)
    state = history.state()
    assert state["stuck_ranks"] == [2]
    assert "no progress: the other ranks wait for rank 2. Run paceline stacks" in shown(state)
    assert "no progress" not in shown({**state, "has_ended": True})


def test_terminal_with_many_ranks(clock: Clock) -> None:
    state = run_for(clock, 6, num_ranks=200).state()
    state["ranks"][77]["last_seen_s"] = 60.0
    text = shown(state, most_ranks=5)
    assert "195 more ranks" in text
    assert [line.split()[0] for line in text.splitlines() if "ms" in line][:2] == ["0", "1"]
    assert "60 s" in text
    assert max(map(len, text.splitlines())) <= 80


def test_top_shows_names_without_control_characters() -> None:
    """The figures may come from another machine."""
    state: dict[str, Any] = {"seconds": 1, "has_ended": False, "series": {name: [] for name in SERIES}}
    state |= {"title": "\x1b]0;a", "alarm": "\x1b[2J", "events": [[1, "\x1b[2J"]], "members": {"\x1b[2J": 1}}
    console = Console(record=True, width=80)
    console.print(draw(state, 80, 5))
    shown = console.export_text()
    assert "\x1b" not in shown
    assert shown.count(r"\x1b") == 4

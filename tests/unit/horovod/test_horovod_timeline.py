"""The file of a timeline: valid after each write, bounded, with a row for each track of each rank."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from paceline.horovod.traces import TimelineEvent, TimelineWriter


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_the_file_is_valid_after_each_write(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    now_ns = time.monotonic_ns()
    with TimelineWriter(path) as writer:
        assert [line["name"] for line in read(path)] == ["timeline_start"]
        assert abs(read(path)[0]["args"]["start_time_since_epoch_in_micros"] - time.time_ns() / 1000) < 60e6
        writer.write(0, [])
        writer.write(1, [TimelineEvent("ALLREDUCE", 'a "name"', now_ns + 5_000, 1_500)])
        first = read(path)
        writer.write(
            1, [TimelineEvent("QUEUE", 'a "name"', now_ns + 6_000, 1), TimelineEvent("CYCLE", "rounds", now_ns)]
        )
        writer.write(0, [TimelineEvent("ALLREDUCE", 'a "name"', now_ns, 1)])
    second = read(path)
    assert second[: len(first)] == first
    rows = [(line["pid"], line["name"], line["args"]["name"]) for line in second if line["ph"] == "M"]
    assert rows == [
        (1, "process_name", "rank 1"),
        (1, "thread_name", 'a "name"'),
        (1, "thread_name", "rounds"),
        (0, "process_name", "rank 0"),
        (0, "thread_name", 'a "name"'),
    ]
    reduced, queued, cycle, other = (line for line in second[1:] if line["ph"] != "M")
    assert (reduced["pid"], reduced["tid"]) == (queued["pid"], queued["tid"])
    assert len({(line["pid"], line["tid"]) for line in (reduced, cycle, other)}) == 3
    assert (reduced["ph"], reduced["dur"], cycle["ph"]) == ("X", 1.5, "i")
    assert round(queued["ts"] - reduced["ts"], 3) == 1.0


def test_a_file_that_is_cut_between_pages_has_complete_events(tmp_path: Path) -> None:
    """Linux may cut the write of a killed process there. Viewers add the missing bracket."""
    path = tmp_path / "timeline.json"
    with TimelineWriter(path) as writer:
        for number in range(40):
            events = [TimelineEvent("x" * (number + part), "track", number, 1) for part in range(number)]
            writer.write(number % 3, events)
    content = path.read_bytes()
    cuts = range(4096, len(content), 4096)
    assert len(cuts) > 10
    num_events = [len(json.loads(content[:cut] + b"]")) for cut in cuts]
    assert num_events == sorted(set(num_events))


def test_a_full_timeline_ends_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with TimelineWriter(path, most_events=3) as writer:
        for number in range(5):
            writer.write(0, [TimelineEvent(f"event {number}.{part}", "track", number, 1) for part in range(2)])
    names = [line["name"] for line in read(path) if line["ph"] != "M"]
    assert names[1:-1] == ["event 0.0", "event 0.1", "event 1.0"]
    assert "the timeline is full" in names[-1]

"""Check a timeline in Chrome's format: monotone times, nested spans, complete flows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROUNDING_US = 1e-2


@dataclass(frozen=True)
class ChromeTrace:
    """The events of a timeline by kind."""

    kinds: dict[str, list[dict[str, Any]]]
    num_flows: int

    @property
    def processes(self) -> dict[int, str]:
        """The names of the processes by number."""
        return {event["pid"]: event["args"]["name"] for event in self.kinds["M"] if event["name"] == "process_name"}

    def spans(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield each span with the names of its process and its row."""
        found = [event for event in self.kinds["M"] if event["name"] == "thread_name"]
        rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in found}
        for span in self.kinds["X"]:
            yield self.processes[span["pid"]], rows[span["pid"], span["tid"]], span


def check_chrome(path: Path) -> ChromeTrace:
    """Check a timeline, and return its events."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    events = json.loads(path.read_bytes())["traceEvents"]
    for event in events:
        kinds.setdefault(event["ph"], []).append(event)
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for span in kinds["X"]:
        rows.setdefault((span["pid"], span["tid"]), []).append(span)
    for spans in rows.values():
        _check_nested(spans)
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    for points in flows.values():
        assert [point["ph"] for point in points] == ["s", "t", "f"], points
        for point in points:  # the viewer attaches each point to the span at its time
            row = rows[point["pid"], point["tid"]]
            assert any(span["ts"] <= point["ts"] <= span["ts"] + span["dur"] + _ROUNDING_US for span in row)
    return ChromeTrace(kinds, len(flows))


def _check_nested(spans: list[dict[str, Any]]) -> None:
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        end = span["ts"] + span["dur"]
        while ends and ends[-1] <= span["ts"] + _ROUNDING_US:
            ends.pop()
        assert not ends or end <= ends[-1] + _ROUNDING_US, span
        ends.append(end)

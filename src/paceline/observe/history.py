"""Compute the figures of a run for the dashboard, ``paceline top`` and the report.

The figures come from the metrics: rates over the last seconds, and series over the whole run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from paceline.errors import name_ranks
from paceline.observe.collector import SILENT_S, Collector, MetricSink
from paceline.observe.metrics import PHASES, Labels, Samples, Value

MAX_POINTS: Final = 600
"""Longer series are thinned to half of their points."""
_WINDOW_S: Final = 5.0
_MAX_WAITED_FOR: Final = 16

SERIES: Final = ("examples_per_s", "loss", "staleness", "bytes_per_s", "memory_bytes", "wait_share")
"""The figures with a series over the run. ``wait_share`` is the mean share of the ranks' time in ``communication``."""


class Rates:
    """Rates of counters between two moments. The rate of a histogram is the rate of its sum."""

    def __init__(self, before: Samples, after: Samples, seconds: float) -> None:
        self._before, self._after, self._seconds = before, after, seconds

    def values(self, name: str, *, means: bool = False) -> dict[Labels, float]:
        """Return the rate per second of each counter; with `means`, the mean of a histogram's new values."""
        found: dict[Labels, float] = {}
        for labels, value in self._after.get(name, {}).items():
            before = self._before.get(name, {}).get(labels)
            amount, count = _difference(value, before)
            if means:
                if count > 0:
                    found[labels] = amount / count
            elif self._seconds > 0:
                found[labels] = amount / self._seconds
        return found

    def total(self, *names: str) -> float:
        """Return the sum of the rates of some counters over all labels."""
        return sum(sum(self.values(name).values()) for name in names)


def _difference(value: Value, before: Value | None) -> tuple[float, float]:
    """Return the increase of the amount, and of the number of values. A counter that has restarted counts from 0."""
    if isinstance(value, list):
        known = before if isinstance(before, list) and sum(before[1:]) <= sum(value[1:]) else [0.0] * len(value)
        return value[0] - known[0], sum(value[1:]) - sum(known[1:])
    known_value = before if isinstance(before, float | int) and before <= value else 0.0
    return value - known_value, 0.0


class RunHistory(MetricSink):
    """Computes the figures once a second. Thread-safe."""

    def __init__(
        self, title: str, collector: Collector | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`title` is the command of the run. The history reports the events of `collector`."""
        self._title, self._collector, self._clock = title, collector, clock
        self._start_s = clock()
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, Samples]] = deque()
        self._times: list[float] = []
        self._series: dict[str, list[float | None]] = {name: [] for name in SERIES}
        self._stride = self._num_seen = 0
        self._state: dict[str, Any] = {}
        self._has_ended = False

    @override
    def write(self, samples: Samples, *, is_last: bool) -> None:
        time_s = self._clock()
        if is_last:
            self._end(samples, time_s - self._start_s)
            return
        while len(self._recent) > 1 and self._recent[1][0] <= time_s - _WINDOW_S:
            self._recent.popleft()
        before_s, before = self._recent[0] if self._recent else (self._start_s, {})
        self._recent.append((time_s, samples))
        state = describe(samples, Rates(before, samples, time_s - before_s))
        with self._lock:
            self._state = state
            self._add_point(round(time_s - self._start_s, 1), state)

    def _end(self, samples: Samples, seconds: float) -> None:
        """Set the figures of the whole run. If the time in the training loop is known, rates refer to this time."""
        in_loop: dict[str, float] = {}
        for (rank, _), value in Rates({}, samples, 1.0).values("paceline_step_phase_seconds_total").items():
            in_loop[rank] = in_loop.get(rank, 0.0) + value
        state = describe(samples, Rates({}, samples, max(in_loop.values(), default=seconds)))
        with self._lock:
            self._state, self._has_ended = state, True
            if not self._times:
                self._add_point(round(seconds, 1), state)

    def _add_point(self, time_s: float, state: Mapping[str, Any]) -> None:
        self._num_seen += 1
        if self._num_seen % (1 << self._stride):
            return
        self._times.append(time_s)
        for name, values in self._series.items():
            values.append(state[name])
        if len(self._times) >= MAX_POINTS:
            self._stride += 1
            del self._times[::2]
            for values in self._series.values():
                del values[::2]

    def state(self) -> dict[str, Any]:
        """Return the figures as JSON.

        ``ranks`` and ``servers`` have an object for each process, ``series`` the time in seconds since the start and
        the values of :data:`SERIES`, ``events`` the last events.
        """
        with self._lock:
            state = {
                **self._state,
                "title": self._title,
                "seconds": round(self._clock() - self._start_s, 1),
                "has_ended": self._has_ended,
                "phases": PHASES,
                "silent_s": SILENT_S,
                "series": {"time": list(self._times), **{name: list(values) for name, values in self._series.items()}},
            }
        events = [] if self._collector is None else self._collector.recent_events()
        state["events"] = [[round(time_s - self._start_s, 1), text] for time_s, text in events]
        return state


def describe(samples: Samples, rates: Rates) -> dict[str, Any]:
    """Return the figures of one moment, without the history."""
    ranks, servers = _describe_ranks(samples, rates), _describe_servers(samples, rates)
    communication = [rank["phases"].get("communication", 0.0) for rank in ranks if rank["phases"]]
    examples = _total(samples, "paceline_training_examples_total", "paceline_examples_total")
    stuck = _find_stuck(ranks) if examples else []
    staleness = rates.values("paceline_staleness_pushes", means=True)
    known = [value for value in staleness.values() if value == value]
    return {
        "examples": examples,
        "examples_per_s": _first_rate(rates, "paceline_training_examples_total", "paceline_examples_total"),
        "loss": _find_loss(samples),
        "done": samples.get("paceline_training_done_ratio", {}).get(()),
        "staleness": sum(known) / len(known) if known else None,
        "bytes_per_s": sum(server["bytes_per_s"] for server in servers)
        + rates.total("paceline_collective_bytes_total"),
        "memory_bytes": sum(process["memory_bytes"] or 0.0 for process in (*ranks, *servers)),
        "wait_share": sum(communication) / len(communication) if communication else None,
        "members": {role: count for (role,), count in samples.get("paceline_members", {}).items()},
        "epoch": samples.get("paceline_membership_epoch", {}).get(()),
        "failovers": samples.get("paceline_failovers_total", {}).get(()),
        "ranks": ranks,
        "servers": servers,
        "waited_for": _describe_waits(rates),
        "stuck_ranks": stuck,
        "alarm": f"no progress: the other ranks wait for {name_ranks(stuck)}. Run paceline stacks" if stuck else None,
    }


def _total(samples: Samples, *names: str) -> float | None:
    """Return the sum of the first of these counters that exists."""
    for name in names:
        values = [value for value in samples.get(name, {}).values() if not isinstance(value, list)]
        if values:
            return sum(values)
    return None


def _first_rate(rates: Rates, *names: str) -> float:
    return next((sum(found.values()) for found in map(rates.values, names) if found), 0.0)


def _find_loss(samples: Samples) -> Value | None:
    """Return the loss of the training, or else the mean of the number ``loss`` that the ranks report."""
    loss = samples.get("paceline_training_loss", {}).get(())
    if loss is not None:
        return loss
    reported = [
        value
        for (_, name), value in samples.get("paceline_reported_value", {}).items()
        if name == "loss" and not isinstance(value, list)
    ]
    return sum(reported) / len(reported) if reported else None


def _describe_ranks(samples: Samples, rates: Rates) -> list[dict[str, Any]]:
    phases: dict[str, dict[str, float]] = {}
    for (rank, phase), seconds in rates.values("paceline_step_phase_seconds_total").items():
        phases.setdefault(rank, {})[phase] = seconds
    examples = rates.values("paceline_examples_total")
    steps = rates.values("paceline_step_seconds", means=True)
    memory = samples.get("paceline_rank_memory_bytes", {})
    found = []
    for (rank,), seen_s in samples.get("paceline_rank_last_seen_seconds", {}).items():
        found.append(
            {
                "rank": int(rank),
                "examples_per_s": examples.get((rank,), 0.0),
                "step_s": steps.get((rank,)),
                "phases": phases.get(rank, {}),
                "memory_bytes": memory.get((rank,)),
                "last_seen_s": seen_s,
            }
        )
    return found


def _find_stuck(ranks: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks for which all others wait, if no rank makes progress."""
    stuck = [rank["rank"] for rank in ranks if rank["phases"].get("communication", 0.0) <= 0.95]
    has_progress = any(rank["examples_per_s"] for rank in ranks)
    return [] if has_progress or 2 * len(stuck) >= len(ranks) else stuck


def _describe_servers(samples: Samples, rates: Rates) -> list[dict[str, Any]]:
    received, sent = (rates.values(f"paceline_server_{way}_bytes_total") for way in ("received", "sent"))
    rows: dict[str, float] = {}
    for (server, _), count in samples.get("paceline_server_rows", {}).items():
        assert not isinstance(count, list)
        rows[server] = rows.get(server, 0.0) + count
    held = samples.get("paceline_server_held_requests", {})
    return [
        {
            "server": int(server),
            "rows": rows.get(server, 0.0),
            "memory_bytes": memory,
            "bytes_per_s": received.get((server,), 0.0) + sent.get((server,), 0.0),
            "held": held.get((server,)),
        }
        for (server,), memory in samples.get("paceline_server_memory_bytes", {}).items()
    ]


def _describe_waits(rates: Rates) -> list[dict[str, Any]]:
    """Return the ranks for which others wait, longest first, with the waiting of each other rank per second."""
    waits: dict[str, dict[str, float]] = {}
    for (rank, last), seconds in rates.values("paceline_wait_seconds_total").items():
        if seconds > 0:
            waits.setdefault(last, {})[rank] = seconds
    longest = sorted(waits, key=lambda last: -sum(waits[last].values()))[:_MAX_WAITED_FOR]
    return [{"rank": int(last), "waits": waits[last], "total": sum(waits[last].values())} for last in longest]

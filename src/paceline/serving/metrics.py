"""Collect statistics of requests in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class RequestMetrics:
    """Counts of prediction requests by status, and their durations."""

    def __init__(self) -> None:
        self.rows = 0
        self._by_status: Counter[int] = Counter()
        self._by_bound = [0] * (len(_BOUNDS_S) + 1)
        self._seconds = 0.0

    def add(self, status: int, rows: int, seconds: float) -> None:
        self._by_status[status] += 1
        self.rows += rows
        self._seconds += seconds
        self._by_bound[bisect_left(_BOUNDS_S, seconds)] += 1

    def as_text(self, *, reloads: int, failures: int, features: int) -> str:
        lines = ["# HELP paceline_requests_total Prediction requests.", "# TYPE paceline_requests_total counter"]
        lines += [f'paceline_requests_total{{code="{code}"}} {n}' for code, n in sorted(self._by_status.items())]
        for name, kind, help_text, value in (
            ("paceline_rows_total", "counter", "Predicted rows.", self.rows),
            ("paceline_model_reloads_total", "counter", "Newer models that were loaded.", reloads),
            ("paceline_model_reload_failures_total", "counter", "Newer models that could not be loaded.", failures),
            ("paceline_model_features", "gauge", "Features of the model.", features),
        ):
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        name = "paceline_request_seconds"
        lines += [f"# HELP {name} Duration of prediction requests.", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*_BOUNDS_S, "+Inf"), self._by_bound, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        lines += [f"{name}_sum {self._seconds:.6f}", f"{name}_count {total}"]
        return "\n".join(lines) + "\n"

"""The metrics of runs and services: one table with their names, kinds, labels and descriptions.

Names follow Prometheus's rules: base units, and ``_total`` for counters. Every output (HTTP, JSON lines, TensorBoard,
the dashboard and the docs) uses this table.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias

from paceline.errors import UsageError

Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in the order of :attr:`Metric.labels`."""
Value: TypeAlias = float | list[float]
"""A number. For a histogram: the sum (NaN if it is unknown), then the count of each bucket, the last one unbounded."""
Samples: TypeAlias = dict[str, dict[Labels, Value]]
"""Values by name and labels."""

SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PUSHES: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 127.0)
PHASES: Final = ("data", "forward", "backward", "compute", "communication", "optimizer", "other")
"""The phases of an iteration of a training loop, which together take its whole time."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: Labels
    help: str
    bounds: tuple[float, ...] = ()
    """The upper bounds of a histogram's buckets, without infinity."""


def _define(*metrics: Metric) -> Mapping[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS: Final = _define(
    # Ranks of `paceline run`, and local workers of `paceline train`.
    Metric("paceline_examples_total", "counter", ("rank",), "Training examples that the rank has read."),
    Metric("paceline_step_seconds", "histogram", ("rank",), "Duration of an iteration of the training loop.", SECONDS),
    Metric(
        "paceline_step_phase_seconds_total",
        "counter",
        ("rank", "phase"),
        "Time of the training loop by phase: data, forward (from the batch to backward), backward, compute (of click "
        "models), communication (the loop waits for messages), optimizer and other.",
    ),
    Metric(
        "paceline_wait_seconds_total",
        "counter",
        ("rank", "for_rank"),
        "Time that the rank waits for the rank for_rank, which is the last one to be ready for an exchange of "
        "gradients. Measured under all-reduce, hybrid and parameter-server:sequential if all ranks are on one machine, "
        "for at most 256 exchanges a second.",
    ),
    Metric(
        "paceline_collective_seconds",
        "histogram",
        ("rank", "op", "algorithm"),
        "Duration of a collective operation on this rank, with the wait for other ranks.",
        SECONDS,
    ),
    Metric("paceline_collective_bytes_total", "counter", ("rank", "op"), "Bytes of the arrays of collectives."),
    Metric(
        "paceline_table_request_seconds",
        "histogram",
        ("rank", "op"),
        "Time from a pull, push or push_pull to one server until the rank has read the answer.",
        SECONDS,
    ),
    Metric(
        "paceline_filter_bytes_total",
        "counter",
        ("rank", "filters", "form"),
        "Bytes of requests to servers, before the filters of keys, values and bytes (plain) and after them (sent).",
    ),
    Metric(
        "paceline_reported_value",
        "gauge",
        ("rank", "name"),
        "Last number that the program passed to strategy.report_progress().",
    ),
    Metric("paceline_rank_memory_bytes", "gauge", ("rank",), "Resident memory of the rank's process."),
    Metric(
        "paceline_rank_last_seen_seconds",
        "gauge",
        ("rank",),
        "Time since the last report of the rank; 0 after its end.",
    ),
    # Servers and the cluster.
    Metric("paceline_server_rows", "gauge", ("server", "table"), "Rows of the table on the server."),
    Metric("paceline_server_table_bytes", "gauge", ("server", "table"), "Memory of the table on the server."),
    Metric("paceline_server_memory_bytes", "gauge", ("server",), "Resident memory of the server's process."),
    Metric("paceline_server_pushes_total", "counter", ("server", "table"), "Pushes to the table on the server."),
    Metric("paceline_server_pulls_total", "counter", ("server", "table"), "Pulls from the table on the server."),
    Metric(
        "paceline_server_dropped_pushes_total", "counter", ("server", "table"), "Pushes dropped because of staleness."
    ),
    Metric(
        "paceline_server_non_finite_total",
        "counter",
        ("server", "table"),
        "Pushes, sums, writes and loads with infinities or NaN.",
    ),
    Metric(
        "paceline_staleness_pushes",
        "histogram",
        ("server", "table"),
        "Staleness of gradients: pushes of other workers that the server applied between pull and push.",
        PUSHES,
    ),
    Metric("paceline_server_received_bytes_total", "counter", ("server",), "Bytes that the server has received."),
    Metric("paceline_server_sent_bytes_total", "counter", ("server",), "Bytes that the server has sent."),
    Metric("paceline_server_held_requests", "gauge", ("server",), "Requests that wait on the server."),
    Metric(
        "paceline_server_replica_differences",
        "gauge",
        ("server",),
        "Buckets and tables that differ from the previous server of the chain.",
    ),
    Metric("paceline_members", "gauge", ("role",), "Members of the cluster: servers and workers."),
    Metric("paceline_membership_epoch", "gauge", (), "Number of the view, which rises with every change of members."),
    Metric("paceline_failovers_total", "counter", (), "Primaries that left the view and were replaced by a successor."),
    # A training of `paceline train`.
    Metric("paceline_training_examples_total", "counter", (), "Training examples that all workers have processed."),
    Metric("paceline_training_loss", "gauge", (), "Mean loss over the latest examples, before their update."),
    Metric("paceline_training_done_ratio", "gauge", (), "Finished fraction of the whole work, with evaluation."),
    # `paceline serve`.
    Metric("paceline_requests_total", "counter", ("code",), "Prediction requests."),
    Metric("paceline_rows_total", "counter", (), "Predicted rows."),
    Metric("paceline_request_seconds", "histogram", (), "Duration of prediction requests.", SECONDS),
    Metric("paceline_model_reloads_total", "counter", (), "Newer models that were loaded."),
    Metric("paceline_model_reload_failures_total", "counter", (), "Newer models that could not be loaded."),
    Metric("paceline_model_features", "gauge", (), "Features of the model."),
)


class MetricValues:
    """Current values of metrics. Not thread-safe."""

    def __init__(self) -> None:
        self.samples: Samples = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter."""
        values = self.samples.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + amount  # type: ignore[operator]

    def set(self, name: str, value: Value, *labels: str) -> None:
        """Set a gauge, or a whole counter or histogram."""
        self.samples.setdefault(name, {})[labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        values, bounds = self.samples.setdefault(name, {}), METRICS[name].bounds
        found = values.get(labels)
        if found is None:
            found = values[labels] = [0.0] * (len(bounds) + 2)
        assert isinstance(found, list)
        found[0] += value
        found[bisect_left(bounds, value) + 1] += 1


def is_valid(name: str, labels: Labels, value: Value, *, without_rank: bool = False) -> bool:
    """Return whether a sample from another process has the form of its metric."""
    metric = METRICS.get(name)
    if metric is None or len(labels) != len(metric.labels) - without_rank:
        return False
    if metric.kind == "histogram":
        return isinstance(value, list) and len(value) == len(metric.bounds) + 2
    return not isinstance(value, list)


def bucket_counts(histogram: list[float], bounds: tuple[float, ...]) -> list[float]:
    """Return the counts of the buckets. `histogram` has a count for each whole number from 0 up."""
    counts = [0.0] * (len(bounds) + 1)
    for number, count in enumerate(histogram):
        counts[bisect_left(bounds, number)] += count
    return counts


def exposition(samples: Samples, accept: str = "") -> tuple[bytes, str]:
    """Return the samples in a text format of Prometheus, and its content type.

    The HTTP header `accept` chooses between OpenMetrics and Prometheus's own format. Raises UsageError if
    prometheus-client is not installed.
    """
    check_prometheus()
    from prometheus_client.exposition import choose_encoder

    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a malformed version in the header
        encode, content_type = choose_encoder("")
    return encode(_Families(samples)), content_type


def check_prometheus() -> None:
    """Raise UsageError if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError(
            "metrics for Prometheus need prometheus-client, which is not installed: pip install 'paceline[observe]'"
        ) from None


class _Families:
    """A collector of prometheus-client."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, values in self._samples.items():
            metric = METRICS[name]
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
                for labels, value in values.items():
                    assert isinstance(value, list)
                    total, buckets = _cumulate(value, metric)
                    histogram.add_metric(labels, buckets, total)
                yield histogram
            else:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(name, metric.help, labels=metric.labels)
                for labels, value in values.items():
                    family.add_metric(labels, value)
                yield family


def _cumulate(histogram: list[float], metric: Metric) -> tuple[float | None, list[tuple[str, float]]]:
    """Return the sum (None if it is unknown), and the number of values up to each bound."""
    bounds = [*map(str, metric.bounds), "+Inf"]
    total = None if math.isnan(histogram[0]) else histogram[0]
    return total, list(zip(bounds, accumulate(histogram[1:]), strict=True))


def as_json(samples: Samples) -> dict[str, list[dict[str, Any]]]:
    """Return the samples as JSON: a list of objects with labels and value for each name.

    A histogram has ``sum`` (None if it is unknown), ``count``, and ``buckets`` with the count up to each bound.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, values in samples.items():
        metric = METRICS[name]
        for labels, value in values.items():
            entry: dict[str, Any] = dict(zip(metric.labels, labels, strict=True))
            if isinstance(value, list):
                total, buckets = _cumulate(value, metric)
                entry |= {"sum": total, "count": buckets[-1][1], "buckets": dict(buckets)}
            else:
                entry["value"] = value
            found.setdefault(name, []).append(entry)
    return found

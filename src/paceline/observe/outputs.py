"""Open the outputs for the metrics of a run, and start their collector."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import printable
from paceline.observe.collector import Collector
from paceline.observe.metrics import check_prometheus, exposition
from paceline.observe.web import Page, WebRequest, WebServer
from paceline.output_files import naming_output

if TYPE_CHECKING:
    from paceline.observe.history import RunHistory


@contextlib.contextmanager
def open_outputs(
    command: str,
    *,
    metrics: str | None = None,
    metrics_file: Path | None = None,
    tensorboard: Path | None = None,
    dashboard: str | None = None,
    report: Path | None = None,
) -> Iterator[Collector]:
    """Collect metrics during the block, and write them to the given outputs. `command` is named in messages.

    `metrics` and `dashboard` are addresses of an HTTP server, ``PORT`` or ``HOST:PORT``; equal ones share one server.
    Raises UsageError for an output that is not available, and AddressError for a port in use.
    """
    with contextlib.ExitStack() as stack:
        collector = Collector(warn=lambda text: print(f"{command}: {text}", file=sys.stderr, flush=True))
        stack.callback(collector.close)
        if metrics is not None:
            check_prometheus()
        if metrics_file is not None or tensorboard is not None:
            from paceline.observe.files import MetricLines, TensorBoard

            if metrics_file is not None:
                with naming_output("--metrics-file", metrics_file):
                    collector.add_sink(MetricLines(metrics_file))
            if tensorboard is not None:
                with naming_output("--tensorboard", tensorboard):
                    collector.add_sink(TensorBoard(tensorboard))
        history: RunHistory | None = None
        if dashboard is not None or report is not None:
            from paceline.observe.history import RunHistory

            history = RunHistory(printable(" ".join([command, *sys.argv[2:]])), collector)
            collector.add_sink(history)
        if report is not None:
            from paceline.observe.dashboard import ReportFile

            assert history is not None
            collector.add_sink(ReportFile(report, history))  # after the history, whose last figures it needs
        servers: dict[str, WebServer] = {}
        if metrics is not None:
            server = servers[metrics] = stack.enter_context(WebServer.start(metrics, "--metrics"))

            def show_metrics(request: WebRequest) -> Page:
                return Page(*exposition(collector.samples(), request.accept))

            server.routes["/metrics"] = show_metrics
            print(f"{command}: metrics at {server.address}/metrics", file=sys.stderr, flush=True)
        if dashboard is not None:
            from paceline.observe.dashboard import add_dashboard

            assert history is not None
            server = servers.get(dashboard) or stack.enter_context(WebServer.start(dashboard, "--dashboard"))
            print(f"{command}: dashboard at {add_dashboard(server, history)}", file=sys.stderr, flush=True)
        collector.start()
        yield collector

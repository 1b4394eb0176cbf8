"""Define command-line options that several commands share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from paceline.command_options import given_values, option
from paceline.environment import environment
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.observe.collector import Collector
    from paceline.ps.messages import ClusterSettings
    from paceline.tables.memory.limit import MemoryLimit
    from paceline.transport import TLS


SCHEDULER_PORT: Final = 7337
COORDINATOR_PORT: Final = 7338
RENDEZVOUS_PORT: Final = 29500
"""The default ports of ``paceline scheduler``, ``paceline coordinator`` and ``paceline run`` on several machines."""

_TIMELINE_STEPS: Final = "10:20"


@dataclass(frozen=True, kw_only=True)
class PushFlags:
    """Options that determine when servers acknowledge pushes, and when they reject pushes."""

    min_replicas: int | None = option(
        "Acknowledge a push only when this many replicas have it. Pushes wait until a dead server is replaced. "
        "Default 0.",
        min=0,
    )
    non_finite: str | None = option(
        "Pushes, writes and loads that would leave infinities or NaN in a table are refused, or accepted and counted; "
        "default refuse."
    )

    def make_settings(self, *, consistency: str, stale: str | None, **settings: Any) -> ClusterSettings:
        from paceline.protocol import parse_consistency, parse_stale_policy
        from paceline.ps.messages import ClusterSettings

        made = ClusterSettings(
            consistency=str(parse_consistency(consistency)),
            stale=str(parse_stale_policy(stale or "accept")),
            min_replicas=self.min_replicas or 0,
            non_finite=self.non_finite or "refuse",
            **settings,
        )
        made.check()
        return made


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """The memory limit of each server."""

    memory_limit: str | None = option(
        "Memory for the rows of sparse tables on each server, such as 512M or 8G. Other rows are stored in unnamed "
        "files in --spill-dir, which is slower; default: no limit."
    )
    spill_dir: Path | None = option(
        "Folder on a disk for rows beyond --memory-limit; default: the folder of temporary files."
    )

    def parse(self) -> MemoryLimit | None:
        from paceline.tables.memory.limit import MemoryLimit

        return MemoryLimit.parse(self.memory_limit, self.spill_dir)


@dataclass(frozen=True, kw_only=True)
class FilterModuleFlags:
    """Modules with the user's own filters."""

    filter_module: list[str] | None = option(
        "Module with your own filters. Servers and workers import it. May be given several times.",
        "--filter-module",
        metavar="MODULE",
    )

    def names(self, *filters: str | None) -> list[str]:
        from paceline.filters.modules import modules_named_in

        return [*(self.filter_module or ()), *(name for text in filters for name in modules_named_in(text or ""))]

    def load(self, *filters: str | None) -> None:
        from paceline.filters.modules import import_filter_modules

        import_filter_modules(self.names(*filters))


@dataclass(frozen=True, kw_only=True)
class TLSFlags:
    """The files with a process's TLS identity."""

    tls_cert: Path | None = option("This process's certificate (PEM); turns TLS on.")
    tls_key: Path | None = option("Key of --tls-cert (PEM).")
    tls_ca: Path | None = option("Certificate of the authority that signed the other processes' certificates (PEM).")

    def load(self) -> TLS | None:
        """Return the TLS settings from the options, else from the environment; None without TLS. Raises UsageError."""
        from paceline.transport import TLS

        return self.given() or TLS.of_environment(environment())

    def given(self) -> TLS | None:
        """Return the TLS settings from the options; None without options."""
        from paceline.transport import TLS

        return TLS.of_files(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, kw_only=True)
class TimelineFlags:
    """The timeline of some steps of a training loop."""

    timeline: Path | None = option(
        "Write a timeline of some steps of all processes to this file, for https://ui.perfetto.dev; as JSON, or as "
        "protobuf if its name ends with .pftrace."
    )
    timeline_steps: str | None = option(
        "With --timeline: the first step of the training loop, from 0, and the step after the last; default "
        f"{_TIMELINE_STEPS}."
    )

    def parse_steps(self) -> range:
        """Return the steps. Raises UsageError if they are invalid, or if there is no file for them."""
        from paceline.observe.spans.window import parse_steps

        steps = parse_steps(self.timeline_steps or _TIMELINE_STEPS)
        if self.timeline is None and self.timeline_steps is not None:
            raise UsageError(f"--timeline-steps {self.timeline_steps}: needs a file. Pass --timeline FILE too")
        return steps

    @contextlib.contextmanager
    def open(self, command: str, num_workers: int) -> Iterator[None]:
        """Record the timeline of the cluster that starts in the block; write it at the end of the block at the latest.

        `command` is named in messages. Raises UsageError for invalid options.
        """
        steps = self.parse_steps()
        if self.timeline is None:
            yield
            return
        from paceline.observe.spans.timeline import TimelineTask
        from paceline.observe.stuck.jobs import start_job
        from paceline.observe.stuck.processes import unwatch, watch

        def report(text: str) -> None:
            print(f"{command}: {text}", file=sys.stderr, flush=True)

        with contextlib.ExitStack() as stack:
            job = start_job()
            if job is None:
                report("no timeline, because TMPDIR has no space or cannot be written")
                yield
                return
            stack.enter_context(job)
            watch("driver", job.folder)
            stack.callback(unwatch)
            task = stack.enter_context(TimelineTask.start(job, self.timeline, steps, num_workers, report))
            yield
            task.finish()


@dataclass(frozen=True, kw_only=True)
class ObserveFlags:
    """The outputs for the metrics of a run."""

    panel: ClassVar = "Metrics"

    metrics: str | None = option(
        "Serve the metrics for Prometheus at http://127.0.0.1:PORT/metrics; HOST:PORT for other addresses, 0 for a "
        "free port.",
        metavar="PORT",
    )
    metrics_file: Path | None = option("File for the metrics, as lines of JSON every five seconds.")
    tensorboard: Path | None = option("Directory for the metrics in TensorBoard's format.")
    dashboard: str | None = option(
        "Serve a page with the figures of the run; its address is printed. PORT as for --metrics, by default 0.",
        metavar="[PORT]",
    )
    report: Path | None = option("File for a page with the figures of the run, written at its end.")

    @contextlib.contextmanager
    def open(self, command: str) -> Iterator[Collector | None]:
        """Collect metrics during the block, for the given outputs; None without an output.

        `command` is named in messages. Raises UsageError for an output that is not available, and AddressError for a
        port in use.
        """
        outputs = given_values(self)
        if not outputs:
            yield None
            return
        from paceline.observe.outputs import open_outputs

        with open_outputs(command, **outputs) as collector:
            yield collector

"""Start and end the ranks' processes, including their children, and provide files for ``paceline stacks``.

Each rank has its own process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import UsageError
from paceline.launch.engines.engine import report
from paceline.launch.run.blame import Tracebacks
from paceline.launch.run.options import RunOptions
from paceline.launch.run.plan import Layout, RankPlan
from paceline.launch.run.streams import Stream, open_logs
from paceline.launch.screen import Screen
from paceline.launch.supervisor import Child, Supervisor, spawn
from paceline.observe.spans.timeline import TimelineTask
from paceline.observe.stuck.jobs import LaunchedJob, start_job
from paceline.observe.stuck.torch_files import check_directory, write_torch_files

if TYPE_CHECKING:
    from paceline.launch.run.setup import Setup
    from paceline.observe.collector import Collector

_END_S = 1.0
_QUIET = "6"


class Rank:
    """One rank's process."""

    def __init__(self, plan: RankPlan, child: Child, streams: tuple[Stream, ...]) -> None:
        self.rank = plan.rank
        self.child = child
        self.streams = streams
        self.status: int | None = None

    def last_lines(self) -> tuple[bytes, ...]:
        return tuple(self.streams[1].recent) if self.streams else ()


class RankProcesses:
    """The ranks of this launcher. :meth:`close` ends them."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self._started: set[int] = set()
        self._supervisor = Supervisor()

    def start(
        self,
        command: Sequence[str],
        plans: Sequence[RankPlan],
        screen: Screen,
        tracebacks: Tracebacks,
        *,
        captured: bool,
        log_dir: Path | None,
    ) -> None:
        """Start the ranks. Without `captured` they inherit the standard streams. Only the first rank has an input.

        If an earlier rank with the same number has written a log, the new rank appends to it.
        """
        for plan in plans:
            logs: tuple[IO[bytes] | None, IO[bytes] | None] = (None, None)
            if log_dir is not None:
                logs = open_logs(log_dir, plan.log_prefix, appends=plan.rank in self._started)
            pipes = [os.pipe(), os.pipe()] if captured else []
            launch = partial(
                spawn,
                command,
                env=plan.environment,
                stdin=subprocess.DEVNULL if self._started else None,
                stdout=pipes[0][1] if captured else None,
                stderr=pipes[1][1] if captured else None,
            )
            try:
                child = self._supervisor.start(f"rank {plan.rank}", launch, is_foreign=True)
            except OSError as error:
                for reading, _ in pipes:
                    os.close(reading)
                for log in logs:
                    if log is not None:
                        log.close()
                raise UsageError(f"rank {plan.rank}: cannot start its process: {error.strerror}") from None
            finally:
                for _, writing in pipes:
                    os.close(writing)
            streams = tuple(
                Stream(
                    plan.rank, reading, screen, is_error=is_error, log=log, tracebacks=tracebacks, clock=time.monotonic
                )
                for (reading, _), is_error, log in zip(pipes, (False, True), logs, strict=False)
            )
            self._started.add(plan.rank)
            self.ranks.append(Rank(plan, child, streams))

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.status is None]

    def find_ended(self) -> list[Rank]:
        """Return the ended ranks for which :meth:`reap` was not called yet."""
        return [rank for rank in self.living() if not rank.child.is_alive()]

    def reap(self, rank: Rank) -> None:
        """Record the status of an ended rank, read the rest of its output, and end its children."""
        rank.status = rank.child.status()
        self._supervisor.signal(rank.child, signal.SIGTERM, group=True)
        for stream in rank.streams:
            stream.close(drain=True)

    def signal(self, number: int, *, groups: bool) -> None:
        """Send a signal to every living rank. With `groups`, also send it to the rank's children, as a terminal
        does."""
        for rank in self.living():
            self._supervisor.signal(rank.child, number, group=groups)

    def close(self) -> None:
        self._supervisor.close(_END_S, signal.SIGKILL)
        for rank in self.ranks:
            if rank.status is None:
                rank.status = rank.child.status()
            for stream in rank.streams:
                stream.close(drain=False)


class RunJob(Closing):
    """The job of this launcher. If its folder cannot be created, the run works without the files."""

    def __init__(self, job: LaunchedJob | None, directory: Path | None, timeline: TimelineTask | None) -> None:
        """Use a job; :meth:`start` creates it."""
        self._job, self._directory, self._timeline = job, directory, timeline
        self._collector: Collector | None = None

    @classmethod
    def start(cls, options: RunOptions, layout: Layout | None) -> RunJob:
        """Start a job for the files that the user requests. Raises UsageError for options that are not valid.

        Without a `layout`, this launcher has no ranks.
        """
        if options.flight_recorder is not None:
            check_directory(options.flight_recorder)
        steps, path = options.timeline.parse_steps(), options.timeline.timeline
        if path is None and options.timeline_operators:
            raise UsageError("--timeline-operators: needs a file. Pass --timeline FILE too")
        job, timeline = start_job(), None
        if job is None and (path or options.flight_recorder):
            report("no timeline and no flight recorder, because TMPDIR has no space or cannot be written")
        if path is not None and layout is not None and job is not None:
            path = path.with_stem(f"{path.stem}.node{layout.node}") if layout.node else path
            timeline = TimelineTask.start(job, path, steps, len(layout.ranks), report)
            if options.timeline_operators:
                job.variables["PACELINE_TIMELINE_OPERATORS"] = "1"
                # Without it, PyTorch's library prints lines at the begin and the end of a profile.
                job.variables["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", _QUIET)
        return cls(job, options.flight_recorder, timeline)

    def start_agent(
        self,
        stack: contextlib.ExitStack,
        setup: Setup,
        layout: Layout,
        scheduler: str | None,
        collector: Collector | None,
    ) -> None:
        """On several nodes, let ``paceline stacks`` and the launcher of node 0 reach this launcher."""
        self._collector = collector
        if self._job is not None and (setup.share is not None or layout.world_size > len(layout.ranks)):
            from paceline.launch.run.agent import start_agent

            start_agent(stack, setup, layout, self._job.folder, scheduler, collector)

    def add_event(self, text: str) -> None:
        """Show an event on the dashboard and in the report."""
        if self._collector is not None:
            self._collector.add_event(text)

    def variables(self) -> dict[str, str]:
        """Return the variables of the ranks."""
        none = {"PACELINE_JOB_DIR": "", "PACELINE_TIMELINE_STEPS": "", "PACELINE_TIMELINE_OPERATORS": ""}
        return none if self._job is None else {**none, **self._job.variables}

    def add(self, ranks: Sequence[Rank]) -> None:
        """Add ranks that have been started."""
        if self._job is not None:
            for rank in ranks:
                self._job.add(f"rank {rank.rank}", rank.child.process.pid)

    def finish(self, *, has_failed: bool) -> None:
        """Write the requested files after the end of the ranks. The flight recorder is written only after a failure."""
        if self._timeline is not None:
            self._timeline.finish()
        if self._job is None or self._directory is None or not has_failed:
            return
        try:
            written = write_torch_files([self._job.folder], self._directory)
        except OSError as error:
            report(f"cannot write the last collectives to {self._directory}: {error.strerror}")
        else:
            report(
                f"the last collectives of {len(written)} ranks are in {self._directory}. Analyse them with python -m "
                f"torch.distributed.flight_recorder.fr_trace {self._directory}"
            )

    @override
    def close(self) -> None:
        """Remove the files."""
        if self._timeline is not None:
            self._timeline.close()
        if self._job is not None:
            self._job.close()

"""Start and end the ranks' processes, including their children, and provide files for ``paceline stacks``.

Each rank has its own process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import UsageError
from paceline.launch.engines.engine import report
from paceline.launch.run.blame import Tracebacks
from paceline.launch.run.plan import RankPlan
from paceline.launch.run.streams import Stream, open_logs
from paceline.launch.screen import Screen
from paceline.launch.supervisor import Child, Supervisor, spawn
from paceline.observe.stuck.jobs import LaunchedJob, start_job
from paceline.observe.stuck.torch_files import check_directory, write_torch_files

_END_S = 1.0


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
        """Send a signal to every living rank; with `groups` also to its children, as a terminal does."""
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

    def __init__(self, job: LaunchedJob | None, directory: Path | None) -> None:
        """Use a job; :meth:`start` creates it."""
        self._job, self._directory = job, directory

    @classmethod
    def start(cls, directory: Path | None) -> RunJob:
        """Start a job that writes the flight recorder to `directory`. Raises UsageError if this cannot be created."""
        if directory is not None:
            check_directory(directory)
        return cls(start_job(), directory)

    def variables(self) -> dict[str, str]:
        """Return the variables of the ranks."""
        return {"PACELINE_JOB_DIR": "" if self._job is None else str(self._job.folder)}

    def add(self, ranks: Sequence[Rank]) -> None:
        """Add ranks that have been started."""
        if self._job is not None:
            for rank in ranks:
                self._job.add(f"rank {rank.rank}", rank.child.process.pid)

    def write_flight_recorder(self) -> None:
        """Write the last collectives of the ranks after a failure, if the user has requested this."""
        if self._job is None or self._directory is None:
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
        if self._job is not None:
            self._job.close()

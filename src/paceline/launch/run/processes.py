"""The rank processes of a run: started, each in a process group of its own, and ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

from paceline.errors import UsageError
from paceline.launch.run.blame import Tracebacks
from paceline.launch.run.plan import RankPlan
from paceline.launch.run.streams import Screen, Stream, open_logs
from paceline.launch.supervisor import Child, Supervisor, spawn

_END_S = 1.0


class Rank:
    """One rank's process."""

    def __init__(self, plan: RankPlan, child: Child, streams: tuple[Stream, ...]) -> None:
        self.rank = plan.rank
        self.child = child
        self.streams = streams
        self.status: int | None = None

    def said(self) -> tuple[bytes, ...]:
        """Return its last lines on standard error, as far as they came by here."""
        return self.streams[1].recent.lines() if self.streams else ()


class RankProcesses:
    """All ranks that this launcher starts. :meth:`close` ends them."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
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
        """Start them; without `captured` they write to where this process writes. The first one gets standard input."""
        for number, plan in enumerate(plans):
            logs: tuple[IO[bytes] | None, IO[bytes] | None] = (None, None)
            if log_dir is not None:
                logs = open_logs(log_dir, plan.rank)
            pipes = [os.pipe(), os.pipe()] if captured else []
            launch = partial(
                spawn,
                command,
                env=plan.environment,
                stdin=None if number == 0 else subprocess.DEVNULL,
                stdout=pipes[0][1] if captured else None,
                stderr=pipes[1][1] if captured else None,
            )
            try:
                child = self._supervisor.start(f"rank {plan.rank}", launch, is_foreign=True)
            except OSError as error:
                for here, _ in pipes:
                    os.close(here)
                for log in logs:
                    if log is not None:
                        log.close()
                raise UsageError(f"rank {plan.rank} cannot be started: {error.strerror}") from None
            finally:
                for _, there in pipes:
                    os.close(there)
            streams = tuple(
                Stream(plan.rank, here, screen, is_error=is_error, log=log, tracebacks=tracebacks, clock=time.monotonic)
                for (here, _), is_error, log in zip(pipes, (False, True), logs, strict=False)
            )
            self.ranks.append(Rank(plan, child, streams))

    def living(self) -> list[Rank]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if rank.status is None]

    def find_ended(self) -> list[Rank]:
        """Return the ranks that have ended since :meth:`take_leave` was last called for one."""
        return [rank for rank in self.living() if not rank.child.is_alive()]

    def take_leave(self, rank: Rank) -> None:
        """Note the status of a rank that has ended, read all that it wrote, and end what it has left behind."""
        rank.status = rank.child.status()
        self._supervisor.signal(rank.child, signal.SIGTERM, group=True)
        for stream in rank.streams:
            stream.close(drain=True)

    def signal(self, number: int, *, groups: bool) -> None:
        """Send every living rank a signal; with `groups`, what they have started too, as a terminal does."""
        for rank in self.living():
            self._supervisor.signal(rank.child, number, group=groups)

    def close(self) -> None:
        """End every rank, at once, and what they have left. Idempotent."""
        self._supervisor.close(_END_S, signal.SIGKILL)
        for rank in self.ranks:
            if rank.status is None:
                rank.status = rank.child.status()
            for stream in rank.streams:
                stream.close(drain=False)

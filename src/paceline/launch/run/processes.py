"""The rank processes of a run: started, each in a process group of its own, and ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from paceline.errors import UsageError
from paceline.launch.run.blame import Tracebacks
from paceline.launch.run.plan import RankPlan
from paceline.launch.run.streams import Screen, Stream, open_logs

_LEFTOVERS_S = 1.0


class Rank:
    """One rank's process."""

    def __init__(self, plan: RankPlan, process: subprocess.Popen[bytes], streams: tuple[Stream, ...]) -> None:
        self.rank = plan.rank
        self.process = process
        self.streams = streams
        self.status: int | None = None

    def said(self) -> tuple[bytes, ...]:
        """Return its last lines on standard error, as far as they came by here."""
        return self.streams[1].recent.lines() if self.streams else ()


class RankProcesses:
    """All ranks that this launcher starts. :meth:`close` ends them; if this process is killed, a guard does."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self._groups: set[int] = set()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

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
            try:
                process = subprocess.Popen(
                    command,
                    env=plan.environment,
                    stdin=None if number == 0 else subprocess.DEVNULL,
                    stdout=pipes[0][1] if captured else None,
                    stderr=pipes[1][1] if captured else None,
                    start_new_session=True,
                )
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
            self._note_group("+", process.pid)
            streams = tuple(
                Stream(plan.rank, here, screen, is_error=is_error, log=log, tracebacks=tracebacks, clock=time.monotonic)
                for (here, _), is_error, log in zip(pipes, (False, True), logs, strict=False)
            )
            self.ranks.append(Rank(plan, process, streams))

    def living(self) -> list[Rank]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if rank.status is None]

    def find_ended(self) -> list[Rank]:
        """Return the ranks that have ended since :meth:`take_leave` was last called for one."""
        return [rank for rank in self.living() if rank.process.poll() is not None]

    def take_leave(self, rank: Rank) -> None:
        """Note the status of a rank that has ended, read all that it wrote, and end what it has left behind."""
        rank.status = rank.process.poll()
        self._signal_group(rank.process.pid, signal.SIGTERM)
        for stream in rank.streams:
            stream.close(drain=True)

    def signal(self, number: int, *, groups: bool) -> None:
        """Send every living rank a signal; with `groups`, what they have started too, as a terminal does."""
        for rank in self.living():
            if groups:
                self._signal_group(rank.process.pid, number)
            else:
                rank.process.send_signal(number)

    def close(self) -> None:
        """End every rank, at once, and what they have left. Idempotent."""
        for rank in self.living():
            self._signal_group(rank.process.pid, signal.SIGKILL)
        for rank in self.ranks:
            status = rank.process.wait()
            rank.status = status if rank.status is None else rank.status
            for stream in rank.streams:
                stream.close(drain=False)
        deadline = time.monotonic() + _LEFTOVERS_S
        while any(self._signal_group(group, 0) for group in list(self._groups)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for group in list(self._groups):
            self._signal_group(group, signal.SIGKILL)
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            try:
                self._guard.stdin.write(b"end\n")
                self._guard.stdin.close()
            except BrokenPipeError:
                pass  # somebody has killed it
        self._guard.wait()

    def _signal_group(self, group: int, number: int) -> bool:
        """Send a signal to a process group; return whether it has anybody."""
        if group not in self._groups:
            return False
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            self._note_group("-", group)
            return False
        except PermissionError:  # macOS says so of a group of zombies
            return False
        return True

    def _note_group(self, sign: str, group: int) -> None:
        self._groups.add(group) if sign == "+" else self._groups.discard(group)
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(f"{sign}{group}\n".encode())
            self._guard.stdin.flush()
        except BrokenPipeError:
            pass

"""Check whether the processes of ranks on this host are alive or stopped."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from pathlib import Path

import psutil


class Watch:
    """Detects the end of processes immediately, even before their parent process has collected their exit status."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        """`processes` maps ranks to process ids. The process that creates this object is not watched."""
        self._processes = {rank: pid for rank, pid in processes.items() if pid != os.getpid()}
        self._descriptors: dict[int, int] = {}  # process descriptor → rank
        self._poll = select.poll()
        self._ended: set[int] = set()
        for rank, pid in self._processes.items():
            self._open(rank, pid)

    def _open(self, rank: int, pid: int) -> None:
        if hasattr(os, "pidfd_open"):
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(rank)
                return
            except OSError:  # the kernel does not support or allow this, so the process is not watched
                return
            self._descriptors[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> tuple[int, ...]:
        """Return the ranks whose processes have ended. Takes a few microseconds."""
        for descriptor, _ in self._poll.poll(0) if self._descriptors else ():
            self._ended.add(self._descriptors[descriptor])
        watched = set(self._descriptors.values())
        for rank, pid in self._processes.items():
            if rank not in watched and not is_alive(pid):
                self._ended.add(rank)
        return tuple(sorted(self._ended))

    def close(self) -> None:
        """Stop watching. Idempotent."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def is_alive(pid: int) -> bool:
    """Return whether a process runs; zombies do not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP or a debugger)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False

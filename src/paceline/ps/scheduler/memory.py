"""A process's record of its tables and jobs, for a scheduler that replaces the present one.

:class:`Memory` sees each message to the scheduler and each answer. It stores tables itself, and jobs in a
:class:`paceline.protocol.jobs.MemberLedger`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from paceline.protocol.jobs import Job, JobMemory, JobRecord, JobState, Lease, MemberLedger, TakenReport
from paceline.protocol.jobs.messages import JobRequest
from paceline.ps import messages
from paceline.ps.messages import KnownTable
from paceline.tables.bounds import TableNumber
from paceline.transport import read_meta

_ANSWERS: Final[dict[type, Any]] = {
    messages.TakeLease: Lease,
    messages.GetJob: Job,
    messages.PostJob: int,
    messages.JobStatus: JobState,
    messages.TakeReports: TakenReport | None,
}
"""The recorded answers to requests about jobs."""


def _decode(meta: bytes, kind: Any) -> Any:
    return read_meta(meta, kind, "an answer of the scheduler")


class Memory:
    """One process's record for a new scheduler. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[int, KnownTable] = {}
        self._ledger = MemberLedger()

    def joined(self, incarnation: int) -> None:
        """Set the incarnation of this process."""
        self._ledger.incarnation = incarnation

    def sent(self, message: msgspec.Struct, body: Iterable[Any] = ()) -> msgspec.Struct:
        """Record a message before it is sent; return the message to send."""
        match message:
            case messages.Heartbeat(progress=progress) if progress:
                with self._lock:
                    self._ledger.counted(progress)
            case JobRequest():
                with self._lock:
                    return self._ledger.sent(message, tuple(body))
            case _:
                pass
        return message

    def answered(self, message: msgspec.Struct, meta: bytes) -> None:
        """Record the answer to a message, in the thread that receives it, so that no received answer is missing."""
        if isinstance(message, messages.DeclareTable):
            number = _decode(meta, TableNumber)
            with self._lock:
                known = KnownTable(number=number, declared=message.spec, spec=message.spec)
                self._tables.setdefault(number, known)
        elif isinstance(message, JobRequest) and type(message) in _ANSWERS:
            answer = _decode(meta, _ANSWERS[type(message)])
            with self._lock:
                self._ledger.answered(message, answer, time.monotonic())

    def merge_news(self, news: JobRecord) -> None:
        """Record the scheduler's news."""
        with self._lock:
            self._ledger.merge_news(news)

    def tables(self) -> tuple[KnownTable, ...]:
        """Return the tables that this process has declared."""
        with self._lock:
            return tuple(self._tables.values())

    def job(self) -> JobMemory | None:
        """Return the record of the latest job."""
        with self._lock:
            return self._ledger.memory(time.monotonic())

    def again(self) -> list[tuple[msgspec.Struct, tuple[Any, ...]]]:
        """Return the messages about this worker's job to repeat to another scheduler, and their bodies."""
        with self._lock:
            return list(self._ledger.again())

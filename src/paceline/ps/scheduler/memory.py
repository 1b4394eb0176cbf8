"""What a process remembers for the scheduler, should a new one come in its place.

:class:`Memory` looks at each message that goes out on the process's line to the scheduler and at each answer: tables it
keeps itself, jobs are the matter of its :class:`paceline.protocol.jobs.MemberLedger`.
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
"""What is worth noting of the answers to a job's requests."""


def _decode(meta: bytes, kind: Any) -> Any:
    return read_meta(meta, kind, "an answer of the scheduler")


class Memory:
    """What one process would tell a new scheduler. Its methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[int, KnownTable] = {}
        self._ledger = MemberLedger()

    def joined(self, incarnation: int) -> None:
        """Note which member this process is."""
        self._ledger.incarnation = incarnation

    def sent(self, message: msgspec.Struct, body: Iterable[Any] = ()) -> msgspec.Struct:
        """Note a message before it is sent; return it as it is to be sent."""
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
        """Note the answer to a message, in the thread that receives it: nothing is forgotten that has come."""
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
        """Note the scheduler's news."""
        with self._lock:
            self._ledger.merge_news(news)

    def tables(self) -> tuple[KnownTable, ...]:
        """The tables that this process has declared."""
        with self._lock:
            return tuple(self._tables.values())

    def job(self) -> JobMemory | None:
        """What there is to tell of the latest job."""
        with self._lock:
            return self._ledger.memory(time.monotonic())

    def again(self) -> list[tuple[msgspec.Struct, tuple[Any, ...]]]:
        """What to say to another scheduler of this worker's job, and the bodies."""
        with self._lock:
            return list(self._ledger.again())

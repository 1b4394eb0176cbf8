"""Interface of this process's worker for its connections to other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.rpc.allowed import Allowed
from paceline.rpc.futures import Timeout
from paceline.rpc.references import ObjectTable
from paceline.rpc.serving import SpareThreads, Standby
from paceline.rpc.workers import Directory, WorkerInfo


class LocalWorker(Protocol):
    """The part of :class:`~paceline.rpc.agent.Agent` that sends and serves requests."""

    rank: int
    pickle: bool
    allowed: Allowed
    directory: Directory
    table: ObjectTable
    threads: SpareThreads
    standby: Standby

    def worker_of(self, number: int) -> WorkerInfo:
        """Return a worker by its number."""

    def seconds_of(self, timeout: Timeout | None) -> float:
        """Return a call's timeout in seconds; None selects the default."""

    def function_of(self, target: Any) -> Callable[..., Any]:
        """Return the function or method that a call names. Raises UsageError if it is not allowed."""

    def share(self, rrefs: Sequence[Any], to: int, *, is_answer: bool = False) -> None:
        """Register `to` as a holder of these references. Call this before sending them to `to`."""

    def watch(self, holder: int) -> None:
        """Detect the death of a worker that holds objects of this process."""

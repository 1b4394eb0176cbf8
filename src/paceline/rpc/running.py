"""Rpc state of this process and thread: its worker and the autograd context."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from paceline.errors import UsageError
from paceline.rpc.allowed import Allowed
from paceline.rpc.counting import ReferenceId
from paceline.rpc.futures import Future, Timeout
from paceline.rpc.references import Holding, ObjectTable
from paceline.rpc.serving import SpareThreads, Standby
from paceline.rpc.workers import Directory, WorkerInfo

Target = str | tuple[Any, str]
"""A function's qualified name, or an object and a method name. The object is an RRef, or a value that is sent."""


class LocalWorker(Protocol):
    """The part of :class:`~paceline.rpc.agent.Agent` that sends and serves requests."""

    rank: int
    pickle: bool
    allowed: Allowed
    directory: Directory
    table: ObjectTable
    threads: SpareThreads
    standby: Standby

    @property
    def name(self) -> str:
        """This worker's name."""

    def worker_of(self, number: int) -> WorkerInfo:
        """Return a worker by its number."""

    def call(
        self,
        to: int,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Timeout | None = None,
        *,
        is_blocking: bool = False,
    ) -> Future[Any]:
        """Call a function on a worker and return the future of its result.

        `is_blocking`: the caller waits immediately and reads the reply in its own thread.
        """

    def remote(
        self,
        to: int,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Call a function on a worker, keep the result there and return an RRef."""

    def fetch(self, rref: Any, timeout: Timeout | None = None) -> Future[Any]:
        """Return the future of an object's value: a copy, or the object itself at its owner."""

    def local_value(self, reference: ReferenceId) -> Future[Any]:
        """Return the future of a local object's value."""

    def own(self, value: Any) -> Holding:
        """Register an object of this process, so that other processes can reference it."""

    def seconds_of(self, timeout: Timeout | None) -> float:
        """Return a call's timeout in seconds; None and -1 select the default. Raises UsageError."""

    def function_of(self, target: Any) -> Callable[..., Any]:
        """Return the function or method that a call names. Raises UsageError if the function is not allowed."""

    def share(self, rrefs: Sequence[Any], to: int, *, is_answer: bool = False) -> None:
        """Register `to` as a holder of these references. Call this before sending them to `to`.

        Calls to the owner need no registration, because the owner registers itself when it reads the call.
        """

    def watch(self, holder: int) -> None:
        """Detect the death of a worker that holds objects of this process."""

    def wait_for_all(self, timeout_s: float = ...) -> None:
        """Wait until every worker has called this method and no call is pending in any process.

        Raises RankLostError if a worker died or did not call this within `timeout_s`, and DeadlineError if calls take
        longer.
        """

    def close(self) -> None:
        """End this worker and close its connections. Idempotent."""


_agents: list[LocalWorker] = []
_local = threading.local()
_left: list[float] = []


def current_agent() -> LocalWorker:
    """Return this process's agent. Raises UsageError if rpc is not running."""
    if not _agents:
        raise UsageError("rpc is not running in this process; call paceline.rpc.init_rpc(name) first")
    return _agents[-1]


def set_agent(agent: LocalWorker | None) -> None:
    """Set this process's agent; None removes it."""
    if agent is None:
        _left[:] = [time.monotonic()]
    _agents[:] = [] if agent is None else [agent]


def left_at() -> float:
    """Return the ``time.monotonic`` of the last :func:`shutdown`; minus infinity without a shutdown."""
    return _left[-1] if _left else -math.inf


def is_running() -> bool:
    """Return whether this process has an agent."""
    return bool(_agents)


def current_context() -> int:
    """Return the number of this thread's autograd context; 0 without a context."""
    context: int = getattr(_local, "context", 0)
    return context


@contextlib.contextmanager
def in_context(context: int) -> Iterator[None]:
    """Enter an autograd context in this thread."""
    before = current_context()
    _local.context = context
    try:
        yield
    finally:
        _local.context = before

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
    def name(self) -> str: ...

    def worker_of(self, number: int) -> WorkerInfo: ...

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
        """`is_blocking`: the caller waits immediately and reads the reply in its own thread."""

    def remote(
        self,
        to: int,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Timeout | None = None,
    ) -> Any: ...

    def fetch(self, rref: Any, timeout: Timeout | None = None) -> Future[Any]: ...

    def local_value(self, reference: ReferenceId) -> Future[Any]: ...

    def own(self, value: Any) -> Holding: ...

    def seconds_of(self, timeout: Timeout | None) -> float: ...

    def function_of(self, target: Any) -> Callable[..., Any]: ...

    def share(self, rrefs: Sequence[Any], to: int, *, is_answer: bool = False) -> None:
        """Register `to` as a holder of these references, before they are sent to `to`.

        Calls to the owner need no registration, because the owner registers itself when it reads the call.
        """

    def watch(self, holder: int) -> None: ...

    def wait_for_all(self, timeout_s: float = ...) -> None: ...

    def close(self) -> None: ...


_agents: list[LocalWorker] = []
_local = threading.local()
_left: list[float] = []


def current_agent() -> LocalWorker:
    """Return this process's agent. Raises UsageError if rpc is not running."""
    if not _agents:
        raise UsageError("rpc is not running in this process; call paceline.rpc.init_rpc(name) first")
    return _agents[-1]


def set_agent(agent: LocalWorker | None) -> None:
    if agent is None:
        _left[:] = [time.monotonic()]
    _agents[:] = [] if agent is None else [agent]


def left_at() -> float:
    return _left[-1] if _left else -math.inf


def is_running() -> bool:
    return bool(_agents)


def current_context() -> int:
    """Return the number of this thread's autograd context; 0 without a context."""
    context: int = getattr(_local, "context", 0)
    return context


@contextlib.contextmanager
def in_context(context: int) -> Iterator[None]:
    before = current_context()
    _local.context = context
    try:
        yield
    finally:
        _local.context = before

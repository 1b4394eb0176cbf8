"""The state of rpc: the agent of this process, and the current autograd context of each thread."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from paceline.environment import Timeout
from paceline.errors import UsageError
from paceline.rpc.allowed import Allowed
from paceline.rpc.futures import Future, seconds_of
from paceline.rpc.references import Holding, ObjectTable
from paceline.rpc.serving import SpareThreads, Standby
from paceline.rpc.workers import Directory

Target = str | tuple[Any, str]
"""The target of a call: the qualified name of a function, or an object and the name of its method.

The object is an RRef, or a value that is sent with the call.
"""


UNSET_TIMEOUT = -1.0
"""The timeout that means the default timeout in programs for torch.distributed.rpc."""


class LocalWorker(Protocol):
    """The interface of :class:`~paceline.rpc.agent.Agent`, for modules that cannot import the agent without a cycle."""

    rank: int
    pickle: bool
    allowed: Allowed
    directory: Directory
    table: ObjectTable
    threads: SpareThreads
    standby: Standby
    timeout: Timeout

    @property
    def name(self) -> str:
        return self.directory.workers[self.rank].name

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
        """Call `target` on worker `to`. With `is_blocking`, the caller must wait for the reply immediately, and its
        thread reads the reply.
        """

    def remote(
        self,
        to: int,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Timeout | None = None,
    ) -> Any: ...

    def fetch(self, rref: Any, timeout: Timeout | None = None) -> Future[Any]: ...

    def own(self, value: Any) -> Holding:
        reference = self.table.new_id(self.rank)
        creation: Future[Any] = Future()
        creation.set_result(value)
        self.table.own(reference, self.rank, creation)
        return self.table.hold(reference)

    def seconds_of(self, timeout: Timeout | None) -> float:
        return seconds_of(self.timeout if timeout is None or timeout == UNSET_TIMEOUT else timeout)

    def function_of(self, target: Any) -> Callable[..., Any]: ...

    def share(self, rrefs: Sequence[Any], to: int, *, is_answer: bool = False) -> None:
        """Register worker `to` as a holder of `rrefs` at their owners, before the references are sent to `to`.

        References that a call sends to their owner are left out, because the owner counts them when it reads the call.
        """

    def watch(self, holder: int) -> None: ...

    def wait_for_all(self, timeout_s: float = ...) -> None: ...

    def close(self) -> None: ...


_agents: list[LocalWorker] = []
_local = threading.local()
_left: list[float] = []


def current_agent() -> LocalWorker:
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
    """Return the number of this thread's autograd context, or 0 if the thread has no context."""
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

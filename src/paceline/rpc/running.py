"""Rpc state of this process and thread: the agent and the autograd context."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.rpc.agent import Agent

_agents: list[Agent] = []
_local = threading.local()
_left: list[float] = []


def current_agent() -> Agent:
    """Return this process's agent. Raises UsageError if rpc is not running."""
    if not _agents:
        raise UsageError("rpc is not running in this process; call paceline.rpc.init_rpc(name) first")
    return _agents[-1]


def set_agent(agent: Agent | None) -> None:
    """Set this process's agent; None removes it."""
    if agent is None:
        _left[:] = [time.monotonic()]
    _agents[:] = [] if agent is None else [agent]


def left_at() -> float:
    """Return the ``time.monotonic`` of the last :func:`shutdown`; minus infinity without one."""
    return _left[-1] if _left else -math.inf


def is_running() -> bool:
    """Return whether this process has an agent."""
    return bool(_agents)


def current_context() -> int:
    """Return the number of this thread's autograd context; 0 without one."""
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

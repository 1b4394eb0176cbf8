"""Run the programs of simulated nodes. A program waits for requests to servers, for job answers, or for a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias

from paceline.protocol.client import Request
from paceline.protocol.jobs.messages import JobRequest
from simulator.protocol.messages import EndWork
from simulator.protocol.node import SimulatedNode

Program: TypeAlias = Generator[float | list[Request] | JobRequest | EndWork, Any, None]
"""The work of a node: yields a time to sleep, requests to servers for which it waits, or a request about jobs."""


class Performer:
    """Runs one program of a node at a time. `is_done` returns whether a list of requests is done."""

    def __init__(self, node: SimulatedNode, is_done: Callable[[list[Request]], bool] = lambda requests: True) -> None:
        self._node = node
        self._is_done = is_done
        self._program: Program | None = None
        self._pending: list[Request] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._pending is not None

    def perform(self, program: Program) -> None:
        """Run a program from its beginning. The former program stops."""
        self._program = program
        self._resume(program, None)

    def resume(self) -> None:
        if self._program is not None and self._pending is not None and self._is_done(self._pending):
            self._resume(self._program, None)

    def _resume(self, program: Program, value: Any) -> None:
        if program is not self._program:
            return
        self._pending = None
        try:
            step = program.send(value)
            while isinstance(step, list) and self._is_done(step):
                step = program.send(None)
        except StopIteration:
            return
        if isinstance(step, list):
            self._pending = step
        elif isinstance(step, float):
            self._node.later(step, self._resume, program, None)
        else:
            self._node.request(step, partial(self._resume, program))

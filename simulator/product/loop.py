"""An asyncio loop in virtual time. It has no file descriptors: its selector only waits for wake-ups and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from simulator.world import Killed, Thread, VirtualWorld


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop of one process, in the thread that creates it. Calls in an executor run in threads of the world."""

    def __init__(self, world: VirtualWorld) -> None:
        super().__init__()
        self._world = world
        self._thread = world.current
        self._is_called = False
        self._selector = self  # the selector of BaseEventLoop
        self._process = world.current.process
        self._process.at_death.append(self._is_killed)

    def time(self) -> float:
        """Return the virtual time."""
        return self._world.time_s

    def select(self, timeout: float | None) -> list[Any]:
        """Wait until a wake-up, or for the timeout."""
        if self._process.is_dead:
            raise Killed
        if not self._is_called and (timeout is None or timeout > 0):
            self._world.block(timeout)
        self._is_called = False
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._is_called = True
        self._world.wake(self._thread)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call a function in a thread of the world."""
        future = self.create_future()

        def run() -> None:
            try:
                result, error = func(*args), None
            except Exception as caught:
                result, error = None, caught
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.call_soon_threadsafe(finish, result, error)

        def finish(result: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        Thread(self._process, run, f"{self._process.name}/executor").start()
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Register a callback for a signal."""
        self._process.signals[sig] = lambda: self._signalled(callback, args)

    def _signalled(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with contextlib.suppress(RuntimeError):
            self.call_soon_threadsafe(callback, *args)

    def _is_killed(self) -> None:
        self._thread.at_end.append(self.abandon)

    def abandon(self) -> None:
        """Close the coroutines of a killed process, so that they do not continue."""
        for task in sorted(asyncio.all_tasks(self), key=lambda task: (len(task.get_name()), task.get_name())):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            with contextlib.suppress(RuntimeError, Killed, AttributeError):
                coroutine.close()
        self.set_exception_handler(lambda loop, context: None)
        if not self.is_running():
            self.close()

"""Compute on several devices at the same time, in threads with the caller's state of torch."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class DeviceThreads:
    """One thread for each device, with an equal share of the cores. Errors name a thread `kind` and its number."""

    def __init__(self, devices: Sequence[torch.device], kind: str) -> None:
        self._devices = tuple(devices)
        self._kind = kind
        self._pool: ThreadPoolExecutor | None = None
        self._submitting = threading.Lock()
        self._pid = os.getpid()

    def run(self, work: Callable[[int], T], count: int, *, grad: bool = False) -> list[T]:
        """Call ``work(i)`` for the first `count` devices at the same time, and return the results.

        `grad` enables gradients. The threads have the caller's inference mode, autocast, CUDA streams and context
        variables. If calls fail, raise the first exception after all calls; its message begins with thread and device.
        """
        if self._pid != os.getpid():  # this process is a fork, which does not contain the threads
            self._pool, self._submitting, self._pid = None, threading.Lock(), os.getpid()
        state = _ThreadState(self._devices[:count], grad)

        def run_one(number: int) -> T:
            with state.over(number):
                return work(number)

        with self._submitting:  # one call at a time: two interleaved calls could wait for each other's threads
            pool = self._started()
            futures = [pool.submit(contextvars.copy_context().run, run_one, i) for i in range(count)]
        wait(futures)
        for number, future in enumerate(futures):
            error = future.exception()
            if error is not None:
                add_location(error, f"{self._kind} {number} of {count} on {self._devices[number]}")
                raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads. Idempotent. A later :meth:`run` starts new threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceThreads:
        return DeviceThreads(self._devices, self._kind)

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            # Each thread has its own torch.get_num_threads(). A new thread starts with the number that was set last in
            # any thread, so restore this thread's number afterwards.
            count, num_threads = len(self._devices), torch.get_num_threads()
            all_started = threading.Barrier(count)

            def start() -> None:
                torch.get_num_threads()  # a thread's first call would undo set_num_threads
                torch.set_num_threads(max(1, num_threads // count))
                all_started.wait()

            self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"paceline-{self._kind}")
            wait([self._pool.submit(start) for _ in range(count)])
            torch.set_num_threads(num_threads)
        return self._pool


class _ThreadState:
    """The thread-local state of torch in the caller's thread."""

    def __init__(self, devices: Sequence[torch.device], grad: bool) -> None:
        self._devices = devices
        self._grad = grad
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
            if torch.is_autocast_enabled(kind)
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    @contextlib.contextmanager
    def over(self, number: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stream = self._streams[number]
            if stream is not None:
                stack.enter_context(torch.cuda.device(self._devices[number]))
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches))
            yield


def add_location(error: BaseException, location: str) -> None:
    """Prepend `location` to the message of an error of any type."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{location}: {error.args[0]}", *error.args[1:])
    if location not in str(error) and hasattr(error, "add_note"):
        error.add_note(f"in {location}")

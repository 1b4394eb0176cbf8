"""Threads that compute on several devices at the same time, in the state that the caller's thread is in."""

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
    """A thread for each device, kept between calls; each has its share of the cores for work inside an operator.

    `kind` is what computes on a device, as errors are to say it: "replica".
    """

    def __init__(self, devices: Sequence[torch.device], kind: str) -> None:
        self._devices = tuple(devices)
        self._kind = kind
        self._pool: ThreadPoolExecutor | None = None
        self._submitting = threading.Lock()
        self._pid = os.getpid()

    def run(self, work: Callable[[int], T], count: int, *, grad: bool = False) -> list[T]:
        """Return ``work(i)`` of the first `count` devices, computed at the same time, with the grad mode `grad`.

        The caller's inference mode, autocast, CUDA streams and context variables hold in the threads. What one raises
        is raised, after all have ended, with its number and device in the message; if several fail, the first one's.
        """
        if self._pid != os.getpid():  # after a fork, which took no threads along
            self._pool, self._submitting, self._pid = None, threading.Lock(), os.getpid()
        carried = _Carried(self._devices[:count], grad)

        def run_one(number: int) -> T:
            with carried.over(number):
                return work(number)

        with self._submitting:  # all of a call before any of another's, else both might wait for threads
            pool = self._started()
            futures = [pool.submit(contextvars.copy_context().run, run_one, i) for i in range(count)]
        wait(futures)
        for number, future in enumerate(futures):
            error = future.exception()
            if error is not None:
                _say_where(error, f"{self._kind} {number} of {count} on {self._devices[number]}")
                raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads. Idempotent; a later :meth:`run` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceThreads:
        return DeviceThreads(self._devices, self._kind)

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            # torch keeps the number of threads inside an operator by calling thread, and the last one set is what new
            # threads begin with: so this thread, which is not to change, sets its own again.
            count, num_threads = len(self._devices), torch.get_num_threads()
            all_here = threading.Barrier(count)

            def start() -> None:
                torch.get_num_threads()  # A thread's first call takes over the common number, whatever it has set.
                torch.set_num_threads(max(1, num_threads // count))
                all_here.wait()

            self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"paceline-{self._kind}")
            wait([self._pool.submit(start) for _ in range(count)])
            torch.set_num_threads(num_threads)
        return self._pool


class _Carried:
    """The state of the caller's thread that torch keeps by thread."""

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
        """Have that state in this thread, with the device of this number the current one."""
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


def _say_where(error: BaseException, where: str) -> None:
    """Put `where` before the error's message, of whatever type it is."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{where}: {error.args[0]}", *error.args[1:])
    if where not in str(error) and hasattr(error, "add_note"):
        error.add_note(f"in {where}")

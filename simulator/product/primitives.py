"""Replace `threading`, `time`, random numbers and executors for the product's code in a :class:`VirtualWorld`."""

from __future__ import annotations

import concurrent.futures
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any

from simulator.world import Thread, VirtualWorld

_PREEMPTED = 0.05
"""The probability that a thread loses its processor when it acquires a lock."""


class Lock:
    """A mutex; threads acquire it in the order of their requests."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._owner: Thread | None = None
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock like ``threading.Lock.acquire``."""
        world = self._world
        if blocking and world.random.random() < _PREEMPTED:
            world.block(0.0)
        me = world.current
        end_s = None if timeout < 0 else world.time_s + timeout
        while self._owner is not None and not self._owner.process.is_dead:
            if not blocking or (end_s is not None and world.time_s >= end_s):
                return False
            self._waiting.append(me)
            try:
                world.block(None if end_s is None else end_s - world.time_s)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        self._owner = me
        return True

    def release(self) -> None:
        """Release the lock."""
        self._owner = None
        if self._waiting:
            self._world.wake(self._waiting.popleft())

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""
        return self._owner is not None

    def is_owned(self) -> bool:
        """Return whether the running thread holds the lock."""
        return self._owner is self._world.current

    def let_go(self) -> int:
        """Release the lock completely; return the number of acquisitions."""
        self.release()
        return 1

    def take_again(self, count: int) -> None:
        """Acquire the lock as many times as before."""
        self.acquire()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RLock(Lock):
    """A mutex that its owner may acquire again."""

    def __init__(self, world: VirtualWorld) -> None:
        super().__init__(world)
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; the owner may do so again."""
        if not self.is_owned() and not super().acquire(blocking, timeout):
            return False
        self._count += 1
        return True

    def release(self) -> None:
        """Release one acquisition."""
        self._count -= 1
        if not self._count:
            super().release()

    def let_go(self) -> int:
        """Release the lock completely; return the number of acquisitions."""
        count, self._count = self._count, 1
        self.release()
        return count

    def take_again(self, count: int) -> None:
        """Acquire the lock as many times as before."""
        self.acquire()
        self._count = count


class Condition:
    """Replaces ``threading.Condition``. It uses `lock`, or by default a new lock."""

    def __init__(self, world: VirtualWorld, lock: Lock | None = None) -> None:
        self._world = world
        self._lock = RLock(world) if lock is None else lock
        self._waiting: deque[Thread] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification; return False after the timeout."""
        me = self._world.current
        end_s = None if timeout is None else self._world.time_s + timeout
        self._waiting.append(me)
        count = self._lock.let_go()
        try:
            while me in self._waiting:
                if end_s is not None and self._world.time_s >= end_s:
                    return False
                self._world.block(None if end_s is None else end_s - self._world.time_s)
            return True
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            self._lock.take_again(count)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until the predicate is true or the timeout has passed; return its value."""
        end_s = None if timeout is None else self._world.time_s + timeout
        while not (found := predicate()):
            if end_s is not None and self._world.time_s >= end_s:
                break
            self.wait(None if end_s is None else end_s - self._world.time_s)
        return found

    def notify(self, n: int = 1) -> None:
        """Wake `n` waiting threads."""
        for _ in range(min(n, len(self._waiting))):
            self._world.wake(self._waiting.popleft())

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        self.notify(len(self._waiting))


class Event:
    """Replaces ``threading.Event``."""

    def __init__(self, world: VirtualWorld) -> None:
        self._changed = Condition(world)
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._is_set

    def set(self) -> None:
        """Set the event, and wake all waiting threads."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Clear the event."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set; return False after the timeout."""
        with self._changed:
            return bool(self._changed.wait_for(self.is_set, timeout))


class ProductThread:
    """Replaces ``threading.Thread``. The thread belongs to the process that creates it."""

    def __init__(
        self,
        world: VirtualWorld,
        target: Callable[..., None],
        name: str,
        arguments: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._world = world
        self.name = name
        self.thread = Thread(world.current.process, lambda: target(*arguments, **kwargs), name)

    def start(self) -> None:
        """Start it."""
        self.thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended or the timeout has passed."""
        end_s = None if timeout is None else self._world.time_s + timeout
        while not self.thread.is_over and (end_s is None or self._world.time_s < end_s):
            self.thread.ended.append(self._world.current)
            self._world.block(None if end_s is None else end_s - self._world.time_s)

    def is_alive(self) -> bool:
        """Return whether the thread has not ended."""
        return not self.thread.is_over

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProductThread) and other.thread is self.thread

    def __hash__(self) -> int:
        return self.thread.number


class Threading:
    """Replaces the module `threading`."""

    ExceptHookArgs = threading.ExceptHookArgs
    _world: VirtualWorld

    def __init__(self, world: VirtualWorld) -> None:
        object.__setattr__(self, "_world", world)

    def Lock(self) -> Lock:  # noqa: N802
        """Return a lock."""
        return Lock(self._world)

    def RLock(self) -> RLock:  # noqa: N802
        """Return a reentrant lock."""
        return RLock(self._world)

    def Condition(self, lock: Any = None) -> Condition:  # noqa: N802
        """Return a condition."""
        return Condition(self._world, lock)

    def Event(self) -> Event:  # noqa: N802
        """Return an event."""
        return Event(self._world)

    def Thread(  # noqa: N802
        self, *, target: Callable[..., None], name: str = "thread", args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None, daemon: bool = False,
    ) -> ProductThread:  # fmt: skip
        """Return a new thread of the running process."""
        return ProductThread(self._world, target, name, args, kwargs or {})

    def current_thread(self) -> ProductThread:
        """Return the running thread."""
        found = ProductThread(self._world, lambda: None, self._world.current.name, (), {})
        found.thread = self._world.current
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "excepthook":
            raise AttributeError(name)

        def hook(error: BaseException) -> None:
            value(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))

        self._world.current.process.hook = hook


class VirtualTime:
    """Replaces the module `time`: all clocks return the virtual time."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self.sleep = world.sleep

    def monotonic(self) -> float:
        """Return the virtual time."""
        return self._world.time_s

    perf_counter = thread_time = process_time = time = monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Numbers:
    """Replaces the modules `random` and `secrets`: all numbers depend on the world's seed."""

    def __init__(self, world: VirtualWorld) -> None:
        self._random = world.random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._random, name) if hasattr(self._random, name) else getattr(secrets, name)

    def SystemRandom(self) -> Random:  # noqa: N802
        """Return the world's generator of random numbers."""
        return self._random

    def randbits(self, bits: int) -> int:
        """Return a random number of `bits` bits."""
        return self._random.getrandbits(bits)

    def token_bytes(self, size: int = 32) -> bytes:
        """Return random bytes."""
        return self._random.randbytes(size)

    def token_hex(self, size: int = 32) -> str:
        """Return random bytes as a hexadecimal text."""
        return self._random.randbytes(size).hex()


class VirtualFuture(concurrent.futures.Future[Any]):
    """A future for which threads of the world can wait."""

    def __init__(self, world: VirtualWorld) -> None:
        super().__init__()
        self._condition = Condition(world)  # type: ignore[assignment]


class Executor:
    """Replaces ``ThreadPoolExecutor``. Each call runs in a new thread, after a delay."""

    def __init__(self, world: VirtualWorld, delay: Callable[[], float]) -> None:
        self._world = world
        self._delay = delay
        self._process = world.current.process
        self._is_shut = False
        self._futures: list[VirtualFuture] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **kwargs: Any) -> VirtualFuture:
        """Schedule a call; return its future."""
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = VirtualFuture(self._world)
        self._futures.append(future)

        def run() -> None:
            self._world.sleep(self._delay())
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments, **kwargs)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        Thread(self._process, run, f"{self._process.name}/{getattr(function, '__name__', 'call')}").start()
        return future

    def map(self, function: Callable[..., Any], *iterables: Any) -> list[Any]:
        """Call a function for each element of the iterables; return the results."""
        futures = [self.submit(function, *arguments) for arguments in zip(*iterables, strict=False)]
        return [future.result() for future in futures]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls."""
        self._is_shut = True
        for future in self._futures:
            if cancel_futures:
                future.cancel()
            if wait:
                concurrent.futures.Future.exception(future) if not future.cancelled() else None

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

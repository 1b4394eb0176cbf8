"""Run the socket I/O of sends and receives in a waiting thread, or in a background thread if no thread waits.

Waking another thread takes more time than sending a small message, so a thread that waits for a message runs the
selector loop itself (leader and followers, Schmidt et al. 2000). The start of a receive does not start the background
thread. Otherwise each wait would take the loop over from the background thread, and a step with 16 messages of 16 KB
would take 18 ms instead of 10 ms. Between two processes over Unix sockets on two cores, round trips of 8 bytes and 1 MB
take 24 and 162 µs. If the background thread always ran the loop, they would take 143 and 447 µs.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from paceline.errors import GroupClosedError
from paceline.transport.spinning import Spinner

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_Select: TypeAlias = Callable[[float | None], list[tuple[selectors.SelectorKey, int]]]
_PARKED_S = 0.02
_RECENT_S = 0.005
"""The time for which the background thread stays idle after the last wait, because another wait probably follows."""


class Watched(ABC):
    """A socket that the loop watches. The loop calls its methods with the lock held."""

    connected: socket.socket

    @abstractmethod
    def ready(self, events: int) -> None:
        """Send or receive the bytes that the socket accepts or has now. The method must not wait or raise an error."""


class Waitable:
    """An operation for which threads can wait. A thread must hold the loop's lock to set `finished`."""

    finished = False


class ProgressLoop:
    """A selector loop that one thread at a time (the leader) runs.

    ``lock`` protects the loop and the data of its users.
    """

    def __init__(self, is_sending: Callable[[], bool]) -> None:
        """``is_sending`` returns whether unsent bytes remain. The loop calls it with the lock held."""
        self.lock = threading.Lock()
        self.is_closed = False
        self._cause = "closed"
        self._is_sending = is_sending
        self._changed = threading.Condition(self.lock)
        self._has_leader = False
        self._is_selecting = False
        self._is_in_background = False
        self._is_woken = False
        self._num_waiting = 0
        self._last_wait = 0.0
        self._selector = selectors.DefaultSelector()
        self._spinner = Spinner()
        self._wanted: dict[Watched, int] = {}
        self._stale: set[Watched] = set()
        self._waker, self._wakened = socket.socketpair()
        for end in (self._waker, self._wakened):
            end.setblocking(False)
        self._selector.register(self._wakened, READ)
        self._resume = threading.Event()
        self._thread: threading.Thread | None = None

    # The caller of the following methods must hold the lock.

    def start(self) -> None:
        if self._thread is None and not self.is_closed:
            self._thread = threading.Thread(target=self._run, name="paceline-progress", daemon=True)
            self._thread.start()

    def watch(self, watched: Watched, events: int) -> None:
        """Call ``watched.ready`` whenever one of ``events`` occurs. With 0 events, it is not called."""
        if self._wanted.get(watched, 0) == events:
            return
        self._wanted[watched] = events
        self._stale.add(watched)
        if self._is_selecting:
            self.kick()
        else:
            self._apply()

    def unwatch(self, watched: Watched) -> None:
        # This thread may remove the socket while the leader is in select(). epoll and kqueue allow this, and the leader
        # skips removed sockets.
        self._wanted.pop(watched, None)
        self._stale.discard(watched)
        if not self.is_closed and watched.connected in self._selector.get_map():
            self._selector.unregister(watched.connected)

    def kick(self) -> None:
        """Wake the leader to apply changes of the watched sockets.

        If no thread leads or waits, wake the background thread, which may become the leader.
        """
        if self._is_selecting:
            if not self._is_woken:
                self._is_woken = True
                self._waker.send(b"\0")
        elif not self._num_waiting:
            self._resume.set()

    def notify(self) -> None:
        """Wake waiting threads, after a thread outside the loop has finished an operation."""
        if self._num_waiting:
            self._changed.notify_all()
            self.kick()

    # The caller of the following methods must not hold the lock.

    def wait(self, operation: Waitable, deadline: float) -> bool:
        """Wait for ``operation``, and return whether it finished before the deadline.

        The waiting thread runs the loop if no other thread runs it.
        """
        with self.lock:
            self._num_waiting += 1
            if self._is_in_background:
                self.kick()
            try:
                while not operation.finished:
                    if self.is_closed:
                        raise GroupClosedError(f"the group was {self._cause} while a message was pending")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    if self._has_leader:
                        self._changed.wait(left)
                    else:
                        self._lead(left, self._spin_and_select)
            finally:
                self._num_waiting -= 1
                self._last_wait = time.monotonic()
                if not self._num_waiting and self._is_sending():
                    self._resume.set()
        return True

    def close(self, cause: str = "closed") -> None:
        """Stop the loop. Waiting threads raise GroupClosedError, whose text contains `cause`. Idempotent."""
        with self.lock:
            if self.is_closed:
                return
            self._cause = cause
            self.kick()
            self.is_closed = True
            self._resume.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._has_leader)
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        self._waker.close()
        self._wakened.close()

    def _spin_and_select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        # Spinner.wait would spin longer than Spinner.poll, without a measured benefit.
        return self._spinner.poll(self._selector.select) or self._selector.select(timeout)

    def _lead(self, timeout: float | None, select: _Select) -> None:
        """Run one round of the loop. The thread releases the lock only during the select."""
        self._has_leader = True
        try:
            self._is_selecting = True
            self.lock.release()
            try:
                found = select(timeout)
            finally:
                self.lock.acquire()
                self._is_selecting = False
            for key, events in found:
                if key.fileobj is self._wakened:
                    self._wakened.recv(64)
                    self._is_woken = False
                elif self._wanted.get(key.data, 0) & events:
                    key.data.ready(events & self._wanted[key.data])
            if self._stale:
                self._apply()
        finally:
            self._has_leader = False
            self._changed.notify_all()

    def _apply(self) -> None:
        registered = self._selector.get_map()
        for watched in self._stale:
            events = self._wanted.get(watched, 0)
            if watched.connected not in registered:
                if events:
                    self._selector.register(watched.connected, events, watched)
            elif events:
                self._selector.modify(watched.connected, events, watched)
            else:
                self._selector.unregister(watched.connected)
        self._stale.clear()

    def _run(self) -> None:
        while True:
            with self.lock:
                if self.is_closed:
                    return
                is_free = not (self._num_waiting or self._has_leader)
                if is_free and (self._is_sending() or time.monotonic() - self._last_wait > _RECENT_S):
                    self._is_in_background = True
                    try:
                        self._lead(None, self._selector.select)
                    finally:
                        self._is_in_background = False
                    continue
            self._resume.wait(_PARKED_S)
            self._resume.clear()

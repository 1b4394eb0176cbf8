"""The caller's end of a connection, which sends numbered calls and receives their replies in any order.

To avoid a thread switch, a thread that waits for a result reads the connection itself. It passes the replies to other
calls to the threads that wait for them. Only one thread reads at a time. If calls are pending but no thread waits,
:class:`Standby` assigns a thread that reads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.errors import ConnectionLostError, DeadlineError, PacelineError, ProtocolError, UsageError, printable
from paceline.rpc.futures import Future, left_until
from paceline.rpc.wire.framed_socket import FramedSocket, Received
from paceline.transport import Buffer

_TICK_S = 0.1


class PendingReply(Future[Any]):
    """The future of a remote call. The thread that waits for the future reads the connection."""

    def __init__(self, end: CallerEnd, description: str, deadline: float, timeout_s: float) -> None:
        super().__init__()
        self.description, self.deadline, self.timeout_s = description, deadline, timeout_s
        self.creation: Future[Any] | None = None
        """The reply to the call that created this call's object; None if another process created the object."""
        self._end = end

    def cause_of(self, error: PacelineError) -> BaseException:
        """Return the exception that the future raises for `error`.

        If the call failed because the creation of its object had failed, return the exception of the creation.
        """
        cause = self.creation.exception() if self.creation is not None and isinstance(error, UsageError) else None
        return cause or error

    def wait_until(self, deadline: float | None) -> bool:
        self._end.wait(self, self.deadline if deadline is None else min(deadline, self.deadline))
        return self._is_done


class ReplyReader(Protocol):
    """An object that decodes replies, and runs the callbacks of futures."""

    def read_reply(
        self, end: CallerEnd, reply: PendingReply, received: Received
    ) -> tuple[Any, BaseException | None]: ...

    def run_callbacks_of(self, future: Future[Any]) -> None: ...


class CallerEnd:
    """The caller's end of the connection to one other worker. Thread-safe."""

    def __init__(self, framed: FramedSocket, rank: int, reader: ReplyReader) -> None:
        self.rank = rank
        self.name = framed.name
        self.failure: PacelineError | None = None
        self.free_since = 0.0
        """The time at which the last reading thread stopped. :class:`Standby` assigns a new reader some time later."""
        self.has_own_reader = False
        """Whether a thread that :class:`Standby` assigned reads the connection."""
        self._framed = framed
        self._reader = reader
        self._counting = threading.Lock()
        self._pending: dict[int, PendingReply] = {}
        self._reading = threading.Lock()
        self._blocked: set[PendingReply] = set()
        self._is_watched = False
        self.num_sent = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending) - self._is_watched

    @property
    def is_read(self) -> bool:
        return self._reading.locked()

    @property
    def is_unattended(self) -> bool:
        return bool(self._pending) and not self.has_own_reader

    def start(
        self,
        kind: int,
        meta: Buffer,
        body: Sequence[Buffer],
        *,
        description: str,
        timeout_s: float,
        context: int = 0,
        message: int = 0,
        creation: Future[Any] | None = None,
    ) -> PendingReply:
        """Send a call and return the future of its result. Raises ConnectionLostError or DeadlineError."""
        deadline = time.monotonic() + timeout_s
        reply = PendingReply(self, description, deadline, timeout_s)
        reply.creation = creation
        number = self._count() & 0xFFFFFFFF
        self._pending[number] = reply
        try:
            if self.failure is not None:
                raise self.failure
            self._framed.send(kind, meta, body, deadline=deadline, request=number, context=context, message=message)
        except (ConnectionLostError, DeadlineError) as error:
            self._pending.pop(number, None)
            self.fail(error)
            raise self.failure or error from None
        except BaseException:
            self._pending.pop(number, None)
            raise
        return reply

    def watch(self, kind: int) -> PendingReply | None:
        """Return a future that fails when the other worker dies. Only the first call returns it; others return None."""
        if self._is_watched:
            return None
        self._is_watched = True
        return self.start(kind, b"", (), description="a watch request", timeout_s=math.inf)

    def notify(self, kind: int, meta: Buffer, timeout_s: float) -> None:
        self._count()
        self._framed.send(kind, meta, deadline=time.monotonic() + timeout_s)

    def _count(self) -> int:
        with self._counting:
            self.num_sent += 1
            return self.num_sent

    def wait(self, reply: PendingReply, deadline: float) -> None:
        """Wait until the reply has arrived or `deadline` passes.

        At the call's own deadline, it fails (DeadlineError).
        """
        while not reply.done():
            if self._reading.acquire(blocking=False):
                self._read_until(reply, deadline)
            else:
                self._block(reply, deadline)
            if not reply.done():
                time_s = time.monotonic()
                if time_s >= reply.deadline:
                    self._expire(reply)
                elif time_s >= deadline:
                    return

    def _block(self, reply: PendingReply, deadline: float) -> None:
        waiter = reply.add_waiter()
        if waiter is None:
            return
        self._blocked.add(reply)
        # The last reading thread may have looked for a successor just before this thread was added. So try again to
        # become the reading thread.
        if self._reading.acquire(blocking=False):
            self._blocked.discard(reply)
            self._read_until(reply, deadline)
        else:
            waiter.acquire(timeout=left_until(deadline))
            self._blocked.discard(reply)

    def _read_until(self, reply: PendingReply, deadline: float) -> None:
        """Read until the reply has arrived or the deadline passes, then let another waiting thread read.

        The caller must hold the lock `_reading`, which this method releases.
        """
        try:
            while not reply.done():
                left = deadline - time.monotonic()
                if left <= 0 or not self._framed.wait_readable(left):
                    break
                self._deliver(self._framed.receive())
        except Exception as error:
            self.fail(unreadable(self.name, error))
        finally:
            self._stop_reading()

    def read_on(self) -> None:
        """Read replies until no call is pending. A thread that :class:`Standby` has assigned calls this method."""
        if not self._reading.acquire(blocking=False):
            return
        self.has_own_reader = True
        try:
            while self._pending:
                if self._framed.wait_readable(_TICK_S, spin=False):
                    self._deliver(self._framed.receive())
                else:
                    self.expire_late()
        except Exception as error:
            self.fail(unreadable(self.name, error))
        finally:
            self.has_own_reader = False
            self._stop_reading()

    def _stop_reading(self) -> None:
        self.free_since = time.monotonic()
        self._reading.release()
        if self.failure is not None:
            self._release_descriptor()
        if self._blocked:
            self._wake_one()

    def _release_descriptor(self) -> None:
        """Close the socket's descriptor if no thread reads; otherwise the reading thread closes it later."""
        if self._reading.acquire(blocking=False):
            self._framed.release()

    def expire_late(self) -> None:
        time_s = time.monotonic()
        for reply in list(self._pending.values()):
            if time_s >= reply.deadline:
                self._expire(reply)

    def _deliver(self, received: Received) -> None:
        reply = self._pending.get(received.header.request)
        if reply is None:
            reply = PendingReply(self, "a call that has timed out", 0.0, 0.0)
        result, error = self._reader.read_reply(self, reply, received)
        self._pending.pop(received.header.request, None)
        self._set_outcome(reply, result, error)

    def _set_outcome(self, reply: PendingReply, result: Any, error: BaseException | None) -> None:
        if reply.set_outcome(result, error) and reply.has_callbacks:
            self._reader.run_callbacks_of(reply)

    def _expire(self, reply: PendingReply) -> None:
        for number, candidate in list(self._pending.items()):
            if candidate is reply:
                self._pending.pop(number, None)
        late = DeadlineError(f"{self.name} has not answered {reply.description} within {reply.timeout_s:g} s")
        self._set_outcome(reply, None, late)

    def _wake_one(self) -> None:
        for reply in list(self._blocked):
            if reply.wake_one():
                return

    def fail(self, error: PacelineError) -> None:
        """Fail all pending calls because of `error`, and refuse later calls. Idempotent."""
        if self.failure is None:
            self.failure = ConnectionLostError(f"{self.name} died or left ({error})")
        self._framed.close()
        while self._pending:
            try:
                _, reply = self._pending.popitem()
            except KeyError:
                break
            lost = ConnectionLostError(f"{self.name} died or left before it answered {reply.description} ({error})")
            self._set_outcome(reply, None, lost)
        self._release_descriptor()


def unreadable(name: str, error: Exception) -> PacelineError:
    """Return the error with which a connection ends after `error`. An exception from outside Paceline means that the
    received data was malformed.
    """
    if isinstance(error, PacelineError):
        return error
    text = printable(f"{type(error).__name__}: {error}", 300)
    return ProtocolError(f"{name} sent unreadable data ({text})")

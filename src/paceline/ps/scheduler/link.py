"""A process's link to the scheduler: one connection for calls, notices and heartbeats, with its own thread.

The link reconnects after a break (:mod:`paceline.protocol.scheduler.numbered_messages`). If another scheduler replaces
a dead scheduler at the same address, the link rejoins with this process's record (:mod:`~paceline.ps.scheduler.calls`)
and repeats the calls without an answer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from paceline.errors import (
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    PeerError,
    UsageError,
    VersionError,
)
from paceline.protocol.scheduler.member_state import MemberState
from paceline.protocol.scheduler.numbered_messages import SentMessage
from paceline.ps import messages
from paceline.ps.forked import own
from paceline.ps.messages import NOTICE, KnownTable, View
from paceline.ps.scheduler.calls import Answer, SchedulerCalls
from paceline.ps.scheduler.processes import own_process
from paceline.transport import Address, Endpoint, Hello, Transport, read_meta
from paceline.transport.backoff import Backoff

_SHORTEST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.25
_LASTING_S: Final = 1.0
"""If a connection has existed for this time, the scheduler has accepted it."""
_ELSEWHERE_PAUSE_S: Final = 2.0
"""The pause between attempts while the scheduler of another cluster has the address."""


class Reconnection:
    """The reconnection attempts of one process. The attempts end `patience_s` after the first failure in a series."""

    def __init__(self, patience_s: float, time_s: float) -> None:
        self.patience_s = patience_s
        self._connected_s = time_s
        self._refused_since_s: float | None = None
        self._backoff = Backoff(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, spread=0.5)

    def lost(self, time_s: float, heartbeat_s: float) -> float:
        """Record that the connection broke; return the pause before the first attempt."""
        # Many members lose their scheduler at the same moment, so their pauses vary at random.
        longest_s = min(_LONGEST_PAUSE_S, max(heartbeat_s, _SHORTEST_PAUSE_S))
        self._backoff = Backoff(_SHORTEST_PAUSE_S, longest_s, spread=0.5)
        if self._refused_since_s is None or time_s > self._connected_s + _LASTING_S:
            self._refused_since_s = time_s
            return 0.0
        return _SHORTEST_PAUSE_S

    def remaining_s(self, time_s: float) -> float:
        assert self._refused_since_s is not None
        return self._refused_since_s + self.patience_s - time_s

    def connected(self, time_s: float) -> None:
        """Record that a process listens at the scheduler's address."""
        self._connected_s = time_s

    def resumed(self) -> None:
        """Record that the scheduler has welcomed this member again."""
        self._refused_since_s = None

    def pause_s(self, time_s: float, *, is_elsewhere: bool) -> float:
        if is_elsewhere:
            self._backoff = Backoff(_ELSEWHERE_PAUSE_S, _ELSEWHERE_PAUSE_S, spread=0.5)
        return self._backoff.next_s(self.remaining_s(time_s))


_CONNECT_S = 10.0
_FAREWELL_S = 1.0  # how long to wait until the scheduler has read Leave
_Result = TypeVar("_Result")
_WELCOME: Any = messages.Welcome[Endpoint, messages.ClusterSettings]
_ANSWER: Any = _WELCOME | messages.Elsewhere


@dataclass(slots=True)
class LinkHooks:
    """Callbacks of a link, called in its thread."""

    on_notice: Callable[[msgspec.Struct], None] = lambda notice: None
    """Called with each view, and with the notice of the cluster's end or of this member's expulsion."""
    on_lost: Callable[[PacelineError], None] = lambda reason: None
    """Called once if the link reaches no scheduler in time."""
    tables: Callable[[], Sequence[KnownTable]] | None = None
    """A server's function that returns its tables for a Rejoin.

    Without it, the Rejoin has the tables that this process declared.
    """
    unreachable: Callable[[], tuple[int, ...]] = lambda: ()
    is_well: Callable[[], bool] = lambda: True
    on_beat: Callable[[], None] = lambda: None


class SchedulerLink:
    """Link to the scheduler. Any thread may call it; its own thread passes the scheduler's notices to the hooks.

    After a lost connection the link tries for `reconnect_s` to reach a scheduler at the same address. A member's calls
    are executed once; calls of a process that is not a member may be executed twice. :class:`LinkHooks` describes the
    callbacks.
    """

    def __init__(
        self,
        transport: Transport,
        address: Address | str,
        hello: Hello,
        *,
        timeout_s: float = 60.0,
        reconnect_s: float = 60.0,
        hooks: LinkHooks | None = None,
    ) -> None:
        self.hello = msgspec.structs.replace(hello, to="scheduler")
        self.address = address
        self.transport = transport
        self.hooks = LinkHooks() if hooks is None else hooks
        self.reconnections = 0
        self.num_replacements = 0
        """The number of times that a new scheduler has replaced the former scheduler."""
        self.state = MemberState()
        self._timeout_s = timeout_s
        self.calls = SchedulerCalls(transport.connect(address, self.hello, timeout_s=min(timeout_s, _CONNECT_S)))
        self._reconnection = Reconnection(reconnect_s, time.monotonic())
        self.is_closing = False
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="paceline-scheduler-link", daemon=True)
        own(self)
        self.thread.start()

    def call(
        self,
        message: msgspec.Struct,
        result: type[_Result] | Any = None,
        *,
        body: Sequence[Any] = (),
        timeout_s: float | None = None,
    ) -> Any:
        """Send a message and return its answer, decoded as `result`. Raises the scheduler's error."""
        return self.call_with_body(message, result, body=body, timeout_s=timeout_s)[0]

    def call_with_body(
        self,
        message: msgspec.Struct,
        result: Any = None,
        *,
        body: Sequence[Any] = (),
        timeout_s: float | None = None,
    ) -> tuple[Any, memoryview]:
        """Send a message like :meth:`call`. Return the decoded answer, and the bytes that follow the answer."""
        return self._finish(self.calls.send(message, tuple(body), Future()), result, timeout_s)

    def start(self, message: msgspec.Struct, result: type[_Result]) -> Callable[[], _Result]:
        """Send a message; return a function that waits for the answer like :meth:`call`."""
        sent = self.calls.send(message, (), Future())

        def finish() -> _Result:
            answer: _Result = self._finish(sent, result, None)[0]
            return answer

        return finish

    def notify(self, message: msgspec.Struct) -> None:
        if isinstance(message, messages.Drain):
            self.state.is_leaving = True
        self.calls.send(message)

    def _finish(self, sent: SentMessage, result: Any, timeout_s: float | None) -> tuple[Any, memoryview]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        answer: Answer = sent.answer
        try:
            meta, data = answer.result(timeout_s if math.isfinite(timeout_s) else None)
        except TimeoutError:
            self.calls.take(sent.number)
            if not self.calls.is_connected and self.state.registration is None:
                raise self._lost_error() from None
            raise DeadlineError(
                f"the scheduler at {self.address} did not answer {type(sent.content).__name__} within {timeout_s:g} s"
            ) from None
        return read_meta(meta, Any if result is None else result, "an answer of the scheduler"), data

    def register(self, message: messages.Register, *, timeout_s: float | None = None) -> messages.Welcome:
        """Join the cluster; wait for its servers. Raises DeadlineError if the servers do not register in time."""
        message = msgspec.structs.replace(message, process=own_process())
        self.state.registration = message
        waits_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            welcome: messages.Welcome = self.call(message, _WELCOME, timeout_s=waits_s)
        except DeadlineError:
            self.state.registration = None
            found = self.get_view()
            raise DeadlineError(
                f"{found.num_waiting} servers have joined within {waits_s:g} s, and the scheduler expects more: start "
                "them with 'paceline server', or start the scheduler with fewer --servers"
            ) from None
        except BaseException:
            self.state.registration = None
            raise
        return welcome

    def get_view(self, timeout_s: float | None = None) -> View:
        """Return the current members and the committed chains."""
        view: View = self.call(messages.GetView(), View[Endpoint], timeout_s=timeout_s)
        return view

    def disown(self) -> None:
        self.calls.disown()
        self.is_closing = True

    def close(self) -> None:
        """Leave the cluster and end the thread. Idempotent."""
        if not self.is_closing:
            self.is_closing = True
            self._closed.set()
            self.calls.leave(UsageError("this client is closed: connect again"))
            # Wait until the scheduler has read Leave and closes the connection. If this end closed the connection with
            # unread data or during a write of the scheduler, Leave could be lost, and other members would wait until
            # the heartbeat timeout.
            try:
                if threading.current_thread() is not self.thread:
                    self.thread.join(_FAREWELL_S)
            finally:
                self.calls.channel.close()
        if threading.current_thread() is not self.thread:
            self.thread.join(10.0)

    @property
    def view(self) -> View | None:
        """The newest view; None before the first."""
        return self.state.views.committed

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except (PacelineError, OSError, ValueError) as error:
                lost: PacelineError | None = self._lost_error()
                if isinstance(error, PeerError) and not isinstance(error, ConnectionLostError):
                    lost = error  # this error is the reason that the live scheduler has sent
                elif self._reconnection.patience_s > 0 and not (self.is_closing or self.state.is_over):
                    lost = self._reconnect()
                if lost is not None:
                    self._fail(lost)
                    return
            except BaseException as error:
                self._fail(
                    PeerError(
                        f"the link to the scheduler at {self.address} has failed ({type(error).__name__}: {error}), "
                        "and this process cannot continue without it; please report this"
                    )
                )
                raise

    def _listen(self) -> None:
        next_beat = time.monotonic() + self.state.heartbeat_s
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self.state.heartbeat_s
                self.hooks.on_beat()
                try:
                    if self.hooks.is_well():
                        self.notify(messages.Heartbeat(unreachable=self.hooks.unreachable()))
                except UsageError:
                    if not self.is_closing:
                        raise
                    # Leave is sent already, so wait until the scheduler closes the connection.
            if self.calls.channel.poll(min(self.state.heartbeat_s, max(next_beat - now, 0.0))):
                self._receive()

    def _receive(self) -> None:
        channel = self.calls.channel
        channel.last_header = None
        try:
            frame = channel.receive_frame(self._timeout_s)
        except PacelineError as error:
            header = channel.error_header()
            if header is None:
                raise
            refused = self.calls.take(header.request)
            if refused is not None:
                refused.answer.set_exception(error)
            return
        call = self.calls.received(frame)
        if frame.header.kind == NOTICE:
            self._take_notice(messages.decode_notice(frame.meta))
        elif call is not None:
            if isinstance(call.content, messages.Register):  # changes of this view may follow immediately
                welcome = read_meta(frame.meta, _WELCOME, "a welcome")
                self.calls.joined(welcome.incarnation)
                self._take_view(self.state.welcomed(welcome))
            self.calls.answered(call.content, frame.meta)
            call.answer.set_result((frame.meta, frame.body))

    def _take_notice(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.JobNews):
            self.calls.merge_news(notice.record)
            return
        view, answer = self.state.take(notice)
        self._take_view(view)
        if answer is not None:
            self.calls.send_once(answer)
        if isinstance(notice, messages.Ended | messages.Expelled):
            self.hooks.on_notice(notice)

    def _take_view(self, view: View | None) -> None:
        if view is not None:
            self.hooks.on_notice(view)

    def _reconnect(self) -> PacelineError | None:
        """Reconnect to the same scheduler or its replacement; return the reason of a failure."""
        retry = self._reconnection
        self.calls.disconnected()
        self._closed.wait(retry.lost(time.monotonic(), self.state.heartbeat_s))
        while not self.is_closing and not self.state.is_over:
            remaining_s = retry.remaining_s(time.monotonic())
            if remaining_s <= 0:
                return self._lost_error(retry.patience_s)
            is_elsewhere = False
            try:
                is_elsewhere = not self._resume(min(remaining_s, _CONNECT_S))
                if not is_elsewhere:
                    return None
            except (ConnectionLostError, DeadlineError, AuthenticationError, VersionError, _NoSchedulerError, OSError):
                pass  # try again: the connection is lost, or another program listens at the address
            except PacelineError as refusal:
                return refusal  # the scheduler has rejected this process
            self.calls.channel.close()
            self._closed.wait(retry.pause_s(time.monotonic(), is_elsewhere=is_elsewhere))
        return self._lost_error()

    def _resume(self, timeout_s: float) -> bool:
        """Connect, rejoin and repeat messages; return False if the scheduler leads another cluster."""
        try:
            channel = self.transport.connect(self.address, self.hello, timeout_s=timeout_s)
        except (AuthenticationError, VersionError):
            raise
        except PacelineError:
            raise _NoSchedulerError from None
        self._reconnection.connected(time.monotonic())
        if self.state.welcome is None:  # without a welcome, this process is not a member yet: it registers again
            self.calls.register_again(channel, self.state.views.highest_term)
            return True
        tables = self.calls.tables() if self.hooks.tables is None else self.hooks.tables()
        rejoining = self.calls.rejoin(channel, lambda job: self.state.rejoin(tables, job))
        answer: Answer = rejoining.answer
        try:
            while not answer.done():
                if not channel.poll(self.state.heartbeat_s):
                    self.calls.send_once(messages.Heartbeat())
                    continue
                self._receive()
                if self.state.is_released:
                    raise self._lost_error()
        finally:
            # Do not repeat this Rejoin, because the next connection sends a new Rejoin.
            self.calls.take(rejoining.number)
        welcome = read_meta(answer.result()[0], _ANSWER, "a welcome")
        if isinstance(welcome, messages.Elsewhere):
            return False
        self.num_replacements += self.view is not None and welcome.view.term != self.view.term
        self._take_view(self.state.welcomed(welcome))
        self.calls.send_again(welcome.received)
        self.reconnections += 1
        self._reconnection.resumed()
        return True

    def _fail(self, error: PacelineError) -> None:
        is_closing, lost = self.is_closing, self.calls.fail(error)
        if not is_closing:
            self.hooks.on_lost(lost)

    def _lost_error(self, waited_s: float = 0.0) -> ConnectionLostError:
        if self.state.is_released:
            return ConnectionLostError(f"the scheduler at {self.address} has ended, as requested")
        tried = f", and no other one replaced it within {waited_s:g} s" if waited_s else ""
        return ConnectionLostError(
            f"the scheduler at {self.address} is lost{tried}: this process cannot continue without it"
        )


class _NoSchedulerError(Exception):
    """No process listens at the scheduler's address."""

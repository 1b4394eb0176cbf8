"""A process's line to the scheduler: calls, news and heartbeats on one connection, kept by a thread of its own.

The connection may break: the line connects again and goes on where it was (:mod:`paceline.ps.scheduler.sessions`). The
scheduler may die and another come in its place, at the same address: the line tells the new one who this process is and
what it remembers (:mod:`~paceline.ps.scheduler.memory`), and what waits for an answer is asked again. Whoever uses the
line notices a pause.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

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
from paceline.protocol.scheduler.line import SentMessage
from paceline.protocol.scheduler.member_state import MemberState
from paceline.ps import messages
from paceline.ps.forked import own
from paceline.ps.messages import NOTICE, KnownTable, View
from paceline.ps.scheduler.calls import CallLine
from paceline.ps.scheduler.memory import Memory
from paceline.ps.scheduler.outgoing import Answer, Content
from paceline.ps.scheduler.processes import own_process
from paceline.ps.scheduler.reconnection import Reconnection
from paceline.transport import Address, Endpoint, Hello, Transport, read_meta

_CONNECT_S = 10.0
_FAREWELL_S = 1.0  # how long the scheduler has to take a farewell
_Result = TypeVar("_Result")
_WELCOME: Any = messages.Welcome[Endpoint, messages.ClusterSettings]
_ANSWER: Any = _WELCOME | messages.Elsewhere


@dataclass(slots=True)
class LinkHooks:
    """What a process wants to hear of its link, and says by it; called in the link's thread."""

    on_notice: Callable[[msgspec.Struct], None] = lambda notice: None
    on_lost: Callable[[PacelineError], None] = lambda reason: None
    """No scheduler came in time; called once."""
    on_view: Callable[[View], None] = lambda view: None
    """Called with every view of the cluster."""
    tables: Callable[[], Sequence[KnownTable]] | None = None
    """What tables a server holds; without it those count that the process has declared."""
    unreachable: Callable[[], tuple[int, ...]] = lambda: ()
    """Which other servers a server cannot reach."""
    is_well: Callable[[], bool] = lambda: True
    """Whether it may give signs of life."""
    on_beat: Callable[[], None] = lambda: None
    """Called at every heartbeat."""


class SchedulerLink:
    """Calls to the scheduler from any thread; its notices are given to `on_notice` in the link's own thread.

    A process that loses the connection without :meth:`close` tries for `reconnect_s` to reach a scheduler at the same
    address. What a member has asked is answered once; before it registers, what it has asked is asked again. In the
    link's thread `tables` says what tables a server holds, `unreachable` which other servers it cannot reach, and
    `is_well` whether it may give signs of life. If no scheduler comes, `on_lost` is called there, once. `on_view` is
    called with every view of the cluster, there or where one registers; `on_beat` at every heartbeat.
    """

    def __init__(
        self,
        transport: Transport,
        address: Address | str,
        hello: Hello,
        *,
        timeout_s: float = 60.0,
        reconnect_s: float = 60.0,
        on_notice: Callable[[msgspec.Struct], None] | None = None,
        on_lost: Callable[[PacelineError], None] | None = None,
        on_view: Callable[[View], None] | None = None,
        tables: Callable[[], Sequence[KnownTable]] | None = None,
        unreachable: Callable[[], tuple[int, ...]] = lambda: (),
        is_well: Callable[[], bool] = lambda: True,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.hello = msgspec.structs.replace(hello, to="scheduler")
        self.address = address
        self.transport = transport
        self.hooks = LinkHooks(
            on_notice or (lambda notice: None),
            on_lost or (lambda reason: None),
            on_view or (lambda view: None),
            tables,
            unreachable,
            is_well,
            on_beat,
        )
        self.reconnections = 0
        """How often a member's connection was made again."""
        self.state = MemberState()
        self._timeout_s = timeout_s
        self._memory = Memory()
        self.line = CallLine(transport.connect(address, self.hello, timeout_s=min(timeout_s, _CONNECT_S)), self._memory)
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
        """Send a message and return its answer, decoded as `result`; raise what the scheduler reported."""
        return self.call_with_body(message, result, body=body, timeout_s=timeout_s)[0]

    def call_with_body(
        self,
        message: msgspec.Struct,
        result: Any = None,
        *,
        body: Sequence[Any] = (),
        timeout_s: float | None = None,
    ) -> tuple[Any, memoryview]:
        """Do as :meth:`call`, and return the body of the answer too."""
        return self._finish(self.line.say(message, tuple(body), Future()), result, timeout_s)

    def start(self, message: msgspec.Struct, result: type[_Result]) -> Callable[[], _Result]:
        """Send a message; return a function that waits for the answer as :meth:`call` does."""
        sent = self.line.say(message, (), Future())

        def finish() -> _Result:
            answer: _Result = self._finish(sent, result, None)[0]
            return answer

        return finish

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message that wants no answer."""
        if isinstance(message, messages.Drain):
            self.state.is_leaving = True
        self.line.say(message)

    def _finish(self, sent: SentMessage, result: Any, timeout_s: float | None) -> tuple[Any, memoryview]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        content: Content = sent.content
        assert content.answer is not None
        try:
            meta, data = content.answer.result(timeout_s if math.isfinite(timeout_s) else None)
        except TimeoutError:
            self.line.take(sent.number)
            if not self.line.is_connected and self.state.registration is None:
                raise self._gone() from None
            raise DeadlineError(
                f"the scheduler at {self.address} did not answer {type(content.struct).__name__} within {timeout_s:g} s"
            ) from None
        return read_meta(meta, Any if result is None else result, "an answer of the scheduler"), data

    # Membership.

    def register(self, message: messages.Register, *, timeout_s: float | None = None) -> messages.Welcome:
        """Join the cluster; wait until its servers are there. Raises DeadlineError if they do not come in time."""
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
        """Return the members of now, and the committed chains."""
        view: View = self.call(messages.GetView(), View[Endpoint], timeout_s=timeout_s)
        return view

    def disown(self) -> None:
        """Leave everything to the parent of this process, which has been forked."""
        self.line.disown()
        self.is_closing = True

    def close(self) -> None:
        """Leave in good order and end the thread. Idempotent."""
        if not self.is_closing:
            self.is_closing = True
            self._closed.set()
            self.line.leave(UsageError("this client is closed: connect again"))
            # The scheduler closes the connection when it has read that. If this end did, with anything unread, or while
            # the scheduler writes, what was said would be lost, and the others would wait out the time-out.
            try:
                if threading.current_thread() is not self.thread:
                    self.thread.join(_FAREWELL_S)
            finally:
                self.line.channel.close()
        if threading.current_thread() is not self.thread:
            self.thread.join(10.0)

    @property
    def view(self) -> View | None:
        """The newest view; None before the first."""
        return self.state.views.committed

    # The link's thread.

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except (PacelineError, OSError, ValueError) as error:
                lost: PacelineError | None = self._gone()
                if isinstance(error, PeerError) and not isinstance(error, ConnectionLostError):
                    lost = error  # the scheduler is there and has said what is wrong
                elif self._reconnection.patience_s > 0 and not (self.is_closing or self.state.is_over):
                    lost = self._come_back()
                if lost is not None:
                    self._fail(lost)
                    return
            except BaseException as error:
                self._fail(
                    PeerError(
                        f"the line to the scheduler at {self.address} has failed ({type(error).__name__}: {error}), "
                        "and this process cannot go on without it; please report this"
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
                        self.tell(messages.Heartbeat(unreachable=self.hooks.unreachable()))
                except UsageError:
                    if not self.is_closing:
                        raise
                    # The farewell was faster: it is for the scheduler to close the connection.
            if self.line.channel.poll(min(self.state.heartbeat_s, max(next_beat - now, 0.0))):
                self._receive()

    def _receive(self) -> None:
        channel = self.line.channel
        channel.last_header = None
        try:
            frame = channel.receive_frame(self._timeout_s)
        except PacelineError as error:
            header = channel.error_header()
            if header is None:
                raise
            refused = self.line.take(header.request)
            if refused is not None and refused.answer is not None:
                refused.answer.set_exception(error)
            return
        call = self.line.received(frame)
        if frame.header.kind == NOTICE:
            self._take_notice(messages.decode_notice(frame.meta))
        elif call is not None:
            if isinstance(call.struct, messages.Register):  # changes of the view may follow at once
                welcome = read_meta(frame.meta, _WELCOME, "a welcome")
                self._memory.joined(welcome.incarnation)
                self._take_view(self.state.welcomed(welcome))
            self._memory.answered(call.struct, frame.meta)
            assert call.answer is not None
            call.answer.set_result((frame.meta, frame.body))

    def _take_notice(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.JobNews):
            self._memory.merge_news(notice.record)
            return
        view, answer = self.state.take(notice)
        self._take_view(view)
        if answer is not None:
            self.line.say_once(answer)
        if isinstance(notice, messages.Ended | messages.Expelled):
            self.hooks.on_notice(notice)

    def _take_view(self, view: View | None) -> None:
        if view is not None:
            self.hooks.on_view(view)
            self.hooks.on_notice(view)

    # When the connection is lost.

    def _come_back(self) -> PacelineError | None:
        """Connect again, to the same scheduler or the one in its place; return why not."""
        retry = self._reconnection
        self.line.disconnected()
        self._closed.wait(retry.lost(time.monotonic(), self.state.heartbeat_s))
        while not self.is_closing and not self.state.is_over:
            remaining_s = retry.remaining_s(time.monotonic())
            if remaining_s <= 0:
                return self._gone(retry.patience_s)
            is_elsewhere = False
            try:
                is_elsewhere = not self._resume(min(remaining_s, _CONNECT_S))
                if not is_elsewhere:
                    return None
            except (ConnectionLostError, DeadlineError, AuthenticationError, VersionError, _NobodyThere, OSError):
                pass  # gone again, or who is there is no scheduler of ours
            except PacelineError as refusal:
                return refusal  # there is a scheduler, and it does not want this process
            self.line.channel.close()
            self._closed.wait(retry.pause_s(time.monotonic(), is_elsewhere=is_elsewhere))
        return self._gone()

    def _resume(self, timeout_s: float) -> bool:
        """Connect, be welcomed, send again what may be lost; return whether the cluster is ours."""
        try:
            channel = self.transport.connect(self.address, self.hello, timeout_s=timeout_s)
        except (AuthenticationError, VersionError):
            raise
        except PacelineError:
            raise _NobodyThere from None
        self._reconnection.connected(time.monotonic())
        if self.state.welcome is None:  # not a member yet: the registration is among what is asked again
            self.line.register_again(channel)
            return True
        rejoining = self.line.rejoin(channel, self._rejoin)
        answer: Answer = rejoining.content.answer
        try:
            while not answer.done():
                if not channel.poll(self.state.heartbeat_s):
                    self.line.say_once(messages.Heartbeat())
                    continue
                self._receive()
                if self.state.is_released:
                    raise self._gone()
        finally:
            # Not among what is asked again: should this connection break too, the scheduler is told anew.
            self.line.take(rejoining.number)
        welcome = read_meta(answer.result()[0], _ANSWER, "a welcome")
        if isinstance(welcome, messages.Elsewhere):
            return False
        self._take_view(self.state.welcomed(welcome))
        self.line.send_again(welcome.received)
        self.reconnections += 1
        self._reconnection.resumed()
        return True

    def _rejoin(self) -> messages.Rejoin:
        tables = self._memory.tables() if self.hooks.tables is None else self.hooks.tables()
        return self.state.rejoin(tables, self._memory.job())

    def _fail(self, error: PacelineError) -> None:
        is_closing, lost = self.is_closing, self.line.fail(error)
        if not is_closing:
            self.hooks.on_lost(lost)

    def _gone(self, waited_s: float = 0.0) -> ConnectionLostError:
        if self.state.is_released:
            return ConnectionLostError(f"the scheduler at {self.address} has ended, as it was told to")
        tried = f", and no other came in its place within {waited_s:g} s" if waited_s else ""
        return ConnectionLostError(
            f"the scheduler at {self.address} is gone{tried}: this process cannot go on without it"
        )


class _NobodyThere(Exception):  # noqa: N818 - a state, not an error
    """Nobody listens at the scheduler's address."""

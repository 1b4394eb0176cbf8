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
from typing import Any, TypeVar

import msgspec

from paceline.errors import (
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    PeerError,
    ProtocolError,
    UsageError,
    VersionError,
)
from paceline.protocol.scheduler import KnownViews
from paceline.protocol.scheduler.line import MemberEnd, SentMessage
from paceline.ps import messages
from paceline.ps.forked import NoLock, own
from paceline.ps.messages import NOTICE, ClusterMap, KnownTable, MapChange
from paceline.ps.scheduler.memory import Memory
from paceline.ps.scheduler.outgoing import Answer, Content, add, send
from paceline.ps.scheduler.processes import own_process
from paceline.transport import Address, Channel, Hello, Transport, read_meta
from paceline.transport.backoff import Backoff

_FIRST_HEARTBEAT_S = 0.1  # until the scheduler says how often: often enough for the shortest patience
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.25
_LASTING_S = 1.0  # a connection that lasts so long was no refusal
_ELSEWHERE_PAUSE_S = 2.0  # where another cluster is at the scheduler's address
_CONNECT_S = 10.0
_FAREWELL_S = 1.0  # how long the scheduler has to take a farewell
_Result = TypeVar("_Result")
_WELCOME: Any = messages.Welcome | messages.Elsewhere


class SchedulerLink:
    """Calls to the scheduler from any thread; its notices are given to `on_notice` in the link's own thread.

    A process that loses the connection without :meth:`close` tries for `reconnect_s` to reach a scheduler at the same
    address. What a member has asked is answered once; before it registers, what it has asked is asked again. In the
    link's thread `tables` says what tables a server holds, `unreachable` which other servers it cannot reach, and
    `is_well` whether it may give signs of life. If no scheduler comes, `on_lost` is called there, once. `on_map` is
    called with every map of the cluster, there or where one registers.
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
        on_map: Callable[[ClusterMap], None] | None = None,
        tables: Callable[[], Sequence[KnownTable]] | None = None,
        unreachable: Callable[[], tuple[int, ...]] = lambda: (),
        is_well: Callable[[], bool] = lambda: True,
    ) -> None:
        hello = msgspec.structs.replace(hello, to="scheduler")
        self.channel: Channel = transport.connect(address, hello, timeout_s=min(timeout_s, _CONNECT_S))
        self.address = address
        self.reconnections = 0
        """How often a member's connection was made again."""
        self.transport = transport
        self.hello = hello
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self.on_notice = on_notice
        self._on_lost = on_lost
        self._on_map = on_map
        self.report_tables = tables
        self._unreachable = unreachable
        self._is_well = is_well
        self._memory = Memory()
        self._send_lock: threading.Lock | NoLock = threading.Lock()
        self._end = MemberEnd()
        self.is_connected = True
        self._connected_at = time.monotonic()
        self._refused_since: float | None = None  # the first of several connections that were broken at once
        self._is_leaving = False
        self.is_closing = False
        self._closed = threading.Event()
        self._is_over = self._is_released = False  # the scheduler has said that there is nothing to come back to
        self.lost: PacelineError | None = None
        self.heartbeat_s = _FIRST_HEARTBEAT_S
        self._registration: messages.Register | None = None
        self.welcome: messages.Welcome | None = None  # the newest answer to the registration
        self._map_changed = threading.Condition()
        self.maps: KnownViews[ClusterMap] = KnownViews()
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
        return self._finish(self._send(message, body), result, timeout_s)

    def start(self, message: msgspec.Struct, result: type[_Result]) -> Callable[[], _Result]:
        """Send a message; return a function that waits for the answer as :meth:`call` does."""
        sent = self._send(message, ())

        def finish() -> _Result:
            answer: _Result = self._finish(sent, result, None)[0]
            return answer

        return finish

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message that wants no answer."""
        with self._send_lock:
            self._is_leaving |= isinstance(message, messages.Drain)
            self._send_or_keep(message, (), None)

    def _send(self, message: msgspec.Struct, body: Sequence[Any]) -> SentMessage:
        with self._send_lock:
            return self._send_or_keep(message, tuple(body), Future())

    def _send_or_keep(self, content: msgspec.Struct, body: tuple[Any, ...], answer: Answer | None) -> SentMessage:
        """Send a message, or keep it until there is a scheduler again. Under the lock."""
        if self.lost is not None:
            raise self.lost
        content = self._memory.sent(content, body)
        message = add(self._end, content, body, answer)
        if self.is_connected:
            try:
                send(self._end, self.channel, message)
            except ConnectionLostError:
                self.is_connected = False  # the link's thread sees it too, and does what is to be done
            except PacelineError:
                self._end.take(message.number)
                raise
        return message

    def _finish(self, sent: SentMessage, result: Any, timeout_s: float | None) -> tuple[Any, memoryview]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        content: Content = sent.content
        assert content.answer is not None
        try:
            meta, data = content.answer.result(timeout_s if math.isfinite(timeout_s) else None)
        except TimeoutError:
            with self._send_lock:
                self._end.take(sent.number)
                is_nobody_there = not self.is_connected and self._registration is None
            if is_nobody_there:
                raise self._gone() from None
            raise DeadlineError(
                f"the scheduler at {self.address} did not answer {type(content.struct).__name__} within {timeout_s:g} s"
            ) from None
        return read_meta(meta, Any if result is None else result, "an answer of the scheduler"), data

    # Membership.

    def register(self, message: messages.Register, *, timeout_s: float | None = None) -> messages.Welcome:
        """Join the cluster; wait until its servers are there. Raises DeadlineError if they do not come in time."""
        message = msgspec.structs.replace(message, process=own_process())
        self._registration = message
        waits_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            welcome: messages.Welcome = self.call(message, messages.Welcome, timeout_s=waits_s)
        except DeadlineError:
            self._registration = None
            found: ClusterMap = self.call(messages.GetMap(), ClusterMap)
            raise DeadlineError(
                f"{found.num_waiting} servers have joined within {waits_s:g} s, and the scheduler expects more: start "
                "them with 'paceline server', or start the scheduler with fewer --servers"
            ) from None
        except BaseException:
            self._registration = None
            raise
        return welcome

    def disown(self) -> None:
        """Leave everything to the parent of this process, which has been forked."""
        self._send_lock, self.is_closing = NoLock(), True

    def close(self) -> None:
        """Leave in good order and end the thread. Idempotent."""
        if not self.is_closing:
            self.is_closing = True
            self._closed.set()
            with self._send_lock:
                try:
                    self.channel.send_frame(NOTICE, meta=messages.encode(messages.Leave()))
                except PacelineError:
                    pass
                self.lost = self.lost or UsageError("this client is closed: connect again")
            # The scheduler closes the connection when it has read that. If this end did, with anything unread, or while
            # the scheduler writes, what was said would be lost, and the others would wait out the time-out.
            try:
                if threading.current_thread() is not self.thread:
                    self.thread.join(_FAREWELL_S)
            finally:
                self.channel.close()
        if threading.current_thread() is not self.thread:
            self.thread.join(10.0)

    @property
    def cluster(self) -> ClusterMap | None:
        """The newest map; None before one has come."""
        return self.maps.committed

    def _take_map(self, cluster: ClusterMap) -> None:
        with self._map_changed:
            is_new = self.maps.commit(cluster)
            self._map_changed.notify_all()
        if is_new and self._on_map is not None:
            self._on_map(cluster)
        if is_new and self.on_notice is not None:
            self.on_notice(cluster)

    # The link's thread.

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except (PacelineError, OSError, ValueError) as error:
                lost = self._come_back() if self._may_come_back(error) else self._sentence(error)
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
        next_beat = time.monotonic() + self.heartbeat_s
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self.heartbeat_s
                if self._is_well():
                    self._beat()
            if self.channel.poll(min(self.heartbeat_s, max(next_beat - now, 0.0))):
                self._receive()

    def _beat(self) -> None:
        try:
            self.tell(messages.Heartbeat(unreachable=self._unreachable()))
        except UsageError:
            if not self.is_closing:
                raise
            # The farewell was faster: it is for the scheduler to close the connection.

    def _receive(self) -> None:
        channel = self.channel
        channel.last_header = None
        try:
            frame = channel.receive_frame(self._timeout_s)
        except PacelineError as error:
            header = channel.error_header()
            if header is None:
                raise
            with self._send_lock:
                refused = self._end.take(header.request)
            if refused is not None:
                refused.content.answer.set_exception(error)
            return
        if frame.header.sequence:
            with self._send_lock:
                self._end.received(frame.header.sequence)
        if frame.header.kind == NOTICE:
            self._take_notice(messages.decode_notice(frame.meta))
            return
        with self._send_lock:
            message = self._end.take(frame.header.request)
        if message is not None:
            request: Content = message.content
            if isinstance(request.struct, messages.Register):  # changes of the map may follow at once
                self._welcomed(read_meta(frame.meta, messages.Welcome, "a welcome"))
            self._memory.answered(request.struct, frame.meta)
            message.content.answer.set_result((frame.meta, frame.body))

    def _welcomed(self, welcome: messages.Welcome) -> None:
        self._memory.joined(welcome.incarnation)
        self.heartbeat_s = welcome.heartbeat_s
        self.welcome = welcome
        self._take_map(welcome.cluster)

    def _take_notice(self, notice: msgspec.Struct) -> None:
        match notice:
            case messages.JobNews(record=record):
                self._memory.told(record)
            case ClusterMap():
                self._take_map(notice)
            case MapChange():
                self._take_map(self._changed(notice))
            case messages.PrepareMap(map=cluster):
                whole = self._changed(cluster) if isinstance(cluster, MapChange) else cluster
                if self.maps.prepare(whole):
                    self._answer(messages.Prepared(term=whole.term, epoch=whole.epoch))
            case messages.Promise(term=term):
                if self.maps.promise(term):
                    self._answer(messages.Promised(term=term))
            case messages.CommitMap():
                known = self.maps.prepared
                if known is not None and known.order == (notice.term, notice.epoch):
                    self._take_map(known)
            case _:
                self._is_released |= isinstance(notice, messages.Ended)
                self._is_over |= isinstance(notice, messages.Ended | messages.Expelled)
                if self.on_notice is not None:
                    self.on_notice(notice)

    def _answer(self, notice: msgspec.Struct) -> None:
        """Say what need not come: the scheduler asks again, or does not mind."""
        with self._send_lock:
            self.channel.send_frame(NOTICE, meta=messages.encode(notice))

    def _changed(self, change: MapChange) -> ClusterMap:
        base = self.maps.committed
        if base is None:
            raise ProtocolError("the scheduler has sent what changed in a map that it has not sent")
        return change.apply(base)

    # When the connection is lost.

    def _may_come_back(self, error: Exception) -> bool:
        return not (_is_told(error) or self.is_closing or self._is_over) and self._reconnect_s > 0

    def _come_back(self) -> PacelineError | None:
        """Connect again, to the same scheduler or the one in its place; return why not."""
        with self._send_lock:
            self.is_connected = False
        self.channel.close()
        now = time.monotonic()
        longest_s = min(_LONGEST_PAUSE_S, max(self.heartbeat_s, _SHORTEST_PAUSE_S))
        # Many members lose their scheduler at the same moment.
        backoff = Backoff(_SHORTEST_PAUSE_S, longest_s, spread=0.5)
        if self._refused_since is None or now > self._connected_at + _LASTING_S:
            self._refused_since = now
        else:
            self._closed.wait(_SHORTEST_PAUSE_S)
        deadline = self._refused_since + self._reconnect_s
        while not self.is_closing and not self._is_over:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return self._gone(self._reconnect_s)
            is_elsewhere = False
            try:
                is_elsewhere = not self._resume(min(remaining, _CONNECT_S))
                if not is_elsewhere:
                    return None
            except (ConnectionLostError, DeadlineError, AuthenticationError, VersionError, _NobodyThere, OSError):
                pass  # gone again, or who is there is no scheduler of ours
            except PacelineError as error:
                return error  # there is a scheduler, and it does not want this process
            self.channel.close()
            if is_elsewhere:
                backoff = Backoff(_ELSEWHERE_PAUSE_S, _ELSEWHERE_PAUSE_S, spread=0.5)
            self._closed.wait(backoff.next_s(deadline - time.monotonic()))
        return self._gone()

    def _resume(self, timeout_s: float) -> bool:
        """Connect, be welcomed, send again what may be lost; return whether the cluster is ours."""
        try:
            channel = self.transport.connect(self.address, self.hello, timeout_s=timeout_s)
        except (AuthenticationError, VersionError):
            raise
        except PacelineError:
            raise _NobodyThere from None
        self._connected_at = time.monotonic()
        with self._send_lock:
            self.channel = channel
            if self.is_closing:
                raise self._gone()
            if self.welcome is None:  # not a member yet: the registration is among what is asked again
                self._send_again(0)
                return True
            self._end.rejoins()
            answer: Answer = Future()
            rejoining = add(self._end, self._rejoin(), (), answer)
            send(self._end, channel, rejoining)
        try:
            self._wait_welcome(answer)
        finally:
            with self._send_lock:
                # Not among what is asked again: should this connection break too, the scheduler is told anew.
                self._end.take(rejoining.number)
        welcome = read_meta(answer.result()[0], _WELCOME, "a welcome")
        if isinstance(welcome, messages.Elsewhere):
            return False
        self.welcome, self.heartbeat_s = welcome, welcome.heartbeat_s
        self._take_map(welcome.cluster)
        with self._send_lock:
            self._send_again(welcome.received)
        self.reconnections += 1
        self._refused_since = None
        return True

    def _wait_welcome(self, answer: Answer) -> None:
        while not answer.done():
            if self.channel.poll(self.heartbeat_s):
                self._receive()
                if self._is_released:
                    raise self._gone()
            else:
                self._answer(messages.Heartbeat())

    def _rejoin(self) -> messages.Rejoin:
        registration, welcome, newest = self._registration, self.welcome, self.maps.newest
        assert registration is not None
        assert welcome is not None
        assert newest is not None
        return messages.Rejoin(
            node=registration.node,
            role=registration.role,
            rank=welcome.rank,
            incarnation=welcome.incarnation,
            endpoint=registration.endpoint,
            process=registration.process,
            settings=welcome.settings,
            cluster=newest,
            promised=self.maps.promised,
            has_committed=self.maps.is_committed,
            former=() if self.maps.former is None else self.maps.former.of_role("server"),
            is_leaving=self._is_leaving,
            tables=self._memory.tables() if self.report_tables is None else tuple(self.report_tables()),
            job=self._memory.job(),
        )

    def _send_again(self, received: int) -> None:
        """Send what the scheduler may not have; -1: it is another one, and has nothing. Under the lock."""
        if received < 0:
            for report, parts in self._memory.reports():
                self.channel.send_frame(NOTICE, meta=messages.encode(report), body=parts)
        for message in self._end.welcomed(received):
            send(self._end, self.channel, message)
        self.is_connected = True

    def _fail(self, error: PacelineError) -> None:
        closing = self.is_closing
        with self._send_lock:
            lost = self.lost = self.lost or error
            calls = self._end.calls()
        for message in calls:
            if not message.content.answer.done():
                message.content.answer.set_exception(lost)
        with self._map_changed:
            self._map_changed.notify_all()
        self.channel.close()
        if not closing and self._on_lost is not None:
            self._on_lost(lost)

    def _sentence(self, error: Exception) -> PacelineError:
        return error if isinstance(error, PeerError) and _is_told(error) else self._gone()

    def _gone(self, waited_s: float = 0.0) -> ConnectionLostError:
        tried = f", and no other came in its place within {waited_s:g} s" if waited_s else ""
        return ConnectionLostError(
            f"the scheduler at {self.address} is gone{tried}: this process cannot go on without it"
        )


class _NobodyThere(Exception):  # noqa: N818 - a state, not an error
    """Nobody listens at the scheduler's address."""


def _is_told(error: Exception) -> bool:
    """Whether the scheduler is there and has said what is wrong."""
    return isinstance(error, PeerError) and not isinstance(error, ConnectionLostError)

"""A process's line to the scheduler: calls, news and heartbeats on one connection, kept by a thread of its own.

The scheduler may die and another come in its place, at the same address. The line then connects again, tells the new
one who this process is and what it remembers (:mod:`paceline.ps.account`), and goes on: what waited for an answer is
asked again. Whoever uses the line notices a pause.
"""

from __future__ import annotations

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
from paceline.ps import messages
from paceline.ps.account import Memory
from paceline.ps.messages import CALL, NOTICE, ClusterMap, KnownTable
from paceline.transport import Address, Channel, Header, Hello, Kind, Transport

_FIRST_HEARTBEAT_S = 0.1  # until the scheduler says how often: often enough for the shortest patience
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.25
_Result = TypeVar("_Result")
_Answer = Future[tuple[bytes, memoryview]]


@dataclass(slots=True)
class _Pending:
    """A message that is not answered, or, if it wants no answer, not sent."""

    message: msgspec.Struct
    body: tuple[Any, ...]
    answer: _Answer | None


class SchedulerLink:
    """Calls to the scheduler from any thread; its notices are given to `on_notice` in the link's own thread.

    A member that loses the connection without :meth:`close` tries for `reconnect_s` to reach a scheduler at the same
    address; `tables`, called in the link's thread, says what tables a server holds, `unreachable` which other servers
    it cannot reach. If the link cannot, or is no member, `on_lost` is called there, once. `on_map` is called with every
    map of the cluster, there or where one registers.
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
    ) -> None:
        self._channel: Channel = transport.connect(address, hello, timeout_s=min(timeout_s, 10.0))
        self.address = address
        self.reconnections = 0
        """How often another scheduler has come in the place of one that was lost."""
        self._transport = transport
        self._hello = hello
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._on_map = on_map
        self._tables = tables
        self._unreachable = unreachable
        self._memory = Memory()
        self._send_lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._number = 0
        self._is_connected = True
        self._closing = False
        self._closed = threading.Event()
        self._is_over = False  # the scheduler has said that there is nothing to come back to
        self._lost: PacelineError | None = None
        self._heartbeat_s = _FIRST_HEARTBEAT_S
        self._registered: tuple[messages.Register, messages.Welcome] | None = None
        self._map_changed = threading.Condition()
        self._map: ClusterMap | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-scheduler-link", daemon=True)
        self._thread.start()

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
        return self._finish(message, self._send(message, body), result, timeout_s)

    def start(self, message: msgspec.Struct, result: type[_Result]) -> Callable[[], _Result]:
        """Send a message; return a function that waits for the answer as :meth:`call` does."""
        sent = self._send(message, ())

        def finish() -> _Result:
            answer: _Result = self._finish(message, sent, result, None)[0]
            return answer

        return finish

    def _send(self, message: msgspec.Struct, body: Sequence[Any]) -> tuple[int, _Answer]:
        answer: _Answer = Future()
        with self._send_lock:
            number = self._send_or_keep(message, tuple(body), answer)
        return number, answer

    def _send_or_keep(self, message: msgspec.Struct, body: tuple[Any, ...], answer: _Answer | None) -> int:
        """Send a message, or keep it until there is a scheduler again. Under the lock."""
        if self._lost is not None:
            raise self._lost
        message = self._memory.sent(message, body)
        self._number += 1
        number = self._number
        if isinstance(message, messages.Heartbeat) and not self._is_connected:
            if not message.progress:
                return number
            for other, kept in list(self._pending.items()):
                if isinstance(kept.message, messages.Heartbeat):
                    del self._pending[other]  # the newest says all
        pending = self._pending[number] = _Pending(message, body, answer)
        if self._is_connected:
            try:
                self._send_pending(number, pending)
            except ConnectionLostError:
                self._is_connected = False  # the link's thread sees it too, and does what is to be done
            except PacelineError:
                self._pending.pop(number, None)
                raise
        return number

    def _send_pending(self, number: int, pending: _Pending) -> None:
        kind = NOTICE if pending.answer is None else CALL
        request = 0 if pending.answer is None else number
        self._channel.send_frame(kind, request=request, meta=messages.encode(pending.message), body=pending.body)
        if pending.answer is None:
            self._pending.pop(number, None)

    def _finish(
        self,
        message: msgspec.Struct,
        sent: tuple[int, _Answer],
        result: Any,
        timeout_s: float | None,
    ) -> tuple[Any, memoryview]:
        number, future = sent
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            meta, data = future.result(timeout_s)
        except TimeoutError:
            with self._send_lock:
                self._pending.pop(number, None)
            raise DeadlineError(
                f"the scheduler at {self.address} did not answer {type(message).__name__} within {timeout_s:g} s"
            ) from None
        return (msgspec.msgpack.decode(meta, type=result) if result is not None else msgspec.msgpack.decode(meta)), data

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message that wants no answer."""
        with self._send_lock:
            self._send_or_keep(message, (), None)

    def register(self, message: messages.Register) -> messages.Welcome:
        """Join the cluster."""
        welcome: messages.Welcome = self.call(message, messages.Welcome)
        self._memory.incarnation = welcome.incarnation
        self._heartbeat_s = welcome.heartbeat_s
        self._take_map(welcome.cluster)
        self._registered = (message, welcome)
        return welcome

    def wait_servers(self, timeout_s: float) -> tuple[messages.MemberInfo, ...]:
        """Wait until all expected servers are there; return them by rank."""
        with self._map_changed:
            there = self._map_changed.wait_for(
                lambda: self._lost is not None or (self._map is not None and self._map.ready), timeout_s
            )
            if self._lost is not None:
                raise self._lost
            assert self._map is not None
            if not there:
                raise DeadlineError(
                    f"{len(self._map.of_role('server'))} servers have joined within {timeout_s:g} s, and the scheduler "
                    "expects more: start them with 'paceline server', or start the scheduler with fewer --servers"
                )
            return self._map.of_role("server")

    def close(self) -> None:
        """Leave in good order and end the thread. Idempotent."""
        if not self._closing:
            self._closing = True
            self._closed.set()
            with self._send_lock:
                try:
                    self._channel.send_frame(NOTICE, meta=messages.encode(messages.Leave()))
                except PacelineError:
                    pass
                self._lost = self._lost or UsageError("this client is closed: connect again")
            self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    @property
    def cluster(self) -> ClusterMap | None:
        """The newest map; None before one has come."""
        return self._map

    def _take_map(self, cluster: ClusterMap) -> None:
        with self._map_changed:
            known = self._map
            if known is None or cluster.epoch >= known.epoch:
                if known is not None and known.version == cluster.version and not cluster.groups:
                    cluster = msgspec.structs.replace(cluster, groups=known.groups)
                self._map = cluster
            self._map_changed.notify_all()
        if self._on_map is not None:
            self._on_map(cluster)

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except (PacelineError, OSError, ValueError, msgspec.MsgspecError) as error:
                lost = self._come_back() if self._may_come_back(error) else self._sentence(error)
                if lost is not None:
                    self._fail(lost)
                    return

    def _listen(self) -> None:
        next_beat = time.monotonic() + self._heartbeat_s
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._heartbeat_s
                self.tell(messages.Heartbeat(unreachable=self._unreachable()))
            if self._channel.poll(min(self._heartbeat_s, max(next_beat - now, 0.0))):
                self._receive()

    def _receive(self) -> None:
        channel = self._channel
        channel.last_header = None
        try:
            frame = channel.receive_frame(self._timeout_s)
        except PacelineError as error:
            header = _last_header(channel)
            if header is None or header.kind != Kind.ERROR:
                raise
            pending = self._pending.pop(header.request, None)
            if pending is not None and pending.answer is not None:
                pending.answer.set_exception(error)
            return
        if frame.header.kind == NOTICE:
            self._take_notice(messages.decode_notice(frame.meta))
            return
        pending = self._pending.pop(frame.header.request, None)
        if pending is not None and pending.answer is not None:
            self._memory.answered(pending.message, frame.meta)
            pending.answer.set_result((frame.meta, frame.body))

    def _take_notice(self, notice: msgspec.Struct) -> None:
        if isinstance(notice, messages.JobNews):
            self._memory.told(notice)
            return
        if isinstance(notice, ClusterMap):
            self._take_map(notice)
        if isinstance(notice, messages.Ended | messages.Expelled):
            self._is_over = True
        if self._on_notice is not None:
            self._on_notice(notice)

    # When the scheduler is lost.

    def _may_come_back(self, error: Exception) -> bool:
        is_member = self._registered is not None
        return is_member and not (_is_told(error) or self._closing or self._is_over) and self._reconnect_s > 0

    def _come_back(self) -> PacelineError | None:
        """Join the scheduler that comes in the place of the lost one; return why not."""
        with self._send_lock:
            self._is_connected = False
        self._channel.close()
        deadline = time.monotonic() + self._reconnect_s
        pause = _SHORTEST_PAUSE_S
        while not self._closing and not self._is_over:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return self._gone(self._reconnect_s)
            try:
                if self._rejoin(min(remaining, 10.0)):
                    return None
            except (ConnectionLostError, DeadlineError, OSError):
                pass  # gone again
            except PacelineError as error:
                return error  # there is a scheduler, and it does not want this process
            self._channel.close()
            self._closed.wait(min(pause, max(deadline - time.monotonic(), 0.0)))
            # A scheduler that collects its members waits for two heartbeats: who pauses longer comes too late.
            pause = min(2 * pause, _LONGEST_PAUSE_S, max(self._heartbeat_s, _SHORTEST_PAUSE_S))
        return self._gone()

    def _rejoin(self, timeout_s: float) -> bool:
        """Connect, be welcomed, ask again what was not answered; return whether there was somebody."""
        try:
            channel = self._transport.connect(self.address, self._hello, timeout_s=timeout_s)
        except (AuthenticationError, VersionError):
            raise
        except PacelineError:
            return False
        assert self._registered is not None
        register, welcome = self._registered
        answer: _Answer = Future()
        with self._send_lock:
            self._channel = channel
            if self._closing:
                raise self._gone()
            cluster = self._map
            assert cluster is not None
            tables = self._memory.tables() if self._tables is None else tuple(self._tables())
            rejoin = messages.Rejoin(
                node=register.node,
                role=register.role,
                rank=welcome.rank,
                incarnation=welcome.incarnation,
                endpoint=register.endpoint,
                settings=welcome.settings,
                cluster=cluster,
                tables=tables,
                job=self._memory.job(),
            )
            self._number += 1
            number = self._number
            # Not among those that are asked again: should this scheduler die too, the next one is told anew.
            channel.send_frame(CALL, request=number, meta=messages.encode(rejoin))
            self._pending[number] = _Pending(rejoin, (), answer)
        try:
            while not answer.done():
                if channel.poll(self._heartbeat_s):
                    self._receive()
                elif not answer.done():
                    channel.send_frame(NOTICE, meta=messages.encode(messages.Heartbeat()))
        finally:
            self._pending.pop(number, None)
        renewed = msgspec.msgpack.decode(answer.result()[0], type=messages.Welcome)
        self._heartbeat_s = renewed.heartbeat_s
        self._registered = (register, renewed)
        self._take_map(renewed.cluster)
        self._ask_again()
        self.reconnections += 1
        return True

    def _ask_again(self) -> None:
        with self._send_lock:
            for report, parts in self._memory.reports():
                self._channel.send_frame(NOTICE, meta=messages.encode(report), body=parts)
            for number, pending in sorted(self._pending.items()):
                self._send_pending(number, pending)
            self._is_connected = True

    def _fail(self, error: PacelineError) -> None:
        closing = self._closing
        with self._send_lock:
            lost = self._lost = self._lost or error
        for pending in list(self._pending.values()):
            if pending.answer is not None and not pending.answer.done():
                pending.answer.set_exception(lost)
        with self._map_changed:
            self._map_changed.notify_all()
        self._channel.close()
        if not closing and self._on_lost is not None:
            self._on_lost(lost)

    def _sentence(self, error: Exception) -> PacelineError:
        return error if isinstance(error, PeerError) and _is_told(error) else self._gone()

    def _gone(self, waited_s: float = 0.0) -> ConnectionLostError:
        tried = f", and no other came in its place within {waited_s:g} s" if waited_s else ""
        return ConnectionLostError(
            f"the scheduler at {self.address} is gone{tried}: this process cannot go on without it"
        )


def _is_told(error: Exception) -> bool:
    """Whether the scheduler is there and has said what is wrong."""
    return isinstance(error, PeerError) and not isinstance(error, ConnectionLostError)


def _last_header(channel: Channel) -> Header | None:
    return channel.last_header

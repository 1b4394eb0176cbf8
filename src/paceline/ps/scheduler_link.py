"""A process's line to the scheduler: calls, news and heartbeats on one connection, kept by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from paceline.errors import ConnectionLostError, DeadlineError, PacelineError, PeerError, UsageError
from paceline.ps import messages
from paceline.ps.messages import CALL, NOTICE, ClusterMap
from paceline.transport import Address, Channel, Header, Hello, Kind, Transport

_FIRST_HEARTBEAT_S = 0.1  # until the scheduler says how often: often enough for the shortest patience
_Result = TypeVar("_Result")


class SchedulerLink:
    """Calls to the scheduler from any thread; its notices are given to `on_notice` in the link's own thread.

    `on_lost` is called there too, once, if the connection breaks without :meth:`close`.
    """

    def __init__(
        self,
        transport: Transport,
        address: Address | str,
        hello: Hello,
        *,
        timeout_s: float = 60.0,
        on_notice: Callable[[msgspec.Struct], None] | None = None,
        on_lost: Callable[[PacelineError], None] | None = None,
    ) -> None:
        self._channel: Channel = transport.connect(address, hello, timeout_s=min(timeout_s, 10.0))
        self.address = address
        self._timeout_s = timeout_s
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._send_lock = threading.Lock()
        self._futures: dict[int, Future[tuple[bytes, memoryview]]] = {}
        self._number = 0
        self._closing = False
        self._lost: PacelineError | None = None
        self._heartbeat_s = _FIRST_HEARTBEAT_S
        self._map_changed = threading.Condition()
        self._map: ClusterMap | None = None
        self._thread = threading.Thread(target=self._listen, name="paceline-scheduler-link", daemon=True)
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

    def _send(self, message: msgspec.Struct, body: Sequence[Any]) -> tuple[int, Future[tuple[bytes, memoryview]]]:
        future: Future[tuple[bytes, memoryview]] = Future()
        with self._send_lock:
            if self._lost is not None:
                raise self._lost
            self._number += 1
            number = self._number
            self._futures[number] = future
            try:
                self._channel.send_frame(CALL, request=number, meta=messages.encode(message), body=tuple(body))
            except PacelineError as error:
                self._futures.pop(number, None)
                raise self._gone() if isinstance(error, ConnectionLostError) else error from None
        return number, future

    def _finish(
        self,
        message: msgspec.Struct,
        sent: tuple[int, Future[tuple[bytes, memoryview]]],
        result: Any,
        timeout_s: float | None,
    ) -> tuple[Any, memoryview]:
        number, future = sent
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            meta, data = future.result(timeout_s)
        except TimeoutError:
            self._futures.pop(number, None)
            raise DeadlineError(
                f"the scheduler at {self.address} did not answer {type(message).__name__} within {timeout_s:g} s"
            ) from None
        return (msgspec.msgpack.decode(meta, type=result) if result is not None else msgspec.msgpack.decode(meta)), data

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message that wants no answer."""
        with self._send_lock:
            if self._lost is not None:
                raise self._lost
            try:
                self._channel.send_frame(NOTICE, meta=messages.encode(message))
            except ConnectionLostError:
                raise self._gone() from None

    def register(self, message: messages.Register) -> messages.Welcome:
        """Join the cluster."""
        welcome: messages.Welcome = self.call(message, messages.Welcome)
        self._heartbeat_s = welcome.heartbeat_s
        self._take_map(welcome.cluster)
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
            with self._send_lock:
                try:
                    self._channel.send_frame(NOTICE, meta=messages.encode(messages.Leave()))
                except PacelineError:
                    pass
                self._lost = self._lost or UsageError("this client is closed: connect again")
            self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def _take_map(self, cluster: ClusterMap) -> None:
        with self._map_changed:
            if self._map is None or cluster.epoch >= self._map.epoch:
                self._map = cluster
            self._map_changed.notify_all()

    def _listen(self) -> None:
        next_beat = time.monotonic() + self._heartbeat_s
        try:
            while True:
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + self._heartbeat_s
                    self.tell(messages.Heartbeat())
                if self._channel.poll(min(self._heartbeat_s, max(next_beat - now, 0.0))):
                    self._receive()
        except (PacelineError, OSError, ValueError, msgspec.MsgspecError) as error:
            self._fail(error)

    def _receive(self) -> None:
        channel = self._channel
        channel.last_header = None
        try:
            frame = channel.receive_frame(self._timeout_s)
        except PacelineError as error:
            header = _last_header(channel)
            if header is None or header.kind != Kind.ERROR:
                raise
            future = self._futures.pop(header.request, None)
            if future is not None:
                future.set_exception(error)
            return
        if frame.header.kind == NOTICE:
            notice = messages.decode_notice(frame.meta)
            if isinstance(notice, ClusterMap):
                self._take_map(notice)
            if self._on_notice is not None:
                self._on_notice(notice)
            return
        future = self._futures.pop(frame.header.request, None)
        if future is not None:
            future.set_result((frame.meta, frame.body))

    def _fail(self, error: Exception) -> None:
        closing = self._closing
        with self._send_lock:
            if self._lost is None:
                told = isinstance(error, PeerError) and not isinstance(error, ConnectionLostError)
                self._lost = error if told else self._gone()  # type: ignore[assignment]
            lost = self._lost
            assert lost is not None
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(lost)
        with self._map_changed:
            self._map_changed.notify_all()
        self._channel.close()
        if not closing and self._on_lost is not None:
            self._on_lost(lost)

    def _gone(self) -> ConnectionLostError:
        return ConnectionLostError(f"the scheduler at {self.address} is gone: this process cannot go on without it")


def _last_header(channel: Channel) -> Header | None:
    return channel.last_header

"""All servers of a client's view at once: does as the client's core bids, and waits for requests wherever they are."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.errors import (
    AddressError,
    ConnectionLostError,
    DeadlineError,
    PacelineError,
    StaleEpochError,
    UsageError,
)
from paceline.protocol.buckets import Buckets
from paceline.protocol.client import (
    ClientCore,
    Connect,
    Discard,
    Disconnect,
    Instruction,
    Request,
    RequestJoin,
    RequestKind,
    Resync,
    Transmit,
)
from paceline.ps.client.buffer_pool import Copies
from paceline.ps.client.connection import CLOSED, MAX_AWAITED_BYTES, ServerConnection, make_room
from paceline.ps.client.cuts import CutWatch
from paceline.ps.client.exchange import exchange_of, fill
from paceline.ps.client.routes import MapWatch, Routes, no_routes
from paceline.ps.forked import NoLock, own
from paceline.ps.messages import PULL, TableSpec
from paceline.transport import HEADER, Hello, Transport

_CONNECT_S = 1.0
_NO_KEYS = np.empty(0, np.uint64)
_Result = TypeVar("_Result")


class Servers:
    """The connections of one client, and its core. Everything is done with the `lock` held, unless it says otherwise.

    `watch` holds the newest map, which comes in another thread; :meth:`newest` goes by it.
    """

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        core: ClientCore,
        watch: MapWatch,
        *,
        timeout_s: float,
        reconnect_s: float,
    ) -> None:
        self.lock: threading.RLock | NoLock = threading.RLock()
        """Held while a request is made or awaited."""
        self.core = core
        self.watch = watch
        self.routes: Routes = no_routes()
        """The map that the connections are of."""
        self.connections: list[ServerConnection] = []
        """One per server, in the order of `routes.servers`."""
        self.specs: dict[int, TableSpec] = {}
        """The tables that were declared here, by number."""
        self.timeout_s = timeout_s
        self.asks: list[RequestJoin] = []
        """The servers that are still to be asked to let this worker join."""
        self.cuts = CutWatch()
        self._reconnect_s = reconnect_s
        self._by_server: dict[int, ServerConnection] = {}
        self._copies = copies = Copies()
        self._connection_to = partial(
            ServerConnection, transport, hello, core, watch, copies, timeout_s=timeout_s, reconnect_s=reconnect_s
        )
        # Of the core's last instructions; behind them what is sent when answers that are awaited before have come.
        self._to_do: deque[Instruction | Request] = deque()
        self._gone_bytes = (0, 0)
        self.is_closed = False
        """Whether the client is closed, or about to be."""
        own(self)

    def disown(self) -> None:
        """Leave everything to the parent of this process, which has been forked."""
        self.lock = NoLock()

    def open(self, has_replicas: bool) -> None:
        """Wait for the first map, and connect. Where there are replicas, a server that is not there is no error."""
        with self.lock:
            self._take(self.watch.wait_newer(0, self.timeout_s))
            for connection in self.connections:
                try:
                    connection.connect(min(self.timeout_s, _CONNECT_S if has_replicas else 10.0))
                except (AddressError, ConnectionLostError, DeadlineError):
                    if not has_replicas:
                        raise
                    # It is dead or asleep: the next map says which, and whoever needs it tries again.

    # Views.

    def newest(self) -> list[ServerConnection]:
        """Return the connections, by the newest map."""
        if self.watch.is_unsettled:
            self.follow()
        if not self.connections:
            if self.routes.lost and not self.is_closed:
                raise self.routes.loss()
            raise UsageError("this client is closed: connect again")
        return self.connections

    def follow(self) -> None:
        """Work by the newest map: connect to its servers, and send again what is not answered.

        Waits for one if a server says that there is one. Raises DeadlineError if it does not come.
        """
        with self.lock:
            while not self.is_closed or self.connections:
                self.watch.is_unsettled = False
                newest = self.watch.newest
                try:
                    if self._to_do:  # something has come in between: memory that was short, or Ctrl-C
                        self.execute(())
                    if newest is not None and newest.version > self.core.version:
                        self.execute(self._take(newest))
                    elif any(connection.session.awaits_view for connection in self.connections):
                        patience_s = min(self._reconnect_s, self.timeout_s) if self.is_closed else self.timeout_s
                        self.watch.wait_newer(self.core.version, patience_s)
                    else:
                        self.cuts.mend(self.connections)  # others may wait for what was to be sent again
                        return
                except BaseException:
                    self.watch.is_unsettled = True
                    raise

    def _take(self, routes: Routes) -> list[Instruction]:
        """Go by other routes; return what is to be done. Waits for no server."""
        for connection in self.connections:
            for request in (*connection.session.in_flight.values(), *connection.session.retained):
                if request.kind not in (RequestKind.CALL, RequestKind.TICK):
                    exchange_of(request).locate(self.specs, connection.session.leads)
        self.routes = routes
        instructions = self.core.change(routes.version, routes.groups, routes.loss() if routes.lost else None)
        for server in routes.servers:
            if server.incarnation not in self._by_server:
                self._by_server[server.incarnation] = self._connection_to(server)
        self.connections = [self._by_server[server.incarnation] for server in routes.servers]
        return instructions

    def execute(self, instructions: Iterable[Instruction]) -> None:
        """Do as the core says. What an exception leaves undone, :meth:`follow` does."""
        self._to_do.extend(instructions)
        awaited: dict[int, int] = {}
        while self._to_do:
            instruction = self._to_do[0]
            if isinstance(instruction, Transmit):  # there may be no memory for it
                instruction.request.payload = fill(instruction.request, instruction.pieces, self.core.version)
            if isinstance(instruction, Request):
                make_room(self._by_server[instruction.server], exchange_of(instruction).num_awaited_bytes)
            self._to_do.popleft()
            match instruction:
                case Request():
                    self._by_server[instruction.server].start(instruction)
                case Transmit(request):
                    num_bytes = exchange_of(request).num_awaited_bytes
                    awaited[request.server] = awaited.get(request.server, 0) + num_bytes
                    if awaited[request.server] > max(MAX_AWAITED_BYTES, num_bytes):
                        self._to_do.append(request)
                    else:
                        self._by_server[request.server].start(request)
                case Discard(request):
                    exchange_of(request).release(self._copies)
                case Resync(server):
                    self._by_server[server].resync(instruction)
                case Disconnect(session):
                    connection = self._by_server.pop(session.server)
                    received, sent = connection.byte_counts()
                    self._gone_bytes = self._gone_bytes[0] + received, self._gone_bytes[1] + sent
                    connection.depart()
                    connection.close()
                case Connect(server):
                    with contextlib.suppress(AddressError, PacelineError):  # whoever waits for it tries again
                        self._by_server[server].connect(min(self.timeout_s, _CONNECT_S))
                case RequestJoin(_, round_):
                    self.asks = [*(ask for ask in self.asks if ask.round == round_), instruction]

    def check_there(self, buckets: Buckets) -> None:
        """Raise ConnectionLostError if some of these buckets are lost."""
        if buckets & self.routes.lost:
            raise self.routes.loss()

    # Waiting.

    def wait(self, request: Request) -> None:
        """Wait for an answer; raise what the server reported."""
        while not request.is_done:
            self._progress(request)
        self.cuts.awaited = None
        if request.error is not None:
            self.core.report(request)
            raise request.error

    def _progress(self, request: Request) -> None:
        """Get nearer to an answer."""
        while request.replacements is not None:
            request = next(each for each in request.replacements if not each.is_done)
        connection = self._by_server[request.server]
        awaits_view = connection.session.awaits_view
        if self._to_do or (awaits_view and not (request.kind is RequestKind.CALL and self.watch.has(request.server))):
            self.follow()
        else:
            self.cuts.awaited = connection
            if self.cuts.has_cuts:
                self.cuts.mend(self.connections)
            connection.receive_one(request)

    def poll(self, request: Request) -> bool:
        """Take what has arrived; return whether a request is done."""
        try:
            while not request.is_done:
                if request.replacements is not None:
                    if not all(self.poll(each) for each in request.replacements):
                        return False
                    continue
                connection = self._by_server[request.server]
                if self._to_do:
                    self.follow()
                elif connection.session.awaits_view:
                    if not self.watch.is_newer_than(self.core.version):
                        return False
                    self.follow()
                elif connection.channel.poll(0.0):
                    connection.receive_one(request)
                else:
                    return False
        except PacelineError:
            pass  # whoever waits is told
        return request.is_done

    def drain(self) -> None:
        """Wait until everything is answered; raise the first failure that nobody was told."""
        while True:
            busy = next((each.session for each in self.newest() if each.session.in_flight), None)
            if busy is None:
                break
            self._progress(next(iter(busy.in_flight.values())))
        self.raise_failures()

    def check_may_tick(self) -> None:
        """Raise UsageError if this client takes no part in iterations; and the first failure that nobody was told."""
        self.core.check_takes_part()
        if self.core.failures:
            self.raise_failures()

    def raise_failures(self) -> None:
        """Raise the first failure of a request that nobody has waited for."""
        for connection in self.newest():
            if connection.lost is not None:
                raise connection.lost
        failures = self.core.failures
        if failures:
            error = failures[0].error
            failures.clear()
            assert error is not None
            raise error

    def wait_stable(self) -> None:
        """Wait until all that was pushed with a tick is on every server that shall have it."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            self.newest()
            session = self.core.unstable()
            if session is None:
                return
            connection = self._by_server[session.server]
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"server {connection.rank} does not say within {self.timeout_s:g} s that the iterations before "
                    f"{self.core.clock}, which this worker has ended, are complete and on its replicas"
                )
            table = HEADER.unpack(exchange_of(session.retained[0]).frame[0])[4]
            # A read of the current iteration, which the gate holds until then.
            self.wait(connection.send(PULL, table, 0, self.core.clock, 0, (_NO_KEYS,)))

    # Calls.

    def call_all(self, message: msgspec.Struct, result: Any = Any) -> list[Any]:
        """Send a control message to every server of the newest map; return the answers, as `connections` are.

        Each is decoded as `result`.
        """
        results: dict[int, Any] = {}

        def call_rest() -> list[Any]:
            while True:
                connections = self.newest()
                rest = [each for each in connections if each.session.server not in results]
                if not rest:
                    return [results[each.session.server] for each in connections]
                results[rest[0].session.server] = rest[0].call(message, result, sequence=sequence)[0]

        with self.lock:
            sequence = self.core.next_sequence()
            return self.retry(call_rest)

    def retry(self, function: Callable[[], _Result]) -> _Result:
        """Call a function until no server says any more that the map is an old one."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            version = self.core.version
            try:
                return function()
            except StaleEpochError:
                self.watch.wait_newer(version, self.timeout_s, deadline)
                self.follow()

    # The end.

    def byte_counts(self) -> tuple[int, int]:
        """Return the bytes received from and sent to the servers so far."""
        counts = [connection.byte_counts() for connection in self.connections]
        received, sent = self._gone_bytes
        return received + sum(count[0] for count in counts), sent + sum(count[1] for count in counts)

    def abort(self, reason: PacelineError | None = None) -> None:
        """Give up what is in flight, from whatever thread: it raises there, and so does every request from now on.

        It raises the reason, by default that the client is closed.
        """
        reason = reason or UsageError(CLOSED)
        self.watch.fail(reason)
        for connection in self.connections:
            connection.interrupt(reason)

    def close(self) -> None:
        """Finish what is in flight, and close the connections. Takes the lock itself."""
        self.is_closed = True
        try:
            with self.lock:
                for connection in self.connections:
                    connection.patience_s = min(self._reconnect_s, self.timeout_s)
                for _ in range(len(self.connections) + 1):  # one that is lost is no reason to give up the others
                    try:
                        self.drain()
                        break
                    except DeadlineError:
                        break
                    except PacelineError:  # who wanted to know has waited or called flush()
                        pass
        finally:
            for connection in self.connections:
                connection.close()
            self.connections = []
            self.watch.fail(UsageError("this client is closed: connect again"))

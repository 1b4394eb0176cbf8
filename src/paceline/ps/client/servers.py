"""A client's connections to all servers: carries out the core's instructions, and waits for requests and tickets."""

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
from paceline.observe import recording
from paceline.observe.stuck.report import print_stall
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
from paceline.ps.client.connection import CLOSED, MAX_ANSWER_BYTES, CutWatch, ServerConnection, make_room
from paceline.ps.client.exchange import Copies, DataRequest, exchange_of, fill
from paceline.ps.client.routes import Routes, RouteWatch, no_routes
from paceline.ps.forked import NoLock, own
from paceline.ps.messages import DROPPED, PULL, TICKS, TableSpec
from paceline.transport import HEADER, Hello, Transport


class Ticket:
    """A push or pull in progress. Until it is done, do not change the arrays that you passed, and do not read `out`."""

    __slots__ = ("_finish", "_finished", "_requests", "_result", "_servers")

    def __init__(self, servers: Servers, requests: list[Request], finish: Callable[[], Any] | None = None) -> None:
        self._servers = servers
        self._requests = requests
        self._finish = finish
        self._finished = False
        self._result: Any = None

    def __repr__(self) -> str:
        kind = "push" if self._finish is None else "pull"
        count = sum(not request.is_done for request in self._requests)
        failed = next((request.error for request in self._requests if request.error is not None), None)
        if failed is not None:
            state = f"failed: {failed}"
        elif self._finished or not count:
            state = "done"
        else:
            state = f"waits for {count} of {len(self._requests)} servers"
        return f"<Ticket of a {kind}: {state}>"

    def wait(self) -> None:
        """Wait until every server has acknowledged the push, or sent the values of the pull.

        Raises the error of a server, DeadlineError, or ConnectionLostError.
        """
        if not self._finished:
            self._wait()

    def _wait(self) -> None:
        with recording.waiting(), self._servers.lock:
            if self._finished:  # another thread has waited for the ticket
                return
            try:
                for request in self._requests:
                    self._servers.wait(request)
            except PacelineError:
                for request in self._requests:
                    self._servers.core.report(request)
                raise
            if self._finish is not None:
                self._result = self._finish()
            self._finished = True

    def done(self) -> bool:
        """Return whether :meth:`wait` would return immediately."""
        if self._finished:
            return True
        with self._servers.lock:
            are_done = [self._servers.poll(request) for request in self._requests]
            return all(are_done)

    def result(self) -> Any:
        """Wait; return the values (float32 [n, dim] or [n]) of a pull, or None for a push."""
        self.wait()
        return self._result

    @property
    def dropped(self) -> bool:
        """Whether a server has dropped the gradient as too stale (policy ``drop:N``). Waits if necessary."""
        self.wait()
        return any(request.flags & DROPPED for request in self._requests)


_CONNECT_S = 1.0
_NO_KEYS = np.empty(0, np.uint64)
_Result = TypeVar("_Result")


class Servers:
    """The connections of one client, and its core. Callers hold `lock`, unless a method's docstring says otherwise.

    `watch` receives views in another thread; :meth:`newest` applies the newest view.
    """

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        core: ClientCore,
        watch: RouteWatch,
        *,
        timeout_s: float,
        reconnect_s: float,
    ) -> None:
        self.lock: threading.RLock | NoLock = threading.RLock()
        """Held while a request is sent or waited for."""
        self.core = core
        self.watch = watch
        self.routes: Routes = no_routes()
        self.connections: list[ServerConnection] = []
        self.specs: dict[int, TableSpec] = {}
        """The tables that this client has declared, by number."""
        self.timeout_s = timeout_s
        self.join_requests: list[RequestJoin] = []
        self.cuts = CutWatch()
        self._reconnect_s = reconnect_s
        self._by_server: dict[int, ServerConnection] = {}
        self._copies = copies = Copies()
        self._connection_to = partial(
            ServerConnection,
            transport,
            hello,
            core,
            watch,
            copies,
            specs=self.specs,
            timeout_s=timeout_s,
            reconnect_s=reconnect_s,
        )
        # Instructions of the core that are not carried out yet, and requests that wait for earlier answers.
        self._to_do: deque[Instruction | Request] = deque()
        self._closed_bytes = (0, 0)
        self.is_closed = False
        own(self)

    def disown(self) -> None:
        self.lock = NoLock()

    def open(self, has_replicas: bool) -> None:
        """Wait for the first view, and connect; with replicas, servers may be unreachable. Takes the lock."""
        with self.lock:
            self._take(self.watch.wait_newer(0, self.timeout_s))
            for connection in self.connections:
                try:
                    connection.connect(min(self.timeout_s, _CONNECT_S if has_replicas else 10.0))
                except (AddressError, ConnectionLostError, DeadlineError):
                    if not has_replicas:
                        raise
                    # The server is dead or stopped: a request to this server will reconnect, or the next view excludes
                    # the server.

    def newest(self) -> list[ServerConnection]:
        if self.watch.must_follow:
            self.follow()
        if not self.connections:
            if self.routes.lost and not self.is_closed:
                raise self.routes.loss()
            raise UsageError("this client is closed: connect again")
        return self.connections

    def follow(self) -> None:
        """Apply the newest view: connect to its servers, and resend unanswered requests. Takes the lock.

        If a server has rejected a request because of a newer view, this method waits for the view. Raises DeadlineError
        if the view does not come.
        """
        with self.lock:
            while not self.is_closed or self.connections:
                self.watch.must_follow = False
                newest = self.watch.newest
                try:
                    if self._to_do:  # instructions that an exception (out of memory, Ctrl-C) has interrupted
                        self.execute(())
                    if newest is not None and newest.version > self.core.version:
                        self.execute(self._take(newest))
                    elif any(connection.session.awaits_view for connection in self.connections):
                        patience_s = min(self._reconnect_s, self.timeout_s) if self.is_closed else self.timeout_s
                        self.watch.wait_newer(self.core.version, patience_s)
                    else:
                        self.cuts.reconnect(self.connections)  # other processes may wait for the resent requests
                        return
                except BaseException:
                    self.watch.must_follow = True
                    raise

    def _take(self, routes: Routes) -> list[Instruction]:
        """Apply new routes; return the core's instructions. Does not wait for a server."""
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
        """Carry out the core's instructions. After an exception, :meth:`follow` carries out the remaining ones."""
        self._to_do.extend(instructions)
        answer_bytes: dict[int, int] = {}
        while self._to_do:
            instruction = self._to_do[0]
            if isinstance(instruction, Transmit):  # may raise MemoryError
                instruction.request.payload = fill(instruction.request, instruction.pieces, self.core.version)
            if isinstance(instruction, Request):
                make_room(self._by_server[instruction.server], exchange_of(instruction).num_answer_bytes)
            self._to_do.popleft()
            match instruction:
                case Request():
                    self._by_server[instruction.server].start(instruction)
                case Transmit(request):
                    num_bytes = exchange_of(request).num_answer_bytes
                    answer_bytes[request.server] = answer_bytes.get(request.server, 0) + num_bytes
                    if answer_bytes[request.server] > max(MAX_ANSWER_BYTES, num_bytes):
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
                    self._closed_bytes = self._closed_bytes[0] + received, self._closed_bytes[1] + sent
                    connection.depart()
                    connection.close()
                case Connect(server):
                    with contextlib.suppress(AddressError, PacelineError):  # the next request to this server reconnects
                        self._by_server[server].connect(min(self.timeout_s, _CONNECT_S))
                case RequestJoin(_, round_):
                    current = [request for request in self.join_requests if request.round == round_]
                    self.join_requests = [*current, instruction]

    def check_not_lost(self, buckets: Buckets) -> None:
        if buckets & self.routes.lost:
            raise self.routes.loss()

    def owner_of(self, bucket: int) -> ServerConnection:
        """Return the connection to a bucket's primary in the newest view.

        Raises ConnectionLostError without a primary.
        """
        connections = self.newest()
        self.check_not_lost(1 << bucket)
        return connections[int(self.routes.owners[bucket])]

    def wait(self, request: Request) -> None:
        while not request.is_done:
            self._progress(request)
        self.cuts.waiting_on = None
        if request.error is not None:
            if isinstance(request.error, DeadlineError):
                print_stall(f"paceline: {request.error}")
            self.core.report(request)
            raise request.error

    def _progress(self, request: Request) -> None:
        """Receive one answer, or apply a view, as a step towards the answer of `request`."""
        while request.replacements is not None:
            request = next(replacement for replacement in request.replacements if not replacement.is_done)
        connection = self._by_server[request.server]
        awaits_view = connection.session.awaits_view
        if self._to_do or (awaits_view and not (request.kind is RequestKind.CALL and self.watch.has(request.server))):
            self.follow()
        else:
            self.cuts.waiting_on = connection
            if self.cuts.has_cuts:
                self.cuts.reconnect(self.connections)
            connection.receive_one(request)

    def poll(self, request: Request) -> bool:
        """Process the answers that have arrived; return whether `request` is done."""
        try:
            while not request.is_done:
                if request.replacements is not None:
                    if not all(self.poll(replacement) for replacement in request.replacements):
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
            pass  # a wait for the request raises the error
        return request.is_done

    def drain(self) -> None:
        """Wait until all requests are answered; raise the first unreported error."""
        while True:
            busy = next((found.session for found in self.newest() if found.session.in_flight), None)
            if busy is None:
                break
            self._progress(next(iter(busy.in_flight.values())))
        self.raise_failures()

    def request(self, kind: int, table: int, *, flags: int = 0, ticks: bool = False, ahead: int = 0) -> DataRequest:
        """Return a table's request without arrays; a push gets the next number."""
        core = self.core
        if ticks:
            self.check_may_tick()
            flags |= TICKS
        sequence = core.sequence if kind == PULL else core.next_sequence()
        return DataRequest(kind, table, flags, core.clock + ahead, sequence)

    def check_may_tick(self) -> None:
        """Raise UsageError unless this client takes part in iterations; raise the first unreported error."""
        self.core.check_takes_part()
        if self.core.failures:
            self.raise_failures()

    def raise_failures(self) -> None:
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
        """Wait until all pushes of finished iterations are on every server of their chains."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            self.newest()
            session = self.core.unstable()
            if session is None:
                return
            connection = self._by_server[session.server]
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"server {connection.rank} did not complete and replicate this worker's iterations with numbers "
                    f"below {self.core.clock} within {self.timeout_s:g} s"
                )
            table = HEADER.unpack(exchange_of(session.retained[0]).frame[0])[4]
            # The server answers a read of the current iteration only when all earlier iterations are stable.
            self.wait(connection.send(DataRequest(PULL, table, clock=self.core.clock, parts=(_NO_KEYS,))))

    def call_all(self, message: msgspec.Struct, result: Any = Any) -> list[Any]:
        """Send a control message to every server of the newest view; return the answers in the order of `connections`.

        Each answer is decoded as `result`. Takes the lock.
        """
        results: dict[int, Any] = {}

        def call_remaining() -> list[Any]:
            while True:
                connections = self.newest()
                servers = [connection.session.server for connection in connections]
                position = next((i for i, server in enumerate(servers) if server not in results), None)
                if position is None:
                    return [results[server] for server in servers]
                results[servers[position]] = connections[position].call(message, result, sequence=sequence)[0]

        with self.lock:
            sequence = self.core.next_sequence()
            return self.retry(call_remaining)

    def retry(self, function: Callable[[], _Result]) -> _Result:
        """Call a function until no server rejects it because of an old view."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            version = self.core.version
            try:
                return function()
            except StaleEpochError:
                self.watch.wait_newer(version, self.timeout_s, deadline)
                self.follow()

    def byte_counts(self) -> tuple[int, int]:
        counts = [connection.byte_counts() for connection in self.connections]
        received, sent = self._closed_bytes
        return received + sum(count[0] for count in counts), sent + sum(count[1] for count in counts)

    def abort(self, reason: PacelineError | None = None) -> None:
        """Make all current and later requests raise `reason` (default: the client is closed).

        May be called from any thread.
        """
        reason = reason or UsageError(CLOSED)
        self.watch.fail(reason)
        for connection in self.connections:
            connection.interrupt(reason)

    def close(self) -> None:
        """Finish the requests in flight, and close the connections. Takes the lock."""
        self.is_closed = True
        try:
            with self.lock:
                for connection in self.connections:
                    connection.patience_s = min(self._reconnect_s, self.timeout_s)
                for _ in range(len(self.connections) + 1):  # a lost connection interrupts a wait once
                    try:
                        self.drain()
                        break
                    except DeadlineError:
                        break
                    except PacelineError:  # ignore the error: callers that need the error have waited or called flush()
                        pass
        finally:
            for connection in self.connections:
                connection.close()
            self.connections = []
            self.watch.fail(UsageError("this client is closed: connect again"))

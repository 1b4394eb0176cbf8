"""A client's connection to one server: requests in flight, answers matched to them, and what a cut asks for.

Requests are pipelined: they are written in the caller's thread, and their answers are read when somebody waits. (A
background thread per client was measured and dropped: handing a request over costs 20 to 40 µs, as much as the whole
round trip of a small one.) Until a request is answered it is kept, so that after a cut it can be sent again; the server
tells a push that it has already applied by its number.

When the server has a newer map of the cluster, or is on it no more, the connection is *stuck*: nothing is sent any more
until the client has settled (:mod:`~paceline.ps.client.resending`), which takes all that is not answered and sends it
again by the new map. Under sequential consistency answered pushes are kept too, until their iteration is safe, while
any server is behind the primaries, where it may come to lead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.errors import AddressError, ConnectionLostError, PacelineError, PeerError, StaleEpochError, UsageError
from paceline.protocol.buckets import Buckets
from paceline.ps import messages
from paceline.ps.client.buffer_pool import Copies
from paceline.ps.client.no_channel import NoChannel
from paceline.ps.client.routes import MapWatch
from paceline.ps.messages import ACK, PULL, PUSH, PUSH_PULL, RESULT, SYNCED, TICK, VALUES
from paceline.transport import (
    HEADER,
    MAGIC,
    PROTOCOL_VERSION,
    Channel,
    Endpoint,
    Header,
    Hello,
    Transport,
    read_meta,
)
from paceline.transport.backoff import Backoff

_PADS = tuple(bytes(size) for size in range(8))
_NOTHING = np.empty(0, np.uint8)
_MAX_PENDING = 256
_LARGE_BYTES = 1 << 19
# More answers than the server keeps for us (Limits.max_backlog_bytes), and both ends would wait for the other to read:
# large ones are received before more is asked for, and of small ones _MAX_PENDING are few enough.
_MAX_AWAITED_BYTES = 1 << 26


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.1
_CONNECT_S = 1.0
_KIND_AT = 3  # in a packed header
_NO_KEYS = np.empty(0, np.uint64)


class Pending:
    """A request in flight."""

    __slots__ = (
        "body", "done", "error", "flags", "frame", "is_private", "is_told", "meta", "moved", "number", "out", "parents",
    )  # fmt: skip

    def __init__(self, number: int, frame: tuple[Any, ...], out: Any) -> None:
        self.number = number
        self.frame = frame
        self.out = out
        self.done = False
        self.is_told = False  # somebody knows of its failure
        self.error: PacelineError | None = None
        self.flags = 0
        self.meta = b""
        self.body: memoryview | None = None
        self.is_private = False  # its arrays are nobody else's
        self.moved: list[tuple[ServerConnection, Pending]] | None = None  # what was sent again in its place
        self.parents: list[tuple[Pending, Callable[[], None] | None]] | None = None  # for which it was sent again

    def settle(self, failures: list[Pending]) -> None:
        """Be done if all that was sent again in its place is; a failure that nobody waits for goes to `failures`."""
        assert self.moved is not None
        for _, child in self.moved:
            if not child.done:
                return
            self.flags |= child.flags
            self.error = self.error or child.error
        self.done = True
        self.frame = ()
        if self.error is not None and self.parents is None and not self.is_told:
            failures.append(self)
        _tell_parents(self, failures)


class Kept:
    """A push that is answered and not safe yet."""

    __slots__ = ("buckets", "clock", "frame", "layout", "memory", "sequence")

    def __init__(self, frame: tuple[Any, ...], memory: Any, clock: int, sequence: int) -> None:
        self.frame = frame
        self.memory = memory
        self.clock = clock
        self.sequence = sequence
        self.layout: Buckets | None = None  # of a range: the buckets that its gradients are of; None: its server's
        self.buckets: Buckets | None = None  # what its server has of it; None: all


class ServerConnection:
    """Requests to one server, in order. Not thread-safe: the client holds its lock.

    `watch` tells whether the server is still there; `settle` is the client's, to be called when the connection is
    stuck. `failures` are the client's requests that have failed and of which nobody was told.
    """

    def __init__(
        self,
        transport: Transport,
        target: Endpoint,
        hello: Hello,
        *,
        rank: int,
        incarnation: int,
        timeout_s: float,
        reconnect_s: float,
        watch: MapWatch,
        settle: Callable[[], None],
        failures: list[Pending],
        copies: Copies,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.version = 0
        """The version of the map that data requests are made by."""
        self.keeps = False
        """Whether pushes are kept until they are safe."""
        self.is_stuck = False
        """Whether the client has to settle before anything is answered here."""
        self.kept: deque[Kept] = deque()
        self.patience_s = timeout_s
        """How long to wait for a server that cannot be reached and is on the map."""
        self._transport = transport
        self._target = target
        self._hello = hello
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._watch = watch
        self._settle = settle
        self._pending: dict[int, Pending] = {}
        self._num_bodies = 0  # answers under way that may have one
        self._strays: set[int] = set()  # answers under way that nobody wants any more
        self._refused: set[int] = set()  # requests that are not carried out, or not sent
        self._synced: tuple[int, int, int] | None = None
        self._number = 0
        self.failures = failures
        self._copies = copies
        self._gone = [0, 0]
        self._durable = 0
        self._lost: PacelineError | None = None
        self._is_cut = True
        self._channel: Channel = NoChannel(target.tcp)

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._pending)

    def connect(self, timeout_s: float) -> None:
        """Connect for the first time. Raises what :meth:`Transport.connect` does."""
        self._channel = self._transport.connect(self._target, self._hello, timeout_s=timeout_s)
        self._is_cut = False

    # Requests.

    def send(
        self, kind: int, table: int, flags: int, clock: int, sequence: int, parts: Sequence[Any], out: Any = None
    ) -> Pending:
        """Send a data frame; `parts` are C-contiguous arrays, `out` an array for the values of the answer."""
        if len(self._pending) >= _MAX_PENDING and not self.is_stuck:
            self._receive_one(next(iter(self._pending.values())))
        if self._num_bodies and out is not None and out.nbytes >= _LARGE_BYTES:
            self._make_room(out.nbytes)
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        size = 0
        for part in parts:
            size += part.nbytes
        header = HEADER.pack(
            MAGIC, PROTOCOL_VERSION, kind, flags, table, number, self.version, clock, sequence, 0, size
        )  # fmt: skip
        pad = -size & 7
        pending = Pending(number, (header, *parts, _PADS[pad]) if pad else (header, *parts), out)
        return self._start(pending)

    def send_now(
        self, kind: int, table: int, clock: int, sequence: int, parts: Sequence[Any], out: Any = None
    ) -> Pending:
        """Send again what was sent before: nothing is received meanwhile, and if there is no connection, it waits."""
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        size = sum(part.nbytes for part in parts)
        header = HEADER.pack(
            MAGIC, PROTOCOL_VERSION, kind, 0, table, number, self.version, clock, sequence, 0, size
        )  # fmt: skip
        pending = Pending(number, (header, *parts, _PADS[-size & 7]), out)
        pending.is_private = True
        self._pending[number] = pending
        if out is not None:
            self._num_bodies += 1
        if not self._is_cut:
            try:
                self._channel.send(*pending.frame)
            except ConnectionLostError:
                self._cut()
            except PacelineError:
                self._finish(pending)
                raise
        return pending

    def say_synced(self, clock: int, counts: bool, rank: int) -> None:
        """Tell the server that all was sent again; also after every later cut, since nobody answers this."""
        self._synced = (clock, int(counts), rank)
        if not self._is_cut:
            try:
                self._send_synced()
            except ConnectionLostError:
                self._cut()

    def forget_synced(self) -> None:
        """Do not repeat after a cut that this worker takes part: it retires."""
        if self._synced is not None:
            self._synced = (self._synced[0], 0, self._synced[2])

    def _send_synced(self) -> None:
        if self._synced is not None:
            clock, flags, rank = self._synced
            self._channel.send_frame(SYNCED, flags=flags, epoch=self.version, clock=clock, sequence=rank)

    def call(self, message: msgspec.Struct, result: Any = Any, body: Sequence[Any] = ()) -> tuple[Any, memoryview]:
        """Send a control message and wait; return the answer, decoded as `result`, and the body that came with it.

        Raises StaleEpochError if the server is on the map no more, PeerError for an answer of another kind.
        """
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        meta = messages.encode(message)
        size = sum(part.nbytes for part in body)
        header = HEADER.pack(
            MAGIC, PROTOCOL_VERSION, messages.CALL, 0, 0, number, 0, 0, 0, len(meta), size
        )  # fmt: skip
        pending = Pending(number, (header, meta + _PADS[-len(meta) & 7], *body, _PADS[-size & 7]), None)
        pending.body = memoryview(b"")
        pending.is_told = True
        self.wait(self._start(pending))
        return read_meta(pending.meta, result, f"an answer of server {self.rank}"), pending.body

    def wait(self, pending: Pending) -> None:
        """Wait for an answer; raise what the server reported."""
        while not pending.done:
            if pending.moved is None and not self.is_stuck:
                self._receive_one(pending)
            else:
                self._wait_elsewhere(pending)
        if pending.error is not None:
            self.forget(pending)
            raise pending.error

    def _wait_elsewhere(self, pending: Pending) -> None:
        """Get on with a request that was sent again, or is to be."""
        if pending.moved is not None:
            for connection, child in pending.moved:
                while not child.done:
                    connection.wait_one(child)
        elif pending.body is not None and self._watch.has(self.incarnation):
            self._receive_one(pending)
        else:
            self._settle()

    def wait_one(self, pending: Pending) -> None:
        """Get nearer to an answer."""
        if pending.moved is None and not self.is_stuck:
            self._receive_one(pending)
        else:
            self._wait_elsewhere(pending)

    def forget(self, pending: Pending) -> None:
        """Do not raise a request's failure, now or later, to somebody else: its ticket has raised one."""
        pending.is_told = True
        if pending in self.failures:
            self.failures.remove(pending)

    def poll(self, pending: Pending) -> bool:
        """Take what has arrived; return whether `pending` is answered."""
        try:
            while not pending.done:
                if pending.moved is not None:
                    waiting = [child for connection, child in pending.moved if not connection.poll(child)]
                    if waiting:
                        return False
                elif self.is_stuck:
                    if not self._watch.is_newer_than(self.version):
                        return False
                    self._settle()
                elif self._channel.poll(0.0):
                    self._receive_one(pending)
                else:
                    return False
        except PacelineError:
            pass  # whoever waits is told
        return pending.done

    def raise_failures(self) -> None:
        """Raise the first failure of a request that nobody has waited for."""
        if self._lost is not None:
            raise self._lost
        if self.failures:
            failed = self.failures[0]
            self.failures.clear()
            assert failed.error is not None
            raise failed.error

    def receive_next(self) -> None:
        """Get nearer to the answer that has been awaited longest."""
        self.wait_one(next(iter(self._pending.values())))

    def byte_counts(self) -> tuple[int, int]:
        """Return the bytes received and sent."""
        statistics = self._channel.statistics()
        return self._gone[0] + statistics.bytes_received, self._gone[1] + statistics.bytes_sent

    def wake(self) -> None:
        """Break the connection from any thread: one that waits for an answer looks if the server is still there."""
        self._channel.close()

    def revive(self) -> None:
        """Try once to connect again if the connection is known to be cut."""
        if self._is_cut and self._lost is None and self._watch.has(self.incarnation):
            try:
                self._connect_again()
            except (AddressError, PeerError):
                self._cut()

    def abort(self) -> None:
        """Close the connection from any thread; one that waits for an answer is told so, and all that ask later."""
        if self._lost is None:
            self._lost = UsageError("this client was closed before the server's answer came")
        self._channel.close()

    def close(self) -> None:
        """Close the connection; what is not answered never will be. Idempotent."""
        if self._lost is None:
            self._fail_all(UsageError("this client was closed before the server's answer came"))
        self._channel.close()

    # Settling.

    def release(self) -> list[Pending]:
        """Give up all data requests, in order; whoever takes them sends them again. No answer to them counts any more.

        Ticks are done: the client says its clock behind what is sent again. Calls are awaited still, or fail with
        StaleEpochError if the server is gone.
        """
        released = []
        is_there = self._watch.has(self.incarnation)
        for number, pending in list(self._pending.items()):
            if pending.body is not None:
                if not is_there:
                    self._fail(pending, self._left())
                continue
            del self._pending[number]
            if pending.out is not None:
                self._num_bodies -= 1
            if number not in self._refused and not self._is_cut:
                self._strays.add(number)
                self._num_bodies += 1
            if pending.frame[0][_KIND_AT] == TICK:
                pending.done = True
            else:
                released.append(pending)
        self._refused.clear()
        self.is_stuck = False
        self._durable = 0  # of the buckets that it led
        return released

    def _left(self) -> StaleEpochError:
        return StaleEpochError(f"server {self.rank} is no part of the cluster any more")

    def _be_stuck(self) -> None:
        self.is_stuck = True
        self._watch.is_unsettled = True

    def _cut(self) -> None:
        """Note that the connection is no more."""
        self._channel.close()
        self._is_cut = True
        self._num_bodies -= len(self._strays)
        self._strays.clear()

    # Answers.

    def _start(self, pending: Pending) -> Pending:
        self._pending[pending.number] = pending
        if pending.out is not None or pending.body is not None:
            self._num_bodies += 1
        if self.is_stuck and (pending.body is None or not self._watch.has(self.incarnation)):
            if pending.body is not None:
                self._fail(pending, self._left())
            else:
                self._refused.add(pending.number)
            return pending
        try:
            self._channel.send(*pending.frame)
        except ConnectionLostError as error:
            self._reconnect(error)
        except PacelineError:
            self._finish(pending)
            raise
        except BaseException:  # Ctrl-C, perhaps in mid-frame: the next request connects again and sends all again
            self._cut()
            raise
        return pending

    def _make_room(self, more_bytes: int) -> None:
        while self._pending and not self.is_stuck:
            awaited = sum(pending.out.nbytes for pending in self._pending.values() if pending.out is not None)
            if awaited + more_bytes <= _MAX_AWAITED_BYTES:
                return
            self._receive_one(next(iter(self._pending.values())))

    def _receive_one(self, awaited: Pending) -> None:
        """Receive one answer, most likely that of `awaited`."""
        channel = self._channel
        channel.last_header = None
        try:
            if awaited.out is not None and self._num_bodies == 1:
                header = channel.receive(awaited.out, self._timeout_s + 5.0)
                pending = self._pending.get(header.request)
                if pending is not awaited and header.body_bytes:
                    raise self._unexpected(header)
            elif not self._num_bodies and awaited.body is None:
                header = channel.receive(_NOTHING, self._timeout_s + 5.0)
                pending = self._pending.get(header.request)
            else:
                header = channel.receive_header(self._timeout_s + 5.0)
                pending = self._pending.get(header.request)
                self._receive_parts(channel, header, pending)
        except ConnectionLostError as error:
            self._reconnect(error)
            return
        except PacelineError as error:
            failed = channel.error_header()
            if failed is None:
                raise
            self._failed(failed, error)
            return
        except BaseException:
            self._cut()
            raise
        if pending is None:
            self._forget_stray(header.request)
            return  # an answer that came twice, or that nobody wants any more
        self._check_answer(pending, header)
        pending.flags = header.flags
        if self.keeps:
            self._note_durable(pending, header)
        self._finish(pending)

    def _check_answer(self, pending: Pending, header: Header) -> None:
        """Raise PeerError unless this is what was asked for: values are only values if all of them came."""
        if pending.out is not None:
            is_it = header.kind == VALUES and header.body_bytes == pending.out.nbytes
        elif pending.body is not None:
            is_it = header.kind == RESULT
        else:
            is_it = not header.body_bytes and header.kind in (ACK, VALUES)
        if not is_it:
            raise self._unexpected(header)

    def _failed(self, header: Header, error: PacelineError) -> None:
        """Take a server's error report."""
        pending = self._pending.get(header.request)
        if pending is None:
            if not self._forget_stray(header.request):
                raise error
        elif isinstance(error, StaleEpochError) and pending.body is None:
            self._refused.add(pending.number)
            self._be_stuck()
        else:
            self._fail(pending, error)

    def _forget_stray(self, number: int) -> bool:
        if number not in self._strays:
            return False
        self._strays.discard(number)
        self._num_bodies -= 1
        return True

    def _receive_parts(self, channel: Channel, header: Header, pending: Pending | None) -> None:
        if pending is None:
            return
        pending.meta = channel.receive_meta()
        if not header.body_bytes:
            return
        if pending.body is not None:
            pending.body = memoryview(np.empty(header.body_bytes, np.uint8))  # type: ignore[arg-type]
            channel.receive_into(pending.body)
        elif pending.out is not None and header.body_bytes == pending.out.nbytes:
            channel.receive_into(pending.out)
        else:
            raise self._unexpected(header)

    def _finish(self, pending: Pending) -> None:
        pending.done = True
        pending.frame = ()
        del self._pending[pending.number]
        if pending.out is not None or pending.body is not None:
            self._num_bodies -= 1
        if pending.parents is not None:
            _tell_parents(pending, self.failures)

    def _fail(self, pending: Pending, error: PacelineError) -> None:
        pending.error = error
        self._finish(pending)
        if not pending.is_told and pending.parents is None:
            self.failures.append(pending)

    def _fail_all(self, error: PacelineError) -> None:
        """Give up: whoever waits, now or later, is told why."""
        self._lost = error
        for pending in list(self._pending.values()):
            self._fail(pending, error)
        self.failures.clear()

    # Pushes that are answered and not safe.

    def _note_durable(self, pending: Pending, header: Header) -> None:
        if header.kind != ACK and header.kind != VALUES:
            return
        if header.clock > self._durable:
            self._durable = header.clock
            self.let_go(header.clock)
        frame = pending.frame
        sent = HEADER.unpack(frame[0])
        kind, clock, sequence = sent[2], sent[7], sent[8]
        if kind in (PUSH, PUSH_PULL) and clock >= self._durable:
            memory = None
            if not pending.is_private:
                copies, memory = self._copies.copy(frame[1:3])
                frame = (frame[0], *copies)
            self.kept.append(Kept(frame, memory, clock, sequence))

    def let_go(self, clock: int) -> None:
        """Keep no longer what belongs to iterations below `clock`."""
        kept = self.kept
        while kept and kept[0].clock < clock:
            memory = kept.popleft().memory
            if memory is not None:
                self._copies.give_back(memory)

    def forget_kept(self, gone: Collection[int]) -> None:
        """Keep some pushes (by id) no longer."""
        staying: deque[Kept] = deque()
        for each in self.kept:
            if id(each) not in gone:
                staying.append(each)
            elif each.memory is not None:
                self._copies.give_back(each.memory)
        self.kept = staying

    def wait_durable(self, clock: int) -> None:
        """Wait until what is kept of iterations below `clock` is safe; may return early if the connection is stuck."""
        for each in [each for each in self.kept if each.clock < clock][:1]:
            table = HEADER.unpack(each.frame[0])[4]
            self.wait(self.send(PULL, table, 0, clock, 0, (_NO_KEYS,)))  # a read that the gate holds until then

    def _unexpected(self, header: Header) -> PeerError:
        self._cut()
        return PeerError(
            f"server {self.rank} answered request {header.request} with a frame of kind {header.kind} and "
            f"{header.body_bytes} bytes that nobody asked for; the connection is closed"
        )

    def _reconnect(self, cause: ConnectionLostError) -> None:
        """Connect again and send again all that is not answered, in order; or be stuck, if the server is gone."""
        self._cut()
        began, backoff = time.monotonic(), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            if self._lost is not None:  # told by another thread
                self._fail_all(self._lost)
                raise self._lost
            if not self._watch.has(self.incarnation):
                self._be_stuck()
                for pending in [pending for pending in self._pending.values() if pending.body is not None]:
                    self._fail(pending, self._left())
                return
            try:
                self._connect_again()
                return
            except (AddressError, PeerError):
                self._cut()
                # While the scheduler may still declare it dead, there may be others that have its part.
                patience_s = self._reconnect_s if self._watch.has_failed else self.patience_s
                if time.monotonic() - began > max(patience_s, self._reconnect_s):
                    lost = ConnectionLostError(
                        f"server {self.rank} is gone ({cause}), and with it its part of the tables: start again from "
                        "the last saved model"
                    )
                    self._fail_all(lost)
                    raise lost from None
                self._watch.pause(backoff.next_s())
            except BaseException:
                self._cut()
                raise

    def _connect_again(self) -> None:
        channel = self._transport.connect(self._target, self._hello, timeout_s=min(self._reconnect_s, _CONNECT_S))
        statistics = self._channel.statistics()
        self._gone = [self._gone[0] + statistics.bytes_received, self._gone[1] + statistics.bytes_sent]
        self._channel = channel
        self._is_cut = False
        for pending in list(self._pending.values()):
            if pending.number not in self._refused:
                channel.send(*pending.frame)
        self._send_synced()


def _tell_parents(pending: Pending, failures: list[Pending]) -> None:
    """Put values where they belong, and let those be done that waited only for this."""
    for parent, put in pending.parents or ():
        if put is not None and pending.error is None:
            put()
        if not parent.done and parent.moved is not None:
            parent.settle(failures)

"""A client's connection to one server: requests in flight, answers matched to them, and what a cut asks for.

Requests are pipelined: they are written in the caller's thread, and their answers are read when somebody waits. (A
background thread per client was measured and dropped: handing a request over costs 20 to 40 µs, as much as the whole
round trip of a small one.) Until a request is answered it is kept, so that after a cut it can be sent again; the server
tells a push that it has already applied by its number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.errors import AddressError, ConnectionLostError, PacelineError, PeerError, UsageError
from paceline.ps import messages
from paceline.transport import HEADER, MAGIC, PROTOCOL_VERSION, Channel, Endpoint, Header, Hello, Kind, Transport

_PADS = tuple(bytes(size) for size in range(8))
_NOTHING = np.empty(0, np.uint8)
_MAX_PENDING = 256
_LARGE_BYTES = 1 << 19
# More answers than the server keeps for us (Limits.max_backlog_bytes), and both ends would wait for the other to read:
# large ones are received before more is asked for, and of small ones _MAX_PENDING are few enough.
_MAX_AWAITED_BYTES = 1 << 26


class Pending:
    """A request in flight."""

    __slots__ = ("body", "done", "error", "flags", "frame", "is_told", "meta", "number", "out")

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


class ServerConnection:
    """Requests to one server, in order. Not thread-safe: the client holds its lock."""

    def __init__(
        self,
        transport: Transport,
        target: Endpoint,
        hello: Hello,
        *,
        rank: int,
        timeout_s: float,
        reconnect_s: float,
    ) -> None:
        self.rank = rank
        self._transport = transport
        self._target = target
        self._hello = hello
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._pending: dict[int, Pending] = {}
        self._num_bodies = 0
        self._number = 0
        self._failures: list[Pending] = []
        self._gone = [0, 0]
        self._lost: PacelineError | None = None
        self._channel: Channel = transport.connect(target, hello, timeout_s=min(timeout_s, 10.0))

    # Requests.

    def send(
        self, kind: int, table: int, flags: int, clock: int, sequence: int, parts: Sequence[Any], out: Any = None
    ) -> Pending:
        """Send a data frame; `parts` are C-contiguous arrays, `out` an array for the values of the answer."""
        if len(self._pending) >= _MAX_PENDING:
            self._receive_one(next(iter(self._pending.values())))
        if self._num_bodies and out is not None and out.nbytes >= _LARGE_BYTES:
            self._make_room(out.nbytes)
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        size = 0
        for part in parts:
            size += part.nbytes
        header = HEADER.pack(
            MAGIC, PROTOCOL_VERSION, kind, flags, table, number, 0, clock, sequence, 0, size
        )  # fmt: skip
        pad = -size & 7
        pending = Pending(number, (header, *parts, _PADS[pad]) if pad else (header, *parts), out)
        return self._start(pending)

    def call(self, message: msgspec.Struct, body: Sequence[Any] = ()) -> tuple[Any, memoryview]:
        """Send a control message and wait; return the decoded result, and the body that came with it."""
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        meta = messages.encode(message)
        size = sum(part.nbytes for part in body)
        header = HEADER.pack(
            MAGIC, PROTOCOL_VERSION, messages.CALL, 0, 0, number, 0, 0, 0, len(meta), size
        )  # fmt: skip
        pending = Pending(number, (header, meta + _PADS[-len(meta) & 7], *body, _PADS[-size & 7]), None)
        pending.body = memoryview(b"")
        self.wait(self._start(pending))
        return msgspec.msgpack.decode(pending.meta), pending.body

    def wait(self, pending: Pending) -> None:
        """Wait for an answer; raise what the server reported."""
        while not pending.done:
            self._receive_one(pending)
        if pending.error is not None:
            self.forget(pending)
            raise pending.error

    def forget(self, pending: Pending) -> None:
        """Do not raise a request's failure, now or later, to somebody else: its ticket has raised one."""
        pending.is_told = True
        if pending in self._failures:
            self._failures.remove(pending)

    def poll(self, pending: Pending) -> bool:
        """Take what has arrived; return whether `pending` is answered."""
        try:
            while not pending.done and self._channel.poll(0.0):
                self._receive_one(pending)
        except PacelineError:
            pass  # whoever waits is told
        return pending.done

    def raise_failures(self) -> None:
        """Raise the first failure of a request that nobody has waited for."""
        if self._lost is not None:
            raise self._lost
        if self._failures:
            failed, self._failures = self._failures[0], []
            assert failed.error is not None
            raise failed.error

    def drain(self) -> None:
        """Wait until nothing is in flight; raise the first failure."""
        while self._pending:
            self._receive_one(next(iter(self._pending.values())))
        self.raise_failures()

    def byte_counts(self) -> tuple[int, int]:
        """Return the bytes received and sent."""
        statistics = self._channel.statistics()
        return self._gone[0] + statistics.bytes_received, self._gone[1] + statistics.bytes_sent

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

    # Answers.

    def _start(self, pending: Pending) -> Pending:
        self._pending[pending.number] = pending
        if pending.out is not None or pending.body is not None:
            self._num_bodies += 1
        try:
            self._channel.send(*pending.frame)
        except ConnectionLostError as error:
            self._reconnect(error)
        except PacelineError:
            self._finish(pending)
            raise
        except BaseException:  # Ctrl-C, perhaps in mid-frame: the next request connects again and sends all again
            self._channel.close()
            raise
        return pending

    def _make_room(self, more_bytes: int) -> None:
        while self._pending:
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
            failed = _last_header(channel)
            if failed is None or failed.kind != Kind.ERROR or failed.request not in self._pending:
                raise
            self._fail(self._pending[failed.request], error)
            return
        except BaseException:
            channel.close()
            raise
        if pending is None:
            return  # an answer that came twice
        pending.flags = header.flags
        self._finish(pending)

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

    def _fail(self, pending: Pending, error: PacelineError) -> None:
        pending.error = error
        self._finish(pending)
        if not pending.is_told:
            self._failures.append(pending)

    def _fail_all(self, error: PacelineError) -> None:
        """Give up: whoever waits, now or later, is told why."""
        self._lost = error
        for pending in list(self._pending.values()):
            self._fail(pending, error)
        self._failures = []

    def _unexpected(self, header: Header) -> PeerError:
        self._channel.close()
        return PeerError(
            f"server {self.rank} answered request {header.request} with {header.body_bytes} bytes that nobody asked "
            "for; the connection is closed"
        )

    def _reconnect(self, cause: ConnectionLostError) -> None:
        """Connect again and send again all that is not answered, in order."""
        self._channel.close()
        if self._lost is not None:
            self._fail_all(self._lost)
            raise self._lost
        deadline = time.monotonic() + self._reconnect_s
        while True:
            try:
                channel = self._transport.connect(self._target, self._hello, timeout_s=self._reconnect_s)
                statistics = self._channel.statistics()
                self._gone = [self._gone[0] + statistics.bytes_received, self._gone[1] + statistics.bytes_sent]
                self._channel = channel
                for pending in list(self._pending.values()):
                    self._channel.send(*pending.frame)
                return
            except (AddressError, PeerError):
                self._channel.close()
                if time.monotonic() > deadline:
                    lost = ConnectionLostError(
                        f"server {self.rank} is gone ({cause}), and with it its part of the tables: start again from "
                        "the last saved model"
                    )
                    self._fail_all(lost)
                    raise lost from None
                time.sleep(0.05)
            except BaseException:
                self._channel.close()
                raise


def _last_header(channel: Channel) -> Header | None:
    return channel.last_header

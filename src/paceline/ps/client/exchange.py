"""The payload of one request: its frame, and the array for the values of its answer.

At a view change, new requests replace the unanswered requests, and :func:`fill` creates their frames from the keys of
the former frames. These new frames contain keys, never a range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.observe.stuck.processes import flight_recorder
from paceline.protocol.buckets import Buckets, bucket_set
from paceline.protocol.client import Request, RequestKind
from paceline.ps.messages import ACK, CALL, EXACT, PULL, PUSH, PUSH_PULL, RANGE, RESULT, TICK, VALUES, TableSpec
from paceline.tables.bucket_arrays import (
    buckets_of_keys,
    clip_runs,
    dense_buckets,
    positions_in,
    range_buckets,
    runs_in,
)
from paceline.tables.types import Floats, Keys
from paceline.transport import HEADER, MAGIC, PADS, PROTOCOL_VERSION, Channel, Header

_MAX_FREE = 64
_ROUND_BYTES = 4096

Memory = npt.NDArray[np.uint8]


class Copies:
    """Copies arrays into memory from a pool of released memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[Memory]] = {}  # size → released memory
        self.num_free = 0

    def copy(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[npt.NDArray[Any]], Memory]:
        """Return copies of C-contiguous arrays, and their memory for :meth:`give_back`."""
        size = 0
        for array in arrays:
            size += array.nbytes + 7 & -8
        size = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        free = self._free.get(size)
        if free:
            memory = free.pop()
            self.num_free -= 1
        else:
            memory = np.empty(size, np.uint8)
        copies, at = [], 0
        for array in arrays:
            copy = memory[at : at + array.nbytes].view(array.dtype)
            copy[:] = array
            copies.append(copy)
            at += array.nbytes + 7 & -8
        return copies, memory

    def give_back(self, memory: Memory) -> None:
        if self.num_free < _MAX_FREE:
            self._free.setdefault(len(memory), []).append(memory)
            self.num_free += 1


KINDS = {
    PUSH: RequestKind.PUSH,
    PULL: RequestKind.PULL,
    PUSH_PULL: RequestKind.PUSH_PULL,
    TICK: RequestKind.TICK,
    CALL: RequestKind.CALL,
}

_Positions: TypeAlias = npt.NDArray[np.int64]


class Exchange:
    """A request's frame and its answer: the payload of a :class:`~paceline.protocol.client.Request`."""

    __slots__ = (
        "began_s",
        "body",
        "event",
        "frame",
        "into",
        "is_call",
        "is_private",
        "memory",
        "meta",
        "out",
        "part",
        "scatter",
        "unreadable",
    )

    def __init__(
        self, frame: tuple[Any, ...], out: Any = None, is_private: bool = False, is_call: bool = False
    ) -> None:
        self.frame = frame
        self.is_call = is_call
        self.event = 0
        """The number of the request in the flight recorder; 0: not recorded."""
        self.out = self.into = out
        """The array for the values of the answer, if any.

        `into` is the same array if the values can be received in place, else None.
        """
        self.is_private = is_private
        """Whether only this request uses the arrays of the frame."""
        self.meta = b""
        self.body = _NO_BODY
        self.part: FrameKeys | None = None
        self.memory: Memory | None = None
        self.scatter: tuple[Floats, _Positions] | None = None
        """The destination of the values: an array of rows, and the positions of the rows to write."""
        self.unreadable: UsageError | None = None
        self.began_s: float | None = None
        """The time of the request; None if the launcher collects no metrics."""

    def record_end(self, *, has_failed: bool = False) -> None:
        """Record the end of the request in the flight recorder."""
        if self.event:
            flight_recorder().end(self.event, has_failed=has_failed)
            self.event = 0

    @property
    def num_answer_bytes(self) -> int:
        return 0 if self.out is None else int(self.out.nbytes)

    def receive(self, channel: Channel, header: Header) -> bool:
        """Receive the rest of an answer after its header; return False if the answer does not match the request."""
        self.meta = channel.receive_meta()
        if header.body_bytes:
            if self.is_call:
                self.body = memoryview(np.empty(header.body_bytes, np.uint8))  # type: ignore[arg-type]
                channel.receive_into(self.body)
            elif self.out is not None and header.body_bytes == self.out.nbytes:
                channel.receive_into(self.out)
            else:
                return False
        return True

    def accepts(self, header: Header) -> bool:
        if self.out is not None:
            return header.kind == VALUES and bool(header.body_bytes == self.out.nbytes)
        if self.is_call:
            return header.kind == RESULT
        return not header.body_bytes and header.kind in (ACK, VALUES)

    @property
    def buckets(self) -> Buckets:
        """The buckets of the request's keys; call :meth:`locate` first."""
        assert self.part is not None
        return self.part.buckets

    def locate(self, specs: Mapping[int, TableSpec], layout: Buckets) -> None:
        """Determine the keys of the frame; `layout` has the buckets that the server led when the frame was created."""
        if self.part is None:
            self.part = FrameKeys(self.frame, specs[HEADER.unpack(self.frame[0])[4]], layout)

    def put_values(self) -> None:
        assert self.scatter is not None
        rows, positions = self.scatter
        rows[positions] = self.out.reshape(len(positions), -1)

    def retain(self, copies: Copies) -> None:
        """Copy the arrays of the frame, because the caller may change them once the request is done."""
        if not self.is_private:
            arrays, self.memory = copies.copy(self.frame[1:3])
            self.frame = (self.frame[0], *arrays)

    def release(self, copies: Copies) -> None:
        self.frame, self.part = (), None
        if self.memory is not None:
            copies.give_back(self.memory)
            self.memory = None


def exchange_of(request: Request) -> Exchange:
    return request.payload  # type: ignore[return-value]


_NO_BODY = memoryview(b"")


class FrameKeys:
    """The keys of a frame."""

    def __init__(self, frame: tuple[Any, ...], spec: TableSpec, layout: Buckets) -> None:
        header = HEADER.unpack(frame[0])
        self.table = header[4]
        self.spec = spec
        self.flags = header[3] & EXACT
        """The flags of the frame that are copied to its replacements."""
        self._is_range = bool(header[3] & RANGE)
        self._frame = frame
        self._layout = layout
        self._keys: Keys | None = None
        if self._is_range:
            start, stop = frame[1].tolist()
            self.buckets = range_buckets(spec.size, start, stop) & layout
        elif spec.kind == "dense":
            self.buckets = bucket_set(np.unique(dense_buckets(spec.size, frame[1])).tolist())
        else:
            self.buckets = buckets_of_keys(frame[1])

    @property
    def keys(self) -> Keys:
        if self._keys is None:
            if self._is_range:
                start, stop = self._frame[1].tolist()
                runs = clip_runs(runs_in(self.spec.size, self._layout), start, stop)
                self._keys = np.concatenate([np.arange(a, b, dtype=np.uint64) for a, b in runs])
            else:
                self._keys = self._frame[1]
        return self._keys

    def positions(self, buckets: Buckets) -> _Positions | None:
        """Return the positions of the keys that are in `buckets`; None if all keys are."""
        return positions_in(self.spec, self.keys, buckets) if self.buckets & ~buckets else None

    def take(self, buckets: Buckets) -> tuple[Keys, Floats]:
        """Return the keys that are in `buckets`, and their gradients as [n, dim]."""
        rows = self._frame[2].reshape(-1, self.spec.dim)
        chosen = self.positions(buckets)
        return (self.keys, rows) if chosen is None else (self.keys[chosen], rows[chosen])


@dataclass(slots=True)
class DataRequest:
    """A data request for one server, without a number yet. With the default values it is only a tick."""

    kind: int = TICK
    table: int = 0
    flags: int = 0
    clock: int = 0
    sequence: int = 0
    parts: Sequence[Any] = ()
    """C-contiguous arrays: keys or a range, and gradients."""
    out: Any = None
    is_private: bool = False
    """Whether the caller no longer uses the parts, so that no copy is needed."""

    def of_server(self, parts: Sequence[Any], out: Any) -> DataRequest:
        return DataRequest(self.kind, self.table, self.flags, self.clock, self.sequence, parts, out, True)


def pack(data: DataRequest, request: Request, version: int) -> tuple[Any, ...]:
    size = 0
    for part in data.parts:
        size += part.nbytes
    header = HEADER.pack(
        MAGIC, PROTOCOL_VERSION, data.kind, data.flags, data.table, request.number, version, request.clock,
        request.sequence, 0, size,
    )  # fmt: skip
    pad = -size & 7
    return (header, *data.parts, PADS[pad]) if pad else (header, *data.parts)


def fill(request: Request, pieces: Sequence[tuple[Request, Buckets]], version: int) -> Exchange:
    """Return the payload of a request that replaces `pieces` of other requests.

    The flight recorder shows it as the first of these requests.
    """
    exchange = _fill(request, pieces, version)
    former = exchange_of(pieces[0][0])
    exchange.event, former.event = former.event, 0
    for replaced, _ in pieces[1:]:
        exchange_of(replaced).record_end(has_failed=True)
    return exchange


def _fill(request: Request, pieces: Sequence[tuple[Request, Buckets]], version: int) -> Exchange:
    parts = [(_keys_of(piece), buckets) for piece, buckets in pieces]
    table = parts[0][0].table
    if request.kind is RequestKind.PUSH:
        taken = [part.take(buckets) for part, buckets in parts]
        # Copy even a single part: the push may be retained, and the caller or the pool may reuse the part's memory.
        arrays = np.concatenate([keys for keys, _ in taken]), np.concatenate([rows for _, rows in taken]).reshape(-1)
        return Exchange(
            pack(DataRequest(PUSH, table, parts[0][0].flags, parts=arrays), request, version), is_private=True
        )
    [(part, buckets)] = parts
    former = exchange_of(pieces[0][0])
    chosen = part.positions(buckets)
    if chosen is None:
        keys, exchange = part.keys, Exchange((), former.out, True)
        exchange.scatter = former.scatter
    else:
        rows = former.out.reshape(len(part.keys), -1)
        keys, exchange = part.keys[chosen], Exchange((), np.empty(len(chosen) * rows.shape[1], np.float32), True)
        to_rows, positions = (rows, None) if former.scatter is None else former.scatter
        exchange.scatter = to_rows, chosen if positions is None else positions[chosen]
    exchange.frame = pack(DataRequest(PULL, table, parts=(keys,)), request, version)
    return exchange


def _keys_of(request: Request) -> FrameKeys:
    part = exchange_of(request).part
    assert part is not None
    return part

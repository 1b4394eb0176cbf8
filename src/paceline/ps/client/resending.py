"""What a client does when the map of the cluster has changed: everything that is not answered goes out again.

While nothing goes wrong each connection keeps its own requests. At a change they are gathered, in the order in which
they were made, and :class:`paceline.protocol.outbox.Outbox` says which part goes to whom; here are the frames. What
goes out again has keys, not ranges, and one frame for each push and server, whatever parts it was in before; a push
that also reads becomes a push and a pull behind it, since it may have ticked and the worker's clock is said apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import PacelineError
from paceline.protocol.buckets import Buckets, bucket_set
from paceline.protocol.outbox import Outbox, Send
from paceline.ps.client.connection import Kept, Pending, ServerConnection
from paceline.ps.client.routes import Routes
from paceline.ps.messages import PULL, PUSH, RANGE, TICKS, TableSpec
from paceline.tables.bucket_arrays import buckets_of_keys, dense_buckets, positions_in
from paceline.tables.ranges import clip_runs, range_buckets, runs_in
from paceline.tables.types import Floats, Keys
from paceline.transport import HEADER

_MAX_AWAITED_BYTES = 1 << 26

_Positions: TypeAlias = npt.NDArray[np.int64]


class _Part:
    """A frame that was sent, as keys; of a push also what is only kept."""

    __slots__ = (
        "_frame",
        "_keys",
        "_layout",
        "_spec",
        "buckets",
        "clock",
        "is_range",
        "kind",
        "pending",
        "table",
        "ticks",
    )

    def __init__(self, frame: tuple[Any, ...], spec: TableSpec, layout: Buckets, pending: Pending | None) -> None:
        header = HEADER.unpack(frame[0])
        self.kind, self.table, self.clock = header[2], header[4], header[7]
        self.is_range, self.ticks = bool(header[3] & RANGE), bool(header[3] & TICKS)
        self.pending = pending
        self._frame = frame
        self._spec = spec
        self._layout = layout
        self._keys: Keys | None = None
        if self.is_range:
            start, stop = frame[1].tolist()
            self.buckets = range_buckets(spec.size, start, stop) & layout
        elif spec.kind == "dense":
            self.buckets = bucket_set(np.unique(dense_buckets(spec.size, frame[1])).tolist())
        else:
            self.buckets = buckets_of_keys(frame[1])

    @property
    def keys(self) -> Keys:
        """Its keys, as the gradients or values are in order."""
        if self._keys is None:
            if self.is_range:
                start, stop = self._frame[1].tolist()
                runs = clip_runs(runs_in(self._spec.size, self._layout), start, stop)
                self._keys = np.concatenate([np.arange(a, b, dtype=np.uint64) for a, b in runs])
            else:
                self._keys = self._frame[1]
        return self._keys

    def positions(self, buckets: Buckets) -> _Positions | None:
        """Where the keys of some buckets are; None if that is everywhere."""
        return positions_in(self._spec, self.keys, buckets) if self.buckets & ~buckets else None

    def take(self, buckets: Buckets) -> tuple[Keys, Floats]:
        """Return the keys of some buckets, and their gradients as [n, dim]."""
        rows = self._frame[2].reshape(-1, self._spec.dim)
        chosen = self.positions(buckets)
        return (self.keys, rows) if chosen is None else (self.keys[chosen], rows[chosen])


@dataclass(eq=False, slots=True)
class _Push:
    """A push, with all of its parts that are not answered or not safe; a token of the outbox."""

    sequence: int
    parts: list[_Part] = field(default_factory=list)
    kept: list[tuple[ServerConnection, Kept, _Part]] = field(default_factory=list)
    sent: Buckets = 0


@dataclass(eq=False, slots=True)
class _Pull:
    """One part of a pull, or what a push_pull reads; a token of the outbox."""

    sequence: int
    part: _Part


def send_again(
    old: Routes,
    new: Routes,
    before: Iterable[ServerConnection],
    after: Mapping[int, ServerConnection],
    specs: Mapping[int, TableSpec],
) -> Callable[[], None]:
    """Send what waits on the connections of the old routes by the new ones; `after` has those by incarnation.

    Returns what sends the rest: pulls of more than may be under way at once, to be asked for when SYNCED was said.
    Requests on buckets that nobody has any more fail.
    """
    released = [(connection, connection.release()) for connection in before]
    failures = released[0][0].failures if released else []
    tokens = _gather(released, old, specs)
    outbox = Outbox(old.version)
    for token in tokens:
        if isinstance(token, _Pull):
            outbox.adopt(token, token.part.buckets)
        else:
            kept: dict[int, Buckets] = {}
            for connection, entry, part in token.kept:
                has = part.buckets if entry.buckets is None else entry.buckets
                kept[connection.incarnation] = kept.get(connection.incarnation, 0) | has
            waiting = 0
            for part in token.parts:
                waiting |= part.buckets
            clock = token.kept[0][1].clock if token.kept else None
            outbox.adopt(token, waiting, kept=kept, keep_clock=clock)
    late: list[Send] = []
    awaited: dict[int, int] = {}
    for send in outbox.change(new.version, new.groups):
        connection = after[send.server]
        if isinstance(send.token, _Push):
            _send_push(connection, send.token, send.buckets)
        else:
            assert isinstance(send.token, _Pull)
            assert send.token.part.pending is not None
            size = send.token.part.pending.out.nbytes
            awaited[send.server] = awaited.get(send.server, 0) + size
            if awaited[send.server] > max(_MAX_AWAITED_BYTES, size):
                late.append(send)
            else:
                _send_pull(connection, send.token, send.buckets, connection.send_now)
    _forget_kept(tokens, new)
    pendings = [pending for _, pendings in released for pending in pendings]

    def send_rest() -> None:
        for send in late:
            assert isinstance(send.token, _Pull)
            connection = after[send.server]

            def send_later(*arguments: Any, connection: ServerConnection = connection) -> Pending:
                kind, table, clock, sequence, parts, out = arguments
                return connection.send(kind, table, 0, clock, sequence, parts, out)

            _send_pull(connection, send.token, send.buckets, send_later)
        lost = _lost_parts(tokens, new)
        for pending in pendings:
            if id(pending) in lost:
                pending.error = pending.error or new.loss()
            if pending.moved is None:
                pending.moved = []
            pending.settle(failures)

    return send_rest


def _gather(
    released: Sequence[tuple[ServerConnection, list[Pending]]], old: Routes, specs: Mapping[int, TableSpec]
) -> list[_Push | _Pull]:
    """Return what is under way, in the order in which it was made."""
    pushes: dict[int, _Push] = {}
    pulls: list[_Pull] = []

    def spec_of(frame: tuple[Any, ...]) -> TableSpec:
        return specs[HEADER.unpack(frame[0])[4]]

    for connection, pendings in released:
        layout = old.led_by(connection.incarnation)
        for entry in connection.kept:
            if entry.layout is None:
                entry.layout = layout
            part = _Part(entry.frame, spec_of(entry.frame), entry.layout, None)
            pushes.setdefault(entry.sequence, _Push(entry.sequence)).kept.append((connection, entry, part))
        for pending in pendings:
            part = _Part(pending.frame, spec_of(pending.frame), layout, pending)
            sequence = HEADER.unpack(pending.frame[0])[8]
            if part.kind != PULL:
                pushes.setdefault(sequence, _Push(sequence)).parts.append(part)
            if part.kind != PUSH:
                pulls.append(_Pull(sequence, part))
    # A pull bears the number of the last push before it.
    ordered: list[tuple[int, int, _Push | _Pull]] = [(sequence, 0, push) for sequence, push in pushes.items()]
    ordered += [(pull.sequence, 1, pull) for pull in pulls]
    ordered.sort(key=lambda each: each[:2])
    return [token for _, _, token in ordered]


def _send_push(connection: ServerConnection, push: _Push, buckets: Buckets) -> None:
    keys: list[Keys] = []
    grads: list[Floats] = []
    waiting: list[Pending] = []
    any_part = push.parts[0] if push.parts else push.kept[0][2]
    for part, has in _parts_of(push):
        if part.buckets & has & buckets:
            own_keys, own_grads = part.take(has & buckets)
            keys.append(own_keys)
            grads.append(own_grads)
            if part.pending is not None:
                waiting.append(part.pending)
    push.sent |= buckets
    # Copies, even of one part: these may be kept, and its memory is the caller's, or a copy's that is given back now.
    both = (np.concatenate(keys), np.concatenate(grads).reshape(-1))
    _start(waiting, None, connection, lambda: connection.send_now(
        PUSH, any_part.table, any_part.clock, push.sequence, both
    ))  # fmt: skip


def _parts_of(push: _Push) -> Iterator[tuple[_Part, Buckets]]:
    """The parts of a push, and what of each may be taken: what is kept may have been sent elsewhere since."""
    for part in push.parts:
        yield part, part.buckets
    for _, entry, part in push.kept:
        yield part, part.buckets if entry.buckets is None else entry.buckets


def _send_pull(connection: ServerConnection, pull: _Pull, buckets: Buckets, send: Callable[..., Pending]) -> None:
    part = pull.part
    pending = part.pending
    assert pending is not None
    rows = pending.out.reshape(-1)
    chosen = part.positions(buckets)
    clock = part.clock + 1 if part.ticks else part.clock
    put: Callable[[], None] | None = None
    if chosen is None:
        keys, values = part.keys, rows
    else:
        keys, values = part.keys[chosen], np.empty(len(chosen) * (len(rows) // len(part.keys)), np.float32)
        put = _putting(rows.reshape(len(part.keys), -1), chosen, values)
    _start([pending], put, connection, lambda: send(PULL, part.table, clock, pull.sequence, (keys,), values))


def _putting(rows: Floats, chosen: _Positions, values: Floats) -> Callable[[], None]:
    def put() -> None:
        rows[chosen] = values.reshape(len(chosen), -1)

    return put


def _start(
    parents: Sequence[Pending],
    put: Callable[[], None] | None,
    connection: ServerConnection,
    send: Callable[[], Pending],
) -> None:
    """Send again for some requests; what they are told when it is answered."""
    try:
        child = send()
    except PacelineError as error:
        for parent in parents:
            parent.error = parent.error or error
        return
    child.is_private = True
    child.parents = [(parent, put) for parent in parents]
    for parent in parents:
        parent.moved = [] if parent.moved is None else parent.moved
        parent.moved.append((connection, child))


def _forget_kept(tokens: Iterable[_Push | _Pull], new: Routes) -> None:
    """Keep of each push at its server what was not sent to another."""
    gone: set[int] = set()
    connections: dict[int, ServerConnection] = {}
    for push in tokens:
        if isinstance(push, _Pull):
            continue
        for connection, entry, part in push.kept:
            has = part.buckets if entry.buckets is None else entry.buckets
            entry.buckets = has & new.led_by(connection.incarnation) & ~push.sent
            connections[id(connection)] = connection
            if not entry.buckets:
                gone.add(id(entry))
    for connection in connections.values():
        connection.forget_kept(gone)


def _lost_parts(tokens: Iterable[_Push | _Pull], new: Routes) -> set[int]:
    """Return the requests (by id) that are about a bucket that nobody has."""
    if not new.lost:
        return set()
    parts = [part for token in tokens for part in ([token.part] if isinstance(token, _Pull) else token.parts)]
    return {id(part.pending) for part in parts if part.buckets & new.lost}

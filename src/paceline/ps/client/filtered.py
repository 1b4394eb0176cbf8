"""Requests of a table that are compressed by filters at the first transmission, and unfiltered when they are resent.

An :class:`Exchange` stores the unfiltered frame. The values of the unfiltered frame are rounded as in the filtered
frame, so both frames have the same effect. The unfiltered frame is sent after a reconnection, or to another server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.errors import ProtocolError, UsageError
from paceline.filters.base import Bytes, Filter, ValueFilter
from paceline.filters.chain import FilterChain, chain_of
from paceline.filters.chance import seed_of
from paceline.filters.keys.deltas import DeltaKeys
from paceline.filters.rows import ElementErrors, RowErrors, RowSelection, quiet
from paceline.observe import recording
from paceline.protocol.client import Request
from paceline.ps import messages
from paceline.ps.client.connection import ServerConnection
from paceline.ps.client.exchange import DataRequest, Exchange, pack
from paceline.ps.messages import (
    FILTERED,
    FILTERED_PULL,
    FILTERED_PUSH,
    FILTERED_PUSH_PULL,
    PULL,
    PUSH,
    PUSH_PULL,
    RANGE,
    VALUES,
    TableSpec,
)
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields
from paceline.tables.types import Floats, Keys
from paceline.transport import Channel, Header, frame_parts

_FILTERED = {PUSH: FILTERED_PUSH, PULL: FILTERED_PULL, PUSH_PULL: FILTERED_PUSH_PULL}
_NO_VALUES = np.empty(0, np.float32)


def _for_pulls(filter: Filter) -> Filter:
    return filter.for_pulls if isinstance(filter, ValueFilter) else filter


class TableFilters:
    """The filters of one client's table, for requests and for answers."""

    def __init__(
        self, requests: Sequence[Filter], answers: Sequence[Filter] | None = None, *, is_dense: bool = False
    ) -> None:
        self.requests = FilterChain(requests)
        sparse = [*self.requests.rows, *(item for item in self.requests.filters if isinstance(item, DeltaKeys))]
        if is_dense and sparse:
            raise UsageError(f"filter {sparse[0]} is for sparse tables: a dense one is pushed and pulled by ranges")
        given = [_for_pulls(item) for item in self.requests.filters] if answers is None else answers
        self.answers = FilterChain([item for item in FilterChain(given).filters if item.stage >= ValueFilter.stage])
        sent = [item.describe() for item in self.requests.filters if item not in self.requests.rows]
        self.info = messages.FilterInfo(requests=sent, answers=self.answers.describe())
        self.follow_weights = any(item.needs_l1 for item in self.requests.rows)
        """Whether the filters need the pulled values; if so, the client calls :meth:`record_pulled`."""
        self._is_dense = is_dense
        self._l1: float | None = None  # the L1 penalty of the table's update rule; None until the first use
        self._selections: list[RowSelection] = []
        self._row_errors: RowErrors | None = None
        self._senders: dict[int, FilteredSender] = {}

    def __bool__(self) -> bool:
        return bool(self.requests) or bool(self.answers)

    def are(self, other: TableFilters | None) -> bool:
        if other is None:
            return False
        return (str(self.requests), str(self.answers)) == (str(other.requests), str(other.answers))

    def senders(self, connections: Sequence[ServerConnection]) -> list[FilteredSender]:
        incarnations = [connection.session.server for connection in connections]
        if list(self._senders) != incarnations:
            former = self._senders
            self._senders = {
                incarnation: former.get(incarnation) or FilteredSender(connection, self)
                for incarnation, connection in zip(incarnations, connections, strict=True)
            }
        return list(self._senders.values())

    def check_fits(self, spec: TableSpec) -> None:
        for item in self.requests.rows:
            if item.needs_l1 and not _l1_of(spec):
                raise UsageError(
                    f"filter {item} is for tables whose update rule has an L1 penalty, as paceline.FTRL(l1=1.0) has: "
                    f"table {spec.name!r} has {from_fields(RULES, spec.update)!r}"
                )

    def record_pulled(self, keys: Keys, values: Floats, dim: int) -> None:
        for selection in self._selections_for(dim):
            selection.record_pulled(keys, values)

    def choose(self, keys: Keys, grads: Floats, spec: TableSpec, clock: int, seed: int) -> tuple[Keys, Floats]:
        if self._l1 is None:
            self._l1 = _l1_of(spec) if self.follow_weights else 0.0
        for selection in self._selections_for(spec.dim):
            keys, grads = selection.choose(keys, grads, clock, seed, self._l1)
        return keys, grads

    def _selections_for(self, dim: int) -> list[RowSelection]:
        if not self._selections:
            self._selections = [RowSelection(item, dim) for item in self.requests.rows]
        return self._selections

    def errors(self, dim: int) -> RowErrors | ElementErrors | None:
        if self.requests.values is None or not self.requests.values.keeps_error:
            return None
        if self._is_dense:
            return ElementErrors()
        if self._row_errors is None:
            self._row_errors = RowErrors(dim)
        return self._row_errors

    def order(
        self, keys: Keys, grads: Floats, dim: int, inverse: npt.NDArray[np.int32] | None
    ) -> tuple[Keys, Floats, npt.NDArray[np.int32] | None]:
        """Return the keys, gradients (flat, or empty) and positions `inverse`, sorted if a filter needs sorted keys."""
        if not self.requests.sorts or bool((keys[1:] > keys[:-1]).all()):
            return keys, grads, inverse
        order = np.argsort(keys)
        places = np.empty(len(keys), np.int32)
        places[order] = np.arange(len(keys), dtype=np.int32)
        sorted_grads = grads.reshape(-1, dim)[order].reshape(-1) if len(grads) else grads
        return keys[order], sorted_grads, places if inverse is None else places[inverse]


def _l1_of(spec: TableSpec) -> float:
    rule = from_fields(RULES, spec.update)
    return 0.0 if rule.row_dim is not None else float(getattr(rule, "l1", 0.0))


def filters_of_dense_tables(filters: Sequence[Filter] | str) -> tuple[Filter, ...]:
    """Return the filters of a list or text; raises UsageError unless they fit dense tables."""
    return TableFilters(chain_of(filters).filters, (), is_dense=True).requests.filters


class FilteredSender:
    """Sends the requests of one table on one connection."""

    def __init__(self, connection: ServerConnection, filters: TableFilters) -> None:
        self._connection = connection
        self._filters = filters
        self._errors: RowErrors | ElementErrors | None = None
        self._chain, self.answers = filters.requests, filters.answers
        self._meta = messages.encode(filters.info)
        self._memory = self._chain.memory(sends=True)
        self._channel: Channel | None = None
        self._version = 0
        self._has_sent_meta = False

    def send(self, data: DataRequest) -> Request:
        connection, session, parts, clock = self._connection, self._connection.session, data.parts, data.clock
        connection.make_room(data.out)
        if data.kind not in _FILTERED or session.awaits_view or not session.is_connected:
            return connection.send(data)
        self._begin(connection)
        request = connection.request(data)
        keys, values = parts[0], parts[1] if len(parts) > 1 else _NO_VALUES
        seed = seed_of(connection.hello.rank, clock, data.sequence, data.table, connection.rank)
        encode = self._encode_push if data.kind == PUSH else self._encode
        body, read = encode(keys, values, seed, is_range=bool(data.flags & RANGE))
        frame = frame_parts(
            _FILTERED[data.kind],
            flags=data.flags,
            table=data.table,
            request=request.number,
            epoch=self._version,
            clock=clock,
            sequence=data.sequence,
            meta=b"" if self._has_sent_meta else self._meta,
            body=body,
        )
        self._has_sent_meta = True
        plain = pack(data.of_server((keys, read) if len(parts) > 1 else (keys,), None), request, self._version)
        request.payload = exchange = FilteredExchange(plain, data.out, data.is_private, self)
        connection.record(request, data)
        if (recorder := recording.recorder) is not None:
            exchange.began_s = time.monotonic()
            chain = str(self._chain) or "none"
            recorder.add("paceline_filter_bytes_total", sum(part.nbytes for part in parts), chain, "plain")
            recorder.add("paceline_filter_bytes_total", body.nbytes, chain, "sent")
        session.start(request)
        connection.transmit(tuple(frame), request)
        return request

    def _encode_push(self, keys: Keys, values: Floats, seed: int, *, is_range: bool) -> tuple[Bytes, Floats]:
        """Return the body of a push, and the values that the server decodes. Later pushes correct rounding errors."""
        if self._errors is None and len(values):
            self._errors = self._filters.errors(len(values) // len(keys))
        errors = self._errors
        if errors is None or not len(values):
            return self._encode(keys, values, seed, is_range=is_range)
        before = errors.read(keys, len(values), is_range=is_range)
        with quiet():
            wanted = values + before
        body, read = self._encode(keys, wanted, None, is_range=is_range)
        errors.keep(keys, before, wanted - read, is_range=is_range)
        return body, read

    def _encode(self, keys: Keys, values: Floats, seed: int | None, *, is_range: bool) -> tuple[Bytes, Floats]:
        read = values if self._chain.values is None else np.empty_like(values)
        return self._chain.encode(keys, values, seed, self._memory, is_range=is_range, read=read), read

    def _begin(self, connection: ServerConnection) -> None:
        """Clear the filters' memory after a reconnection or a view change: the server's memory is cleared too."""
        version = connection.core.version
        if self._channel is not connection.channel:
            self._channel, self._has_sent_meta = connection.channel, False
        elif self._version == version:
            return
        self._version = version
        if self._memory is not None:
            self._memory.clear()
        if isinstance(self._errors, ElementErrors):
            self._errors.forget_ranges()


class FilteredExchange(Exchange):
    """The payload of a filtered request. The stored frame is unfiltered, to be resent."""

    __slots__ = ("_sender",)

    def __init__(self, frame: tuple[Any, ...], out: Any, is_private: bool, sender: FilteredSender) -> None:
        super().__init__(frame, out, is_private)
        # a filtered answer has another length than the values, so it cannot be received into their array
        self.into = None
        self._sender = sender

    @override
    def receive(self, channel: Channel, header: Header) -> bool:
        if not header.flags & FILTERED:
            return super().receive(channel, header)
        self.meta = channel.receive_meta()
        body = np.empty(header.body_bytes, np.uint8)
        channel.receive_into(body)
        if self.out is None:
            return False
        try:
            self._sender.answers.decode_values(body, self.out.reshape(-1))
        except ProtocolError:
            return False
        except UsageError as error:
            self.unreadable = error
        return True

    @override
    def accepts(self, header: Header) -> bool:
        if header.flags & FILTERED:
            return self.out is not None and header.kind == VALUES
        return super().accepts(header)

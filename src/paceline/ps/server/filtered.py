"""Filtered frames of workers: decoding of requests and encoding of answers.

The first filtered frame of a table on a connection describes the filters. If the server lacks the keys of a frame, it
rejects this frame. The server also rejects all later frames until the worker has resent the frame without filters,
because pushes must be applied in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TypeAlias

import numpy as np

from paceline.errors import ProtocolError, UsageError
from paceline.filters.base import Bytes
from paceline.filters.chain import Decoded, FilterChain, UnknownKeysError, from_descriptions
from paceline.filters.chance import seed_of
from paceline.ps import messages
from paceline.ps.messages import (
    FILTERED,
    FILTERED_PULL,
    FILTERED_PUSH,
    FILTERED_PUSH_PULL,
    PULL,
    PUSH,
    PUSH_PULL,
    RANGE,
    TICK,
    UNKNOWN_KEYS,
)
from paceline.tables.types import Floats
from paceline.transport import Header, Limits, Peer, frame_parts

_logger = logging.getLogger(__name__)
_BEFORE: Final = {FILTERED_PUSH: PUSH, FILTERED_PULL: PULL, FILTERED_PUSH_PULL: PUSH_PULL}
_MAX_BODY_BYTES: Final = Limits().max_frame_bytes
MAX_KEY_BYTES: Final = 1 << 30
"""The limit in bytes of the memory for all workers' cached keys. Above the limit the server drops all cached keys."""
_NO_META: Final = memoryview(b"")

Handle: TypeAlias = Callable[[Peer, Header, memoryview, memoryview], None]


class _PeerTable:
    """The filters of one table on one connection."""

    __slots__ = ("answers", "first_request", "memory", "requests")

    def __init__(self, info: messages.FilterInfo, first_request: int) -> None:
        self.first_request = first_request
        """The first request that used the table's current filters. Answers to earlier requests are not filtered."""
        self.requests, self.answers = check(info)
        self.memory = self.requests.memory(sends=False)

    @property
    def num_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.num_bytes

    def decode(self, body: Bytes) -> Decoded:
        try:
            return self.requests.decode(body, self.memory, _MAX_BODY_BYTES)
        except UsageError as error:  # an error in a user's filter
            _logger.error("%s: the message is rejected", error)
            raise


def check(info: messages.FilterInfo) -> tuple[FilterChain, FilterChain]:
    """Return the filter chains of requests and answers. Raises UsageError for unknown filters."""
    return from_descriptions(info.requests), from_descriptions(info.answers)


class PeerFilters:
    """The filters and cached keys of all connections of one server."""

    def __init__(self, max_key_bytes: int = MAX_KEY_BYTES) -> None:
        self.max_key_bytes = max_key_bytes
        self._tables: dict[Peer, dict[int, _PeerTable]] = {}
        self.num_bytes = 0

    def decode(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> tuple[Header, memoryview]:
        """Return header and body of the unfiltered frame. Raises UnknownKeysError."""
        if len(meta):
            table_filters = _PeerTable(messages.decode_filters(meta), header.request)
            former = self._tables.setdefault(peer, {}).get(header.table)
            self.num_bytes -= 0 if former is None else former.num_bytes
            self._tables[peer][header.table] = table_filters
        table = self._tables.get(peer, {}).get(header.table)
        if table is None:
            raise UnknownKeysError
        before = table.num_bytes
        try:
            found = table.decode(np.frombuffer(body, np.uint8))
        finally:  # count the memory here, because a rejected frame may also have added keys
            self.num_bytes += table.num_bytes - before
            if self.num_bytes > self.max_key_bytes:
                self.forget_keys()
        if found.is_range != bool(header.flags & RANGE):
            raise ProtocolError("a filtered request for a range has keys, or one for keys has a range")
        kind, flags = _BEFORE[header.kind], header.flags | FILTERED
        body = memoryview(found.body)  # type: ignore[arg-type]
        return header._replace(kind=kind, flags=flags, meta_bytes=0, body_bytes=len(body)), body

    def encode(self, peer: Peer, header: Header, values: Floats) -> Bytes | None:
        """Return the body of the answer to a filtered pull; None if the answer must be unfiltered."""
        table = self._tables.get(peer, {}).get(header.table)
        if table is None or not table.answers or header.request < table.first_request:
            return None
        seed = seed_of(peer.hello.rank, header.clock, header.sequence, header.table)
        try:
            return table.answers.encode_values(values, seed)
        except UsageError as error:  # an error in a user's filter; clients also accept unfiltered answers
            _logger.error("%s: the values are sent without filters", error)
            return None

    def forget_keys(self) -> None:
        self.num_bytes = 0
        for tables in self._tables.values():
            for table in tables.values():
                if table.memory is not None:
                    table.memory.clear()

    def disconnected(self, peer: Peer) -> None:
        for table in self._tables.pop(peer, {}).values():
            self.num_bytes -= table.num_bytes


class FilteredFrames:
    """Decodes filtered frames for a server, and passes them to the `handlers` of unfiltered frames."""

    def __init__(self, filters: PeerFilters, handlers: MutableMapping[int, Handle]) -> None:
        self._filters = filters
        self._handlers = handlers
        self._ordered: dict[int, Handle] = {kind: handlers[kind] for kind in (PUSH, PULL, PUSH_PULL, TICK)}
        self._ordered.update(dict.fromkeys(_BEFORE, self._receive))
        self._lacking: dict[Peer, int] = {}  # peer → the rejected request that the peer must resend first
        handlers.update(self._ordered)

    def disconnected(self, peer: Peer) -> None:
        self._filters.disconnected(peer)
        self._lacks_no_more(peer)

    def view_changed(self) -> None:
        """Drop the keys and the rejected requests of the former view; clients replace the requests."""
        self._filters.forget_keys()
        for peer in list(self._lacking):
            self._lacks_no_more(peer)

    def _receive(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        try:
            before, decoded = self._filters.decode(peer, header, meta, body)
        except UnknownKeysError:
            self._lacking[peer] = header.request
            self._handlers.update(dict.fromkeys(self._ordered, self._receive_in_order))
            _refuse(peer, header)
            return
        self._ordered[before.kind](peer, before, _NO_META, decoded)

    def _receive_in_order(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Reject a peer's frames until it resends its rejected request. Used while any peer has a rejected request."""
        lacking = self._lacking.get(peer)
        if lacking is not None and lacking != header.request:
            _refuse(peer, header)
            return
        self._lacks_no_more(peer)
        self._ordered[header.kind](peer, header, meta, body)

    def _lacks_no_more(self, peer: Peer) -> None:
        if self._lacking.pop(peer, None) is not None and not self._lacking:
            self._handlers.update(self._ordered)


def _refuse(peer: Peer, header: Header) -> None:
    parts: list[Any] = frame_parts(UNKNOWN_KEYS, table=header.table, request=header.request)
    peer.send(*parts)

"""Filtered frames of workers: decoding of requests and encoding of answers.

The first filtered frame of a table on a connection describes the filters. If the server lacks the keys of a frame, it
closes the connection. The worker then reconnects, and resends all unanswered frames in order and without filters.
"""

from __future__ import annotations

import logging
from typing import Final

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
)
from paceline.tables.types import Floats
from paceline.transport import Header, Limits, Peer

_logger = logging.getLogger(__name__)
UNFILTERED: Final = {FILTERED_PUSH: PUSH, FILTERED_PULL: PULL, FILTERED_PUSH_PULL: PUSH_PULL}
"""Kind of a filtered frame → kind of the unfiltered frame."""
_MAX_BODY_BYTES: Final = Limits().max_frame_bytes
MAX_KEY_BYTES: Final = 1 << 30
"""The limit in bytes of the memory for all workers' cached keys. Above the limit the server drops all cached keys."""


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
        except UsageError as error:  # a user's filter has an error
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
        kind, flags = UNFILTERED[header.kind], header.flags | FILTERED
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
        except UsageError as error:  # a user's own filter has failed; clients also accept unfiltered answers
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

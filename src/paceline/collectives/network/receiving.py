"""Receive the messages of one link, and decide when their bytes may be written to memory.

A round must send the contents that its blocks have at the beginning of the round. So received bytes that would replace
unsent bytes wait in scratch memory. If several messages of a round write the same memory, they are written in the order
of the schedule's actions, so that floating-point sums are equal in every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from paceline.collectives.network.blocks import Ranges, remaining_overlaps
from paceline.collectives.network.frames import HEADER_BYTES, MAX_HEAD_BYTES, MessageKind, Scanner, unpack_header
from paceline.collectives.network.mesh import Link
from paceline.collectives.network.sending import Blocker, OutgoingMessage
from paceline.errors import ProtocolError, RankLostError

Combine: TypeAlias = Callable[[memoryview, memoryview, bool], None]
"""A function ``(target, incoming, incoming_first)`` that reduces the received bytes into ``target``, in place.

With ``incoming_first``, the received value is the first operand. On all ranks, the first operand is the lower rank's
value, because the sign of min(-0, 0) and the bits of a NaN result depend on the order of the operands.
"""

SMALL_BYTES: Final = 1 << 13
"""Up to this size, the body of a message is received together with its head, by one system call."""
PIECE_BYTES: Final = 1 << 17
"""The size of the pieces in which a received body is reduced. A piece fits into the processor's L2 cache. During its
reduction, the next piece arrives in the system's socket buffer.
"""
_REUSED_BYTES: Final = 1 << 24
_MIN_IN_PLACE_BYTES: Final = 1 << 14  # average bytes per view; below it, copying is faster than a receive per view
_NUM_RECEIVES: Final = 8  # receive calls on one link before the next link gets its turn


class UnexpectedMessage(Exception):  # noqa: N818  (a signal to the executor, which raises the error)
    """Raised if a peer sent a message whose head (header and text) differs from the expected head."""

    def __init__(self, peer: PeerMessages) -> None:
        super().__init__(peer.rank)
        self.peer = peer


class LinkBroken(Exception):  # noqa: N818
    """Raised if a link is closed or broken."""

    def __init__(self, peer: PeerMessages) -> None:
        super().__init__(peer.rank)
        self.peer = peer


class PeerMessages:
    """The pending messages of one link, and the received part of the next message's head (header and text)."""

    __slots__ = ("got", "link", "rank", "receives", "scanner", "sends", "stage")

    def __init__(self, link: Link) -> None:
        self.rank = link.rank
        self.link = link
        self.sends: deque[OutgoingMessage] = deque()
        self.receives: deque[IncomingMessage] = deque()
        self.stage = np.empty(MAX_HEAD_BYTES + SMALL_BYTES, np.uint8).data
        self.got = 0
        self.scanner: Scanner | None = None

    def push(self) -> bool:
        moved = False
        sends = self.sends
        was_partial = bool(sends) and sends[0].is_started
        try:
            while sends and sends[0].advance(self.link):
                moved = True
                if not sends[0].is_done:
                    break
                sends.popleft()
        except RankLostError as error:
            raise LinkBroken(self) from error
        if was_partial and not self.receives:
            self._check_for_abort()
        return moved

    def pull(self) -> bool:
        moved = False
        receives = self.receives
        try:
            while receives and receives[0].advance():
                moved = True
                if not receives[0].is_done:
                    break
                receives.popleft()
        except RankLostError as error:
            raise LinkBroken(self) from error
        return moved

    @property
    def wants_bytes(self) -> bool:
        return bool(self.receives) and self.receives[0].wants_bytes

    @property
    def has_next_head(self) -> bool:
        return self.got >= HEADER_BYTES and not self.receives

    def peek(self) -> None:
        """Check whether a link without a pending receive has an ABORT or is closed. Raises UnexpectedMessage for an
        ABORT, and LinkBroken for a closed link. The received bytes are kept for the next receive.
        """
        try:
            count = self.link.receive_nowait(self.stage[self.got : HEADER_BYTES]) if self.got < HEADER_BYTES else 0
        except RankLostError as error:
            raise LinkBroken(self) from error
        self.got += count
        if self.got >= HEADER_BYTES and not self._is_data():
            raise UnexpectedMessage(self)

    def scan(self) -> Scanner:
        if self.scanner is None:
            receive = self.receives[0] if self.receives else None
            if receive is not None and receive.has_head:
                self.scanner = Scanner(skip=receive.nbytes - receive.got)
            else:
                self.scanner = Scanner()
                self.scanner.feed(self.stage[: self.got])
        return self.scanner

    def _check_for_abort(self) -> None:
        # A rank that fails sends an ABORT and stops reading, so sends to it make no progress. Therefore a slow send
        # checks for an ABORT.
        try:
            self.peek()
        except LinkBroken:
            if self.sends:  # without pending sends this is not an error: the peer may have finished its work
                raise

    def _is_data(self) -> bool:
        try:
            return unpack_header(self.stage).kind == MessageKind.DATA
        except ProtocolError:
            return False


class Scratch:
    """Pieces of scratch memory. Up to 16 MiB of free pieces are kept for later calls."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        if nbytes <= PIECE_BYTES and self._pieces:
            return self._pieces.pop()
        return np.empty(max(nbytes, PIECE_BYTES), np.uint8).data

    def give(self, piece: memoryview) -> None:
        if len(piece) == PIECE_BYTES and len(self._pieces) < _REUSED_BYTES // PIECE_BYTES:
            self._pieces.append(piece)


class IncomingMessage:
    """One message to receive."""

    __slots__ = (
        "_applied",
        "_backlog",
        "_combine",
        "_filled",
        "_head",
        "_index",
        "_is_first",
        "_is_in_place",
        "_limit",
        "_offset",
        "_peer",
        "_piece",
        "_piece_bytes",
        "_ranges",
        "_scratch",
        "_views",
        "blockers",
        "got",
        "has_head",
        "is_done",
        "nbytes",
    )

    def __init__(
        self,
        peer: PeerMessages,
        head: bytes,
        views: list[memoryview],
        ranges: Ranges,
        nbytes: int,
        combine: Combine | None,
        item_bytes: int,
        scratch: Scratch,
        *,
        is_first: bool,
    ) -> None:
        """With `is_first`, the received value is the first operand of the reduction."""
        self._peer = peer
        self._head = head
        self._views = views
        self._ranges = ranges
        self._combine = combine
        self._is_first = is_first
        self._scratch = scratch
        self._limit = len(head) + nbytes if nbytes <= SMALL_BYTES else len(head)
        self._piece_bytes = PIECE_BYTES // item_bytes * item_bytes or item_bytes
        self._piece: memoryview | None = None
        self._filled = self._applied = self._index = self._offset = 0
        self._is_in_place = combine is None and nbytes >= len(views) * _MIN_IN_PLACE_BYTES
        self._backlog: deque[tuple[memoryview | None, memoryview]] = deque()
        self.nbytes = nbytes
        self.blockers: list[Blocker] = []
        self.got = 0
        """The number of received bytes of the body."""
        self.has_head = self.is_done = False

    @property
    def wants_bytes(self) -> bool:
        return not self.has_head or self.got < self.nbytes

    def advance(self) -> bool:
        if not self.has_head:
            return self._receive_head()
        moved = self._write_backlog() if self._backlog else False
        if self.got < self.nbytes:
            receive = self._receive_in_place if self._is_in_place and not self.blockers else self._receive_pieces
            moved = receive() or moved
        return moved

    def holds(self, low: int, high: int) -> bool:
        return not self.is_done and remaining_overlaps(self._ranges, self._applied, low, high)

    def _receive_head(self) -> bool:
        peer = self._peer
        if peer.got >= HEADER_BYTES:
            self._check_head()
        count = peer.link.receive_nowait(peer.stage[peer.got : self._limit])
        if not count:
            return False
        peer.got += count
        if peer.got >= HEADER_BYTES:
            self._check_head()
        if peer.got == self._limit:
            peer.got = 0
            self.has_head = True
            head_bytes = len(self._head)
            if self._limit > head_bytes:
                self.got = self.nbytes
                self._backlog.append((None, peer.stage[head_bytes : self._limit]))
                self._write_backlog()
            elif not self.nbytes:
                self.is_done = True
        return True

    def _check_head(self) -> None:
        # The header contains the call's signature (a hash). If the headers are equal, the calls are equal, and so are
        # the texts after the headers.
        if self._peer.stage[:HEADER_BYTES] != self._head[:HEADER_BYTES]:
            raise UnexpectedMessage(self._peer)

    def _receive_in_place(self) -> bool:
        link, views = self._peer.link, self._views
        moved = False
        for _ in range(_NUM_RECEIVES):
            count = link.receive_nowait(views[self._index][self._offset :])
            if not count:
                return moved
            moved = True
            self.got += count
            self._step(count)
            self._applied = self.got
            if self.got == self.nbytes:
                self.is_done = True
                break
        return moved

    def _receive_pieces(self) -> bool:
        link = self._peer.link
        moved = False
        for _ in range(_NUM_RECEIVES):
            piece = self._piece
            if piece is None:
                piece = self._piece = self._scratch.take(self._piece_bytes)
                self._filled = 0
            limit = min(self._piece_bytes, self.nbytes - self.got + self._filled)
            count = link.receive_nowait(piece[self._filled : limit])
            if not count:
                return moved
            moved = True
            self.got += count
            self._filled += count
            if self._filled == limit:
                self._backlog.append((piece, piece[:limit]))
                self._piece = None
                self._write_backlog()
                if self._backlog or self.got == self.nbytes:  # the backlog must wait for sends on other links
                    break
        return moved

    def _write_backlog(self) -> bool:
        moved = False
        while self._backlog:
            piece, data = self._backlog[0]
            if self.blockers and not self._may_write(len(data)):
                break
            self._write(data)
            self._backlog.popleft()
            if piece is not None:
                self._scratch.give(piece)
            moved = True
        self.is_done = self._applied == self.nbytes
        return moved

    def _may_write(self, nbytes: int) -> bool:
        index, offset = self._index, self._offset
        while nbytes > 0:
            start, end = self._ranges[index]
            low, high = start + offset, min(end, start + offset + nbytes)
            if any(blocker.holds(low, high) for blocker in self.blockers):
                return False
            nbytes -= high - low
            index, offset = index + 1, 0
        return True

    def _write(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            target = self._views[self._index]
            count = min(len(target) - self._offset, len(data) - at)
            target = target[self._offset : self._offset + count]
            if self._combine is None:
                target[:] = data[at : at + count]
            else:
                self._combine(target, data[at : at + count], self._is_first)
            at += count
            self._step(count)
        self._applied += len(data)

    def _step(self, count: int) -> None:
        self._offset += count
        if self._offset == len(self._views[self._index]):
            self._index += 1
            self._offset = 0

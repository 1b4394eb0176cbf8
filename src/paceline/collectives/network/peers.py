"""Track the messages and the stream positions of one link for the executor."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.collectives.network.frames import HEADER_BYTES, MAX_HEAD_BYTES, MessageKind, Scanner, unpack_header
from paceline.collectives.network.links import Link
from paceline.errors import ProtocolError, RankLostError

if TYPE_CHECKING:
    from paceline.collectives.network.receiving import IncomingMessage
    from paceline.collectives.network.sending import OutgoingMessage

SMALL_BYTES: Final = 1 << 13
"""Bodies up to this size are received together with the head, by one system call."""


class UnexpectedMessage(Exception):  # noqa: N818  (a signal to the executor, which raises the error)
    """A peer sent another head than the expected one."""

    def __init__(self, peer: PeerMessages) -> None:
        super().__init__(peer.rank)
        self.peer = peer


class LinkBroken(Exception):  # noqa: N818
    """A link has ended or broken."""

    def __init__(self, peer: PeerMessages) -> None:
        super().__init__(peer.rank)
        self.peer = peer


class PeerMessages:
    """Pending messages of one link, and the received part of the next head."""

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
        """Send the bytes that the link accepts; return whether any were sent."""
        moved = False
        sends = self.sends
        was_stuck = bool(sends) and sends[0].has_begun
        try:
            while sends and sends[0].advance(self.link):
                moved = True
                if not sends[0].is_done:
                    break
                sends.popleft()
        except RankLostError as error:
            raise LinkBroken(self) from error
        if was_stuck and not self.receives:
            self._look_back()
        return moved

    def pull(self) -> bool:
        """Receive available bytes of pending messages; return whether there was progress."""
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
        """Whether a pending receive lacks bytes."""
        return bool(self.receives) and self.receives[0].wants_bytes

    @property
    def has_next_head(self) -> bool:
        """Whether a message without a receive has begun to arrive."""
        return self.got >= HEADER_BYTES and not self.receives

    def peek(self) -> None:
        """Check a link without a receive for its end or an ABORT; keep received bytes."""
        try:
            count = self.link.receive_some(self.stage[self.got : HEADER_BYTES]) if self.got < HEADER_BYTES else 0
        except RankLostError as error:
            raise LinkBroken(self) from error
        self.got += count
        if self.got >= HEADER_BYTES and not self._is_data():
            raise UnexpectedMessage(self)

    def scan(self) -> Scanner:
        """Return the scanner that reads this link after an error."""
        if self.scanner is None:
            receive = self.receives[0] if self.receives else None
            if receive is not None and receive.is_headed:
                self.scanner = Scanner(skip=receive.nbytes - receive.got)
            else:
                self.scanner = Scanner()
                self.scanner.feed(self.stage[: self.got])
        return self.scanner

    def _look_back(self) -> None:
        # A rank that gives up sends its ABORT before it reads and discards our remaining bytes.
        try:
            self.peek()
        except LinkBroken:
            if self.sends:  # else it may have received everything, finished and closed
                raise

    def _is_data(self) -> bool:
        try:
            return unpack_header(self.stage).kind == MessageKind.DATA
        except ProtocolError:
            return False

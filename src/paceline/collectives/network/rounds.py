"""Convert a round of a schedule into messages, so that no data is overwritten before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from paceline.collectives.network.blocks import Blocks, Ranges, collide, scatter
from paceline.collectives.network.frames import Heads
from paceline.collectives.network.receiving import Combine, IncomingMessage, PeerMessages, Scratch
from paceline.collectives.network.sending import Blocker, LateCopy, OutgoingMessage
from paceline.collectives.schedules.base import Action, Copy, Receive, Send

_Written: TypeAlias = list[tuple[LateCopy | IncomingMessage, Ranges]]
_Read: TypeAlias = list[tuple[Blocker, Ranges]]


class Round:
    """The unfinished messages and local copies of the current round."""

    __slots__ = ("copies", "receiving", "sending")

    def __init__(self) -> None:
        self.sending: list[PeerMessages] = []
        self.receiving: list[PeerMessages] = []
        self.copies: list[LateCopy] = []

    @property
    def is_done(self) -> bool:
        return not (self.sending or self.receiving or self.copies)

    def prune(self) -> None:
        self.sending = [peer for peer in self.sending if peer.sends]
        self.receiving = [peer for peer in self.receiving if peer.receives]
        if self.copies:
            self.copies = [copy for copy in self.copies if not copy.is_done]


class RoundPlanner:
    """Creates the rounds of one call."""

    def __init__(
        self,
        rank: int,
        heads: Heads,
        blocks: Blocks,
        combine: Combine | None,
        item_bytes: int,
        scratch: Scratch,
        peer: Callable[[int], PeerMessages],
    ) -> None:
        self._rank = rank
        self._heads = heads
        self._blocks = blocks
        self._combine = combine
        self._item_bytes = item_bytes
        self._scratch = scratch
        self._peer = peer

    def begin(self, actions: Sequence[Action]) -> Round:
        """Enqueue the messages of a round. Run its local copies now if they overwrite no data of a message."""
        round_ = Round()
        read: _Read = []
        written: _Written = []
        copies: list[Copy] = []
        for action in actions:
            if type(action) is Send:
                read.append(self._begin_send(round_, action))
            elif type(action) is Receive:
                written.append(self._begin_receive(round_, action))
            else:
                assert type(action) is Copy
                copies.append(action)
        if copies:
            written = self._begin_copies(round_, copies, read) + written
        if len(read) + len(written) > 1:
            _order(read, written)
        return round_

    def _begin_send(self, round_: Round, send: Send) -> tuple[Blocker, Ranges]:
        views, ranges = self._blocks.locate(send.spans) if send.spans else ([], [])
        nbytes = sum(map(len, views))
        peer = self._peer(send.peer)
        if not peer.sends:
            round_.sending.append(peer)
        outgoing = OutgoingMessage(self._heads.head(nbytes), views, ranges, nbytes)
        peer.sends.append(outgoing)
        return outgoing, ranges

    def _begin_receive(self, round_: Round, receive: Receive) -> tuple[IncomingMessage, Ranges]:
        views, ranges = self._blocks.locate(receive.spans) if receive.spans else ([], [])
        nbytes = sum(map(len, views))
        combine = None
        if receive.reduce:
            assert self._combine is not None
            combine = self._combine
        peer = self._peer(receive.peer)
        if not peer.receives:
            round_.receiving.append(peer)
        head = self._heads.head(nbytes)
        is_first = receive.peer < self._rank
        incoming = IncomingMessage(
            peer, head, views, ranges, nbytes, combine, self._item_bytes, self._scratch, is_first=is_first
        )
        peer.receives.append(incoming)
        return incoming, ranges

    def _begin_copies(self, round_: Round, copies: Sequence[Copy], read: _Read) -> _Written:
        located = [(self._blocks.locate(copy.source), self._blocks.locate(copy.target)) for copy in copies]
        targets = [span for _, (_, ranges) in located for span in ranges]
        sources = [span for (_, ranges), _ in located for span in ranges]
        if not collide(targets, sources + [span for _, ranges in read for span in ranges]):
            for (views, _), (target_views, _) in located:
                _copy(views, target_views)
            return []
        round_.copies = [LateCopy(source[0], target[0], target[1]) for source, target in located]
        return [(late, target[1]) for late, (_, target) in zip(round_.copies, located, strict=True)]


def _order(read: _Read, written: _Written) -> None:
    """Set the ``blockers`` of each write: the sends and earlier writes of the round that use the write's memory."""
    spans_written = [span for _, ranges in written for span in ranges]
    if not spans_written or not collide(spans_written, [span for _, ranges in read for span in ranges]):
        return
    earlier = list(read)
    for write, ranges in written:
        # Both ranges are passed as written ranges, so that ``collide`` finds every overlap between them. A single
        # message never writes a byte twice.
        write.blockers.extend(blocker for blocker, earlier_ranges in earlier if collide(ranges, earlier_ranges))
        earlier.append((write, ranges))


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    if len(sources) == len(targets) == 1:
        targets[0][:] = sources[0]
    else:
        scatter(targets, memoryview(b"".join(sources)))

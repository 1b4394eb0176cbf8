"""Connect one rank to the other ranks of its group at the first message, and close with a reason."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Sequence

from typing_extensions import override

from paceline.collectives.network.mesh import unreachable
from paceline.collectives.p2p.leaving import Leaving, say_last_words
from paceline.collectives.p2p.matching import Matching
from paceline.collectives.p2p.pending import Receiving
from paceline.collectives.p2p.progress import READ, ProgressLoop
from paceline.collectives.p2p.streams import Ends, Incoming, Outgoing
from paceline.errors import PacelineError, RankLostError
from paceline.meeting.node import Node, NodeInfo, Taker

_LINGER_S = 1.0


class Streams(Taker):
    """One outgoing and one incoming stream for each other rank, created at first use."""

    def __init__(
        self,
        node: Node,
        group: str,
        rank: int,
        infos: Sequence[NodeInfo],
        connect_timeout_s: float,
        matching: Matching,
        progress: ProgressLoop,
        ends: Ends,
    ) -> None:
        self._node = node
        self._group = group
        self._rank = rank
        self._infos = infos
        self._connect_timeout_s = connect_timeout_s
        self._matching = matching
        self._progress = progress
        self._ends = ends
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.last_words = b""
        """Message with the reason, sent on every connection before it is closed after the group's end."""
        self._num_coming: dict[int, int] = {}
        self._connectors: set[threading.Thread] = set()

    # with the lock held

    @property
    def _is_over(self) -> bool:
        return bool(self.last_words) or self._progress.is_closed

    def reach(self, to: int) -> Outgoing:
        """Return the stream to a rank, possibly not yet connected."""
        outgoing = self.outgoing.get(to)
        if outgoing is None:
            outgoing = self.outgoing[to] = Outgoing(to, self._progress, self._ends)
            self._progress.start()
            connector = threading.Thread(
                target=functools.partial(self._connect, outgoing), name="paceline-connector", daemon=True
            )
            self._connectors.add(connector)
            connector.start()
        return outgoing

    def may_bring(self, rank: int) -> bool:
        """Return whether a message of this rank may still arrive."""
        return rank in self.incoming or self._num_coming.get(rank, 0) > 0

    def receiving(self) -> dict[int, Receiving]:
        """Return the receives with arriving messages, by source."""
        found = {incoming.source: incoming.receive for incoming in self.incoming.values()}
        return {source: receive for source, receive in found.items() if receive is not None}

    def drop(self, incoming: Incoming) -> None:
        """Close a stream after its end."""
        self.incoming.pop(incoming.source, None)
        self._progress.unwatch(incoming)
        incoming.connected.close()

    # called by the node

    @override
    def coming(self, rank: int) -> None:
        with self._progress.lock:
            self._num_coming[rank] = self._num_coming.get(rank, 0) + 1

    @override
    def arrived(self, rank: int, connected: socket.socket | None) -> None:
        with self._progress.lock:
            self._num_coming[rank] -= 1
            if connected is None:
                return
            if not self._is_over and rank not in self.incoming and 0 <= rank < len(self._infos):
                incoming = Incoming(rank, self._rank, connected, self._matching, self._progress, self._ends)
                self.incoming[rank] = incoming
                self._progress.start()
                self._progress.watch(incoming, READ)
                return
        self._dismiss(connected)

    # without the lock

    def _connect(self, outgoing: Outgoing) -> None:
        connected: socket.socket | None = None
        failure: RankLostError | None = None
        try:
            deadline = time.monotonic() + self._connect_timeout_s
            connected = self._node.connect(self._infos[outgoing.to], self._group, self._rank, "p2p", deadline)
        except (PacelineError, OSError) as error:
            failure = unreachable(outgoing.to, error)
        with self._progress.lock:
            is_over = self._is_over or outgoing.error is not None
            if failure is not None and not is_over:
                self._ends.outgoing_lost(outgoing, failure)
            elif connected is not None and not is_over:
                outgoing.attach(connected)
                connected = None
            self._progress.kick()
        if connected is not None:
            self._dismiss(connected)
        with self._progress.lock:
            self._connectors.discard(threading.current_thread())

    def leave(self) -> None:
        """Send the last message on all connections, and close them; its receivers do the same."""
        self._progress.close("given up")  # no other thread uses the connections from here
        words = memoryview(self.last_words)
        leaving = []
        with self._progress.lock:
            for outgoing in self.outgoing.values():
                if outgoing.is_connected:
                    outgoing.is_connected = False
                    begun = [part for each in list(outgoing.queue)[:1] if each.has_begun for part in each.parts]
                    leaving.append(Leaving(outgoing.connected, [*begun, words]))
                outgoing.queue.clear()
            leaving += [Leaving(incoming.connected, [words]) for incoming in self.incoming.values()]
            self.incoming.clear()
        say_last_words(leaving, time.monotonic() + _LINGER_S)

    def _dismiss(self, connected: socket.socket) -> None:
        """Close a late connection, with the reason."""
        words = [memoryview(self.last_words)] if self.last_words else []
        say_last_words([Leaving(connected, words)], time.monotonic() + (_LINGER_S if words else 0.0))

    def close(self) -> None:
        """Close every connection, after the loop."""
        with self._progress.lock:
            for outgoing in self.outgoing.values():
                outgoing.fail(RankLostError(f"group {self._group!r} is closed"))
            for incoming in list(self.incoming.values()):
                self.drop(incoming)
            connectors = list(self._connectors)
        deadline = time.monotonic() + _LINGER_S
        for connector in connectors:  # a connector that waits for a stopped rank ends later
            connector.join(max(deadline - time.monotonic(), 0.0))

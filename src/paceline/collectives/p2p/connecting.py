"""Open connections for messages between two ranks of a group, when a rank sends its first message to another rank.

After a failure, the connections send its reason before they are closed.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Sequence

from typing_extensions import override

from paceline.collectives.last_messages import ClosingConnection, send_and_close
from paceline.collectives.network.mesh import unreachable
from paceline.collectives.p2p.matching import Matching
from paceline.collectives.p2p.pending import Receiving
from paceline.collectives.p2p.progress import READ, ProgressLoop
from paceline.collectives.p2p.streams import Ends, Incoming, Outgoing
from paceline.errors import PacelineError, RankLostError
from paceline.meeting.node import ConnectionReceiver, Node, NodeInfo

_LINGER_S = 1.0


class Streams(ConnectionReceiver):
    """One outgoing and one incoming stream of messages for each other rank, created at the first message."""

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
        self.abort_message = b""
        """The last message on every connection after a failure; it contains the reason. Empty before a failure."""
        self._num_expected: dict[int, int] = {}
        self._connectors: set[threading.Thread] = set()

    # The caller of the following methods must hold the lock of the progress loop.

    @property
    def _has_ended(self) -> bool:
        return bool(self.abort_message) or self._progress.is_closed

    def stream_to(self, to: int) -> Outgoing:
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

    def may_deliver(self, rank: int) -> bool:
        return rank in self.incoming or self._num_expected.get(rank, 0) > 0

    def receiving(self) -> dict[int, Receiving]:
        found = {incoming.source: incoming.receive for incoming in self.incoming.values()}
        return {source: receive for source, receive in found.items() if receive is not None}

    def drop(self, incoming: Incoming) -> None:
        self.incoming.pop(incoming.source, None)
        self._progress.unwatch(incoming)
        incoming.connected.close()

    # The node, which accepts connections of other ranks, calls the following methods.

    @override
    def coming(self, rank: int) -> None:
        with self._progress.lock:
            self._num_expected[rank] = self._num_expected.get(rank, 0) + 1

    @override
    def arrived(self, rank: int, connected: socket.socket | None) -> None:
        with self._progress.lock:
            self._num_expected[rank] -= 1
            if connected is None:
                return
            if not self._has_ended and rank not in self.incoming and 0 <= rank < len(self._infos):
                incoming = Incoming(rank, self._rank, connected, self._matching, self._progress, self._ends)
                self.incoming[rank] = incoming
                self._progress.start()
                self._progress.watch(incoming, READ)
                return
        self._reject(connected)

    # The following methods acquire the lock, so their callers must not hold it.

    def _connect(self, outgoing: Outgoing) -> None:
        connected: socket.socket | None = None
        failure: RankLostError | None = None
        try:
            deadline = time.monotonic() + self._connect_timeout_s
            connected = self._node.connect(self._infos[outgoing.to], self._group, self._rank, "p2p", deadline)
        except (PacelineError, OSError) as error:
            failure = unreachable(outgoing.to, error)
        with self._progress.lock:
            has_ended = self._has_ended or outgoing.error is not None
            if failure is not None and not has_ended:
                self._ends.outgoing_lost(outgoing, failure)
            elif connected is not None and not has_ended:
                outgoing.attach(connected)
                connected = None
            self._progress.kick()
        if connected is not None:
            self._reject(connected)
        with self._progress.lock:
            self._connectors.discard(threading.current_thread())

    def send_abort(self) -> None:
        self._progress.close("given up")  # after this call, no other thread uses the connections
        message = memoryview(self.abort_message)
        closing = []
        with self._progress.lock:
            for outgoing in self.outgoing.values():
                if outgoing.is_connected:
                    outgoing.is_connected = False
                    first = outgoing.queue[0] if outgoing.queue else None
                    unsent = first.parts if first is not None and first.is_started else []
                    closing.append(ClosingConnection(outgoing.connected, [*unsent, message]))
                outgoing.queue.clear()
            closing += [ClosingConnection(incoming.connected, [message]) for incoming in self.incoming.values()]
            self.incoming.clear()
        send_and_close(closing, time.monotonic() + _LINGER_S)

    def _reject(self, connected: socket.socket) -> None:
        message = [memoryview(self.abort_message)] if self.abort_message else []
        send_and_close([ClosingConnection(connected, message)], time.monotonic() + (_LINGER_S if message else 0.0))

    def close(self) -> None:
        with self._progress.lock:
            for outgoing in self.outgoing.values():
                outgoing.fail(RankLostError(f"group {self._group!r} is closed"))
            for incoming in list(self.incoming.values()):
                self.drop(incoming)
            connectors = list(self._connectors)
        deadline = time.monotonic() + _LINGER_S
        for connector in connectors:  # a thread that connects to a stopped rank ends at its own timeout
            connector.join(max(deadline - time.monotonic(), 0.0))

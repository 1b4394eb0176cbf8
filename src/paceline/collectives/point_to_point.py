"""Tagged send and receive between the ranks of one group.

Each pair of ranks that talks has one connection for each direction, made at the first send. Messages of one rank with
one tag are received in the order sent. A message that no receive has asked for is kept, up to 64 MB from each rank;
beyond that its sender waits, until a receive is posted that it may satisfy.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Sequence

from paceline.collectives._p2p_matching import MAX_KEPT_BYTES, Matching, Message
from paceline.collectives._p2p_pending import Pending, Receiving, Sending, check, describe, mismatch, total
from paceline.collectives._p2p_progress import READ, Progress
from paceline.collectives._p2p_streams import Incoming, Outgoing, deliver, lost_connection
from paceline.collectives.mesh import unreachable
from paceline.collectives.node import Node, NodeInfo, Taker
from paceline.errors import GroupClosedError, PacelineError, PeerError, RankLostError, UsageError

_LOOK_S = 1.0
"""After how long one who waits for a rank that has never connected looks whether it is still there."""
_LINGER_S = 1.0

__all__ = ["Pending", "PointToPoint"]


class PointToPoint(Taker):
    """Send and receive of one rank. For several threads at once; what is under way moves on in the background."""

    def __init__(
        self,
        node: Node,
        group: str,
        rank: int,
        infos: Sequence[NodeInfo],
        *,
        connect_timeout_s: float = 60.0,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """``group`` must be the same on all its ranks, and no other group's; ``infos`` are the ranks' nodes."""
        self.rank = rank
        self.size = len(infos)
        self.group = group
        self._node = node
        self._infos = infos
        self._connect_timeout_s = connect_timeout_s
        self._matching = Matching(max_kept_bytes)
        self._progress = Progress(self._is_busy)
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._num_coming: dict[int, int] = {}
        self._lost: dict[int, RankLostError] = {}
        self._connectors: set[threading.Thread] = set()
        node.take(group, "p2p", self)

    def send(self, buffer: memoryview, to: int, tag: int, what: str = "") -> Pending:
        """Begin to send; the buffer must not be written until the send is done.

        ``what`` (at most 40 bytes) says what it is, as ``float32[1000]``; the receiver must expect the same. Raises
        UsageError, RankLostError, GroupClosedError, and the MismatchError of an earlier message to this rank that its
        receiver did not expect.
        """
        self._check_rank(to)
        sending = Sending(self, check(buffer, tag, what), to, tag, what)
        with self._progress.lock:
            self._check_open()
            if to == self.rank:
                self._send_here(sending)
                return sending
            outgoing = self._reach(to)
            if outgoing.error is not None:
                raise outgoing.error
            if outgoing.complaint is not None:
                complaint, outgoing.complaint = outgoing.complaint, None
                raise complaint
            outgoing.add(sending)
            if outgoing.queue:
                self._progress.kick()
        return sending

    def receive(self, buffer: memoryview, source: int | None, tag: int, what: str = "") -> Pending:
        """Begin to receive a message of exactly this size and ``what``; ``source`` None: from any rank.

        Raises UsageError, GroupClosedError, and RankLostError when the rank is known to be dead.
        """
        if source is not None:
            self._check_rank(source)
        receiving = Receiving(self, check(buffer, tag, what, writable=True), source, tag, what)
        with self._progress.lock:
            self._check_open()
            self._progress.start()
            message = self._matching.post(receiving.posted)
            if message is None:
                self._fail_if_lost(receiving)
                for incoming in list(self._incoming.values()):
                    incoming.resume()
            elif message.is_complete:
                incoming_from = self._incoming.get(message.source)
                deliver(message, self.rank, incoming_from.connected if incoming_from is not None else None)
            else:
                receiving.message = message
        return receiving

    def close(self, how: str = "closed") -> None:
        """Close every connection; what is under way raises GroupClosedError that says `how`. Idempotent."""
        self._progress.close(how)
        with self._progress.lock:
            error = GroupClosedError(f"group {self.group!r} was {how} while a message was under way")
            for outgoing in self._outgoing.values():
                for sending in outgoing.queue:
                    sending.fail(error)
                outgoing.fail(RankLostError(f"group {self.group!r} is closed"))
            for rank in range(self.size):
                for posted in self._matching.awaiting(rank):
                    assert isinstance(posted.owner, Receiving)
                    posted.owner.fail(error)
            for incoming in list(self._incoming.values()):
                if incoming.message is not None and incoming.message.receive is not None:
                    owner = incoming.message.receive.owner
                    assert isinstance(owner, Receiving)
                    owner.fail(error)
                self._drop(incoming)
            connectors = list(self._connectors)
        deadline = time.monotonic() + _LINGER_S
        for connector in connectors:  # one that waits for a stopped rank ends by itself, later
            connector.join(max(deadline - time.monotonic(), 0.0))

    # the node's calls

    def coming(self, rank: int) -> None:
        """See :meth:`Taker.coming`."""
        with self._progress.lock:
            self._num_coming[rank] = self._num_coming.get(rank, 0) + 1

    def arrived(self, rank: int, connected: socket.socket | None) -> None:
        """See :meth:`Taker.arrived`."""
        with self._progress.lock:
            self._num_coming[rank] -= 1
            if connected is None:
                return
            if self._progress.is_closed or rank in self._incoming or not 0 <= rank < self.size:
                connected.close()
                return
            incoming = Incoming(rank, self.rank, connected, self._matching, self._progress, self._incoming_lost)
            self._incoming[rank] = incoming
            self._progress.start()
            self._progress.watch(incoming, READ)

    # Pending's calls

    def wait(self, pending: Pending, timeout_s: float) -> None:
        """See :meth:`Pending.wait`."""
        start = time.monotonic()
        deadline = start + timeout_s
        if self._progress.wait(pending, min(deadline, start + _LOOK_S)):
            return
        with self._progress.lock:
            self._look_after(pending)
        if self._progress.wait(pending, deadline):
            return
        with self._progress.lock:
            if isinstance(pending, Sending):
                self._give_up_sending(pending, timeout_s)
            elif isinstance(pending, Receiving):
                self._give_up_receiving(pending, timeout_s)

    def wait_for(self, pending: Pending, timeout_s: float) -> bool:
        """See :meth:`Pending.wait_for`."""
        return self._progress.wait(pending, time.monotonic() + timeout_s)

    # with the lock held

    def _is_busy(self) -> bool:
        return self._matching.num_posted > 0 or any(outgoing.queue for outgoing in self._outgoing.values())

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} was given, group {self.group!r} has ranks 0 to {self.size - 1}")

    def _check_open(self) -> None:
        if self._progress.is_closed:
            raise GroupClosedError(f"group {self.group!r} is closed")

    def _send_here(self, sending: Sending) -> None:
        message = Message(self.rank, sending.tag, sending.what, sending.nbytes, 0, is_complete=True)
        if self._matching.match(message):
            posted = message.receive
            assert posted is not None
            assert isinstance(posted.owner, Receiving)
            if posted.fits(message):
                posted.buffer[:] = sending.parts[0]
                posted.owner.finish(self.rank)
            else:
                error = mismatch(message, posted, self.rank)
                posted.owner.fail(error)
                sending.fail(error)
        else:
            message.payload = memoryview(bytes(sending.parts[0]))
            self._matching.keep(message)
        sending.finish(self.rank)
        self._progress.tell()

    def _reach(self, to: int) -> Outgoing:
        """Return the connection to a rank, which may yet have to be made."""
        outgoing = self._outgoing.get(to)
        if outgoing is None:
            outgoing = self._outgoing[to] = Outgoing(to, self._progress, self._outgoing_lost)
            self._progress.start()
            connector = threading.Thread(
                target=functools.partial(self._connect, outgoing), name="paceline-connector", daemon=True
            )
            self._connectors.add(connector)
            connector.start()
        return outgoing

    def _connect(self, outgoing: Outgoing) -> None:
        connected: socket.socket | None = None
        failure: RankLostError | None = None
        try:
            deadline = time.monotonic() + self._connect_timeout_s
            connected = self._node.connect(self._infos[outgoing.to], self.group, self.rank, "p2p", deadline)
        except (PacelineError, OSError) as error:
            failure = unreachable(outgoing.to, error)
        with self._progress.lock:
            if connected is None or self._progress.is_closed or outgoing.error is not None:
                if connected is not None:
                    connected.close()
                if failure is not None:
                    self._outgoing_failed(outgoing, failure)
            else:
                outgoing.attach(connected)
            self._progress.kick()
            self._connectors.discard(threading.current_thread())

    def _incoming_lost(self, incoming: Incoming, error: OSError | PeerError | None) -> None:
        message = incoming.message
        failure = lost_connection(incoming.source, error)
        if message is not None and message.receive is not None:
            assert isinstance(message.receive.owner, Receiving)
            message.receive.owner.fail(failure)
        elif message is not None:
            self._matching.drop(message)
        self._drop(incoming)
        self._rank_lost(incoming.source, failure)

    def _drop(self, incoming: Incoming) -> None:
        self._incoming.pop(incoming.source, None)
        self._progress.unwatch(incoming)
        incoming.connected.close()

    def _outgoing_lost(self, outgoing: Outgoing, error: OSError | None) -> None:
        self._outgoing_failed(outgoing, lost_connection(outgoing.to, error))

    def _outgoing_failed(self, outgoing: Outgoing, failure: RankLostError) -> None:
        outgoing.fail(failure)
        self._progress.tell()
        # What the rank sent before it went may yet arrive; the end of that connection then says that it has gone.
        if outgoing.to not in self._incoming and not self._num_coming.get(outgoing.to):
            self._rank_lost(outgoing.to, failure)

    def _rank_lost(self, rank: int, failure: RankLostError) -> None:
        self._lost.setdefault(rank, failure)
        for posted in self._matching.awaiting(rank):
            assert isinstance(posted.owner, Receiving)
            self._fail_if_lost(posted.owner)

    def _fail_if_lost(self, receiving: Receiving) -> None:
        """Fail a receive without a message if nobody is left who could send it."""
        source = receiving.posted.source
        if source is not None:
            error = self._lost.get(source)
        elif len(self._lost) >= self.size - 1 > 0:
            error = RankLostError("every other rank has closed its connection", tuple(sorted(self._lost)))
        else:
            return
        if error is not None and self._matching.withdraw(receiving.posted):
            receiving.fail(error)

    def _look_after(self, pending: Pending) -> None:
        """See to it that the death of the awaited rank shows, though it has never connected: connect to it."""
        if isinstance(pending, Receiving) and not pending.finished and not self._progress.is_closed:
            source = pending.posted.source
            if source not in (None, self.rank) and source not in self._incoming:
                assert source is not None
                self._reach(source)

    def _give_up_sending(self, sending: Sending, timeout_s: float) -> None:
        if sending.finished:
            return
        gone = sending.nbytes - min(total(sending.parts), sending.nbytes)
        error = RankLostError(
            f"rank {sending.to} took {gone} of the {describe(sending.nbytes, sending.what)} with tag {sending.tag} in "
            f"{timeout_s:g} s; its process is stopped, does not receive or cannot be reached",
            (sending.to,),
        )
        outgoing = self._outgoing[sending.to]
        if sending.has_begun:
            outgoing.fail(error)  # half a message has gone: nothing can follow it
            self._progress.tell()
        else:
            outgoing.queue.remove(sending)
            sending.fail(error)

    def _give_up_receiving(self, receiving: Receiving, timeout_s: float) -> None:
        if receiving.finished:
            return
        posted, message = receiving.posted, receiving.message
        begun = ""
        if message is None:
            self._matching.withdraw(posted)
        else:
            begun = "the whole of "
            incoming = self._incoming.get(message.source)
            if message.payload:
                message.receive = None
                self._matching.keep(message, again=True)
            elif incoming is not None:
                incoming.give_up(message)
        source = posted.source if message is None else message.source
        whom = f"rank {source}" if source is not None else "any rank"
        receiving.fail(
            RankLostError(
                f"{begun or 'no '}message with tag {posted.tag} {'did not come' if begun else 'came'} from {whom} in "
                f"{timeout_s:g} s; it is stopped, has not sent it or cannot be reached",
                () if source is None else (source,),
            )
        )

"""Send and receive tagged messages between the ranks of one group.

Each pair of communicating ranks has one connection per direction, created at the first send. Messages of one rank with
one tag are received in the order of sending. Messages without a receive are buffered, up to 64 MB from each rank.
Beyond that the sender waits until a receive is posted that its message may satisfy.

The first failed message ends the group: each rank sends the reason on all its connections, and every receiver does the
same. A waiting rank periodically checks whether the awaited ranks have given up. Before its timeout it polls all ranks
for the ranks they wait for, to report the rank that causes the delay and not a neighbour.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from paceline.collectives.network.culprits import Ask, Search, given_up
from paceline.collectives.network.frames import Abort
from paceline.collectives.network.verdicts import abort_of, to_error
from paceline.collectives.p2p.connecting import Streams
from paceline.collectives.p2p.matching import MAX_KEPT_BYTES, Matching
from paceline.collectives.p2p.pending import Pending, Receiving, Sending, check, pack_last
from paceline.collectives.p2p.progress import ProgressLoop
from paceline.collectives.p2p.streams import Ends, Incoming, Outgoing, deliver, deliver_here, lost_connection
from paceline.errors import CollectiveError, GroupClosedError, PeerError, RankLostError, UsageError
from paceline.meeting.node import Node, NodeInfo

_LOOK_S = 1.0
"""Time after which a waiting rank checks the other rank; grows by a factor of 4."""
_ANSWER_S = 1.2
_MIN_ASKING_S = 0.3
_MAX_ASKING_S = 1.5

__all__ = ["Pending", "PointToPoint"]


class PointToPoint(Ends):
    """Send and receive of one rank. Thread-safe; operations progress in the background."""

    def __init__(
        self,
        node: Node,
        group: str,
        rank: int,
        infos: Sequence[NodeInfo],
        *,
        connect_timeout_s: float = 60.0,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        ask: Ask | None = None,
        on_failure: Callable[[CollectiveError, bool], None] | None = None,
    ) -> None:
        """``group`` must be equal on all its ranks and unique; ``infos`` are the ranks' nodes.

        ``ask`` requests a rank's status. ``on_failure`` is called once, with the first error and whether an operation
        of this rank raises it. It runs in any thread with the lock held, so it must not wait.
        """
        self.rank = rank
        self.size = len(infos)
        self.group = group
        self._matching = Matching(max_kept_bytes)
        self._progress = ProgressLoop(self._is_sending)
        self._streams = Streams(node, group, rank, infos, connect_timeout_s, self._matching, self._progress, self)
        self._lost: dict[int, RankLostError] = {}
        self._ask = ask
        self._on_failure = on_failure
        self._error: CollectiveError | None = None
        self._speaker: threading.Thread | None = None
        node.take(group, "p2p", self._streams)

    def send(self, buffer: memoryview, to: int, tag: int, what: str = "") -> Pending:
        """Start a send; do not write to the buffer before its end.

        ``what`` (at most 40 bytes) describes the data, such as ``float32[1000]``; the receiver must expect the same.
        Raises UsageError, RankLostError and GroupClosedError.
        """
        self._check_rank(to)
        sending = Sending(self, check(buffer, tag, what), to, tag, what)
        with self._progress.lock:
            self._check_open()
            if to == self.rank:
                deliver_here(sending, self.rank, self._matching, self)
                if self._error is None:
                    sending.finish(self.rank)
                else:
                    sending.fail(self._error)
                self._progress.tell()
                return sending
            outgoing = self._streams.reach(to)
            if outgoing.error is not None:
                self._end(outgoing.error, is_heard=True)
                raise outgoing.error
            outgoing.add(sending)
            if outgoing.queue:
                self._progress.kick()
        return sending

    def receive(self, buffer: memoryview, source: int | None, tag: int, what: str = "") -> Pending:
        """Start to receive a message of exactly this size and ``what``, from ``source`` or (None) from any rank.

        Raises UsageError, GroupClosedError, and RankLostError if the rank is known to be dead.
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
                for incoming in list(self._streams.incoming.values()):
                    incoming.resume()
            elif message.is_complete:
                deliver(message, self.rank, self)
        return receiving

    def awaited(self) -> tuple[int, ...]:
        """Return the other ranks of all pending messages."""
        with self._progress.lock:
            ranks: set[int] = set()
            for posted in self._matching.posted():
                ranks.update(range(self.size) if posted.source is None else (posted.source,))
            ranks.update(self._streams.receiving())
            ranks.update(outgoing.to for outgoing in self._streams.outgoing.values() if outgoing.queue)
        return tuple(sorted(ranks - {self.rank}))

    def fail(self, error: CollectiveError) -> None:
        """End the group with an error, like a failed message."""
        with self._progress.lock:
            self._end(error)

    def close(self, how: str = "closed") -> None:
        """Close every connection; pending operations raise GroupClosedError that mentions `how`. Idempotent."""
        with self._progress.lock:
            speaker = self._speaker
        if speaker is not None:
            speaker.join()
        self._progress.close(how)
        with self._progress.lock:
            self._fail_all(GroupClosedError(f"group {self.group!r} was {how} while a message was pending"))
        self._streams.close()

    # called by Pending

    def wait(self, pending: Pending, timeout_s: float) -> None:
        """See :meth:`Pending.wait`."""
        start = time.monotonic()
        deadline = start + timeout_s
        asks_at = deadline - min(max(_MIN_ASKING_S, 0.2 * timeout_s), _MAX_ASKING_S)
        look_s = _LOOK_S
        while not self._progress.wait(pending, min(time.monotonic() + look_s, asks_at)):
            if time.monotonic() >= asks_at:
                break
            if self._looks_after(pending, asks_at):
                return
            look_s *= 4
        else:
            return
        search = _search(self._ask, range(self.size), self.rank)
        if self._progress.wait(pending, deadline):
            return
        answers = search.answers() if search is not None else {}
        abort = given_up(answers)
        with self._progress.lock:
            if pending.finished:
                return
            if abort is not None:
                self.told(abort)
            elif isinstance(pending, Sending):
                self._end(pending.overdue(timeout_s, self.rank, answers))
            elif isinstance(pending, Receiving):
                begun = next((source for source, each in self._streams.receiving().items() if each is pending), None)
                self._end(pending.overdue(timeout_s, self.rank, answers, begun, self.size))

    def wait_for(self, pending: Pending, timeout_s: float) -> bool:
        """See :meth:`Pending.wait_for`."""
        return self._progress.wait(pending, time.monotonic() + timeout_s)

    # with the lock held

    def _is_sending(self) -> bool:
        return any(outgoing.queue for outgoing in self._streams.outgoing.values())

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"got rank {rank}, expected a rank of group {self.group!r} from 0 to {self.size - 1}")

    def _check_open(self) -> None:
        if self._error is not None:
            raise GroupClosedError(f"group {self.group!r} refuses further work: a message failed: {self._error}")
        if self._progress.is_closed:
            raise GroupClosedError(f"group {self.group!r} is closed")

    @override
    def told(self, abort: Abort) -> None:
        self._end(to_error(abort, self.group))

    @override
    def failed(self, error: CollectiveError) -> None:
        self._end(error, is_heard=True)

    @override
    def incoming_lost(self, incoming: Incoming, error: OSError | PeerError | None) -> None:
        if self._error is not None:
            return
        failure = lost_connection(incoming.source, error)
        if incoming.receive is not None:
            self._end(failure)
            return
        if incoming.message is not None:
            self._matching.drop(incoming.message)
        self._streams.drop(incoming)
        self._rank_lost(incoming.source, failure)

    @override
    def outgoing_lost(self, outgoing: Outgoing, error: OSError | PeerError | None) -> None:
        if self._error is not None:
            return
        failure = lost_connection(outgoing.to, error)
        if outgoing.fail(failure):
            self._end(failure, is_heard=True)
        # The rank's last messages may still arrive; then the end of that connection reports the loss.
        elif not self._streams.may_bring(outgoing.to):
            self._rank_lost(outgoing.to, failure)

    def _rank_lost(self, rank: int, failure: RankLostError) -> None:
        self._lost.setdefault(rank, failure)
        for posted in self._matching.awaiting(rank):
            assert isinstance(posted.owner, Receiving)
            self._fail_if_lost(posted.owner)

    def _fail_if_lost(self, receiving: Receiving) -> None:
        """Fail a receive without a message if no remaining rank could send it."""
        source = receiving.posted.source
        if source is not None:
            error = self._lost.get(source)
        elif len(self._lost) >= self.size - 1 > 0:
            error = RankLostError("every other rank has closed its connection", tuple(sorted(self._lost)))
        else:
            return
        if error is not None:
            self._end(error)

    def _looks_after(self, pending: Pending, deadline: float) -> bool:
        """Check the awaited rank even without a connection from it; return whether the operation has ended.

        A rank whose process has ended refuses connections, and a rank that has given up reports it in its status.
        """
        awaited = pending.to if isinstance(pending, Sending) else None
        with self._progress.lock:
            if isinstance(pending, Receiving) and not pending.finished and not self._progress.is_closed:
                awaited = pending.posted.source
                if awaited not in (None, self.rank) and awaited not in self._streams.incoming:
                    assert awaited is not None
                    self._streams.reach(awaited)
        search = _search(self._ask, range(self.size) if awaited is None else (awaited,), self.rank)
        if search is None:
            return False
        if self._progress.wait(pending, min(time.monotonic() + _ANSWER_S, deadline)):
            return True
        abort = given_up(search.answers())
        if abort is not None:
            with self._progress.lock:
                self.told(abort)
        return abort is not None

    # the end of the group

    def _end(self, error: CollectiveError, *, is_heard: bool = False) -> None:
        """Fail all pending operations, and start to report the reason (with the lock held)."""
        if self._error is not None or self._progress.is_closed:
            return
        self._error = error
        self._streams.last_words = pack_last(abort_of(error))
        is_heard = self._fail_all(error) or is_heard
        if self._on_failure is not None:
            self._on_failure(error, is_heard)
        self._speaker = threading.Thread(target=self._streams.leave, name="paceline-giving-up", daemon=True)
        self._speaker.start()

    def _fail_all(self, error: CollectiveError) -> bool:
        """Fail all pending operations; return whether there were any."""
        under_way: list[Pending] = [each for out in self._streams.outgoing.values() for each in out.queue]
        for posted in self._matching.posted():
            assert isinstance(posted.owner, Receiving)
            under_way.append(posted.owner)
        under_way += self._streams.receiving().values()
        for pending in under_way:
            pending.fail(error)
        self._progress.tell()
        return bool(under_way)


def _search(ask: Ask | None, ranks: Sequence[int], own: int) -> Search | None:
    return None if ask is None else Search(ask, [rank for rank in ranks if rank != own])

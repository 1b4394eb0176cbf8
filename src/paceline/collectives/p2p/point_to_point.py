"""Send and receive tagged messages between the ranks of one group.

Each pair of communicating ranks has one connection per direction, created at the first send. Messages from one rank
with equal tags are received in the order of sending. A message that arrives before its receive starts is buffered, up
to 64 MB from each rank. Above this limit, the sender waits until the matching receive starts.

The first failed message ends the group: its rank sends the reason on all its connections, and every rank that receives
the reason forwards it on all its own connections. Before a timeout, a waiting rank requests the status of all ranks,
because the rank that it waits for may itself wait for another rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from paceline.collectives.aborts import Abort
from paceline.collectives.network.culprits import RequestStatus, Search, first_abort
from paceline.collectives.p2p.connecting import Streams
from paceline.collectives.p2p.matching import MAX_BUFFERED_BYTES, Matching
from paceline.collectives.p2p.pending import Pending, Receiving, Sending, check, pack_abort_message
from paceline.collectives.p2p.progress import ProgressLoop
from paceline.collectives.p2p.streams import Ends, Incoming, Outgoing, deliver, deliver_to_self, lost_connection
from paceline.errors import CollectiveError, GroupClosedError, PeerError, RankLostError, UsageError
from paceline.meeting.node import Node, NodeInfo
from paceline.observe.stuck.report import print_stall_soon

_CHECK_S = 1.0
"""The time after which a waiting rank first checks that the other rank is alive.

Later intervals grow by a factor of 4.
"""
_ANSWER_S = 1.2
_MIN_POLL_S = 0.3
_MAX_POLL_S = 1.5

__all__ = ["Pending", "PointToPoint"]


class PointToPoint(Ends):
    """Sends and receives the messages of one rank. It is thread-safe, and transfers messages in the background."""

    def __init__(
        self,
        node: Node,
        group: str,
        rank: int,
        infos: Sequence[NodeInfo],
        *,
        connect_timeout_s: float = 60.0,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        request_status: RequestStatus | None = None,
        on_failure: Callable[[CollectiveError, bool], None] | None = None,
    ) -> None:
        """``group`` is the unique name of the group, which is equal on all its ranks.

        After the first error, ``on_failure(error, is_reported)`` is called once, in any thread and with the lock held.
        ``is_reported`` states whether a send or receive of this rank raises the error.
        """
        self.rank = rank
        self.size = len(infos)
        self.group = group
        self._matching = Matching(max_buffered_bytes)
        self._progress = ProgressLoop(self._is_sending)
        self._streams = Streams(node, group, rank, infos, connect_timeout_s, self._matching, self._progress, self)
        self._lost: dict[int, RankLostError] = {}
        self._request_status = request_status
        self._on_failure = on_failure
        self._error: CollectiveError | None = None
        self._reporter: threading.Thread | None = None
        node.take(group, "p2p", self._streams)

    def send(self, buffer: memoryview, to: int, tag: int, description: str = "") -> Pending:
        """Start a send. Do not write to the buffer before the send has ended.

        ``description`` (at most 40 bytes) is the type of the data, such as ``float32[1000]``. The receiver must pass an
        equal description.
        """
        self._check_rank(to)
        sending = Sending(self, check(buffer, tag, description), to, tag, description)
        with self._progress.lock:
            self._check_open()
            if to == self.rank:
                deliver_to_self(sending, self.rank, self._matching, self)
                if self._error is None:
                    sending.finish(self.rank)
                else:
                    sending.fail(self._error)
                self._progress.notify()
                return sending
            outgoing = self._streams.stream_to(to)
            if outgoing.error is not None:
                self._end(outgoing.error, is_reported=True)
                raise outgoing.error
            outgoing.add(sending)
            if outgoing.queue:
                self._progress.kick()
        return sending

    def receive(self, buffer: memoryview, source: int | None, tag: int, description: str = "") -> Pending:
        """Start to receive a message of the buffer's size from ``source``. Without ``source``, any rank may send it."""
        if source is not None:
            self._check_rank(source)
        receiving = Receiving(self, check(buffer, tag, description, writable=True), source, tag, description)
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

    def waiting_for(self) -> tuple[int, ...]:
        with self._progress.lock:
            ranks: set[int] = set()
            for posted in self._matching.posted():
                ranks.update(range(self.size) if posted.source is None else (posted.source,))
            ranks.update(self._streams.receiving())
            ranks.update(outgoing.to for outgoing in self._streams.outgoing.values() if outgoing.queue)
        return tuple(sorted(ranks - {self.rank}))

    def fail(self, error: CollectiveError) -> None:
        with self._progress.lock:
            self._end(error)

    def close(self, cause: str = "closed") -> None:
        """Close every connection.

        Pending operations raise GroupClosedError, whose text contains `cause`. Idempotent.
        """
        with self._progress.lock:
            reporter = self._reporter
        if reporter is not None:
            reporter.join()
        self._progress.close(cause)
        with self._progress.lock:
            self._fail_all(GroupClosedError(f"group {self.group!r} was {cause} while a message was pending"))
        self._streams.close()

    # The pending sends and receives call the following methods.

    def wait(self, pending: Pending, timeout_s: float) -> None:
        start = time.monotonic()
        deadline = start + timeout_s
        poll_at = deadline - min(max(_MIN_POLL_S, 0.2 * timeout_s), _MAX_POLL_S)
        check_s = _CHECK_S
        while not self._progress.wait(pending, min(time.monotonic() + check_s, poll_at)):
            if time.monotonic() >= poll_at:
                break
            if self._check_peer(pending, poll_at):
                return
            check_s *= 4
        else:
            return
        search = _search(self._request_status, range(self.size), self.rank)
        waited_s = time.monotonic() - start
        print_stall_soon(
            f"paceline: rank {self.rank} of group {self.group!r} has waited {waited_s:.3g} s for a message"
        )
        if self._progress.wait(pending, deadline):
            return
        answers = search.answers() if search is not None else {}
        abort = first_abort(answers)
        with self._progress.lock:
            if pending.finished:
                return
            if abort is not None:
                self.abort_received(abort)
            elif isinstance(pending, Sending):
                self._end(pending.timeout_error(timeout_s, self.rank, answers))
            elif isinstance(pending, Receiving):
                partial_source = next(
                    (source for source, receive in self._streams.receiving().items() if receive is pending), None
                )
                self._end(pending.timeout_error(timeout_s, self.rank, answers, partial_source, self.size))

    def wait_for(self, pending: Pending, timeout_s: float) -> bool:
        return self._progress.wait(pending, time.monotonic() + timeout_s)

    # The caller of the following methods must hold the lock of the progress loop.

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
    def abort_received(self, abort: Abort) -> None:
        self._end(abort.error(self.group))

    @override
    def failed(self, error: CollectiveError) -> None:
        self._end(error, is_reported=True)

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
            self._end(failure, is_reported=True)
        # If messages of the lost rank may still arrive, this rank reports the loss when the incoming connection ends.
        elif not self._streams.may_deliver(outgoing.to):
            self._rank_lost(outgoing.to, failure)

    def _rank_lost(self, rank: int, failure: RankLostError) -> None:
        self._lost.setdefault(rank, failure)
        for posted in self._matching.awaiting(rank):
            assert isinstance(posted.owner, Receiving)
            self._fail_if_lost(posted.owner)

    def _fail_if_lost(self, receiving: Receiving) -> None:
        source = receiving.posted.source
        if source is not None:
            error = self._lost.get(source)
        elif len(self._lost) >= self.size - 1 > 0:
            error = RankLostError("every other rank has closed its connection", tuple(sorted(self._lost)))
        else:
            return
        if error is not None:
            self._end(error)

    def _check_peer(self, pending: Pending, deadline: float) -> bool:
        """Check the rank that ``pending`` waits for. Return whether ``pending`` has ended.

        The operation ends if a new connection to the rank fails (its process has ended), or if the rank's status
        contains the reason for the group's end.
        """
        waiting_for = pending.to if isinstance(pending, Sending) else None
        with self._progress.lock:
            if isinstance(pending, Receiving) and not pending.finished and not self._progress.is_closed:
                waiting_for = pending.posted.source
                if waiting_for not in (None, self.rank) and waiting_for not in self._streams.incoming:
                    assert waiting_for is not None
                    self._streams.stream_to(waiting_for)
        search = _search(self._request_status, range(self.size) if waiting_for is None else (waiting_for,), self.rank)
        if search is None:
            return False
        if self._progress.wait(pending, min(time.monotonic() + _ANSWER_S, deadline)):
            return True
        abort = first_abort(search.answers())
        if abort is not None:
            with self._progress.lock:
                self.abort_received(abort)
        return abort is not None

    def _end(self, error: CollectiveError, *, is_reported: bool = False) -> None:
        """Fail all pending operations, and start to send the reason to the other ranks.

        The caller must hold the lock.
        """
        if self._error is not None or self._progress.is_closed:
            return
        self._error = error
        self._streams.abort_message = pack_abort_message(Abort.of(error))
        is_reported = self._fail_all(error) or is_reported
        if self._on_failure is not None:
            self._on_failure(error, is_reported)
        self._reporter = threading.Thread(target=self._streams.send_abort, name="paceline-giving-up", daemon=True)
        self._reporter.start()

    def _fail_all(self, error: CollectiveError) -> bool:
        unfinished: list[Pending] = [receive for out in self._streams.outgoing.values() for receive in out.queue]
        for posted in self._matching.posted():
            assert isinstance(posted.owner, Receiving)
            unfinished.append(posted.owner)
        unfinished += self._streams.receiving().values()
        for pending in unfinished:
            pending.fail(error)
        self._progress.notify()
        return bool(unfinished)


def _search(request_status: RequestStatus | None, ranks: Sequence[int], own: int) -> Search | None:
    return None if request_status is None else Search(request_status, [rank for rank in ranks if rank != own])

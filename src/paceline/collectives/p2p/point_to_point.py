"""Tagged send and receive between the ranks of one group.

Each pair of ranks that talks has one connection for each direction, made at the first send. Messages of one rank with
one tag are received in the order sent. A message that no receive has asked for is kept, up to 64 MB from each rank;
beyond that its sender waits, until a receive is posted that it may satisfy.

The first message that fails ends everything: each rank says why on all its connections, and whoever hears it does so
too. A rank that only waits asks from time to time whether those it waits for have given up; and before its time is
over it asks all ranks whom they wait for, to name the one who keeps everybody waiting and not its neighbour.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from paceline.collectives.network.culprits import Ask, Search, Status, find_silent, given_up
from paceline.collectives.network.frames import Abort
from paceline.collectives.network.mesh import unreachable
from paceline.collectives.network.verdicts import abort_of, to_error
from paceline.collectives.p2p.leaving import Leaving, say_last_words
from paceline.collectives.p2p.matching import MAX_KEPT_BYTES, Matching, Message
from paceline.collectives.p2p.pending import Pending, Receiving, Sending, check, describe, mismatch, pack_last, total
from paceline.collectives.p2p.progress import READ, ProgressLoop
from paceline.collectives.p2p.streams import Ends, Incoming, Outgoing, deliver, lost_connection
from paceline.collectives.rendezvous.node import Node, NodeInfo, Taker
from paceline.errors import CollectiveError, GroupClosedError, PacelineError, PeerError, RankLostError, UsageError

_LOOK_S = 1.0
"""After how long one who waits asks whether the other rank is still there; then after four times as long, and so on."""
_ANSWER_S = 1.2
_MIN_ASKING_S = 0.3
_MAX_ASKING_S = 1.5
_LINGER_S = 1.0

__all__ = ["Pending", "PointToPoint"]


class PointToPoint(Taker, Ends):
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
        ask: Ask | None = None,
        on_failure: Callable[[CollectiveError, bool], None] | None = None,
    ) -> None:
        """``group`` must be the same on all its ranks, and no other group's; ``infos`` are the ranks' nodes.

        ``ask`` asks a rank where it is. ``on_failure`` is told, once, that a message has failed and with it all others,
        and whether one of this rank's did, so that its error is raised; by whichever thread finds out, with the lock
        held: it must not wait.
        """
        self.rank = rank
        self.size = len(infos)
        self.group = group
        self._node = node
        self._infos = infos
        self._connect_timeout_s = connect_timeout_s
        self._matching = Matching(max_kept_bytes)
        self._progress = ProgressLoop(self._is_busy)
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._num_coming: dict[int, int] = {}
        self._lost: dict[int, RankLostError] = {}
        self._connectors: set[threading.Thread] = set()
        self._ask = ask
        self._on_failure = on_failure
        self._error: CollectiveError | None = None
        self._last_words = b""
        self._speaker: threading.Thread | None = None
        node.take(group, "p2p", self)

    def send(self, buffer: memoryview, to: int, tag: int, what: str = "") -> Pending:
        """Begin to send; the buffer must not be written until the send is done.

        ``what`` (at most 40 bytes) says what it is, as ``float32[1000]``; the receiver must expect the same. Raises
        UsageError, RankLostError and GroupClosedError.
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
                self._end(outgoing.error, is_heard=True)
                raise outgoing.error
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
                deliver(message, self.rank, self)
        return receiving

    def awaited(self) -> tuple[int, ...]:
        """Return the ranks that messages are awaited from, or to be taken by."""
        with self._progress.lock:
            ranks: set[int] = set()
            for posted in self._matching.posted():
                ranks.update(range(self.size) if posted.source is None else (posted.source,))
            ranks.update(incoming.source for incoming in self._incoming.values() if _receive_of(incoming) is not None)
            ranks.update(outgoing.to for outgoing in self._outgoing.values() if outgoing.queue)
        return tuple(sorted(ranks - {self.rank}))

    def fail(self, error: CollectiveError) -> None:
        """End everything, as a message that fails does."""
        with self._progress.lock:
            self._end(error)

    def close(self, how: str = "closed") -> None:
        """Close every connection; what is under way raises GroupClosedError that says `how`. Idempotent."""
        with self._progress.lock:
            speaker = self._speaker
        if speaker is not None:
            speaker.join()
        self._progress.close(how)
        with self._progress.lock:
            self._fail_all(GroupClosedError(f"group {self.group!r} was {how} while a message was under way"))
            for outgoing in self._outgoing.values():
                outgoing.fail(RankLostError(f"group {self.group!r} is closed"))
            for incoming in list(self._incoming.values()):
                self._drop(incoming)
            connectors = list(self._connectors)
        deadline = time.monotonic() + _LINGER_S
        for connector in connectors:  # one that waits for a stopped rank ends by itself, later
            connector.join(max(deadline - time.monotonic(), 0.0))

    # the node's calls

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
            is_over = self._error is not None or self._progress.is_closed
            if not is_over and rank not in self._incoming and 0 <= rank < self.size:
                incoming = Incoming(rank, self.rank, connected, self._matching, self._progress, self)
                self._incoming[rank] = incoming
                self._progress.start()
                self._progress.watch(incoming, READ)
                return
        self._dismiss(connected)

    # Pending's calls

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
        search = self._search(range(self.size))
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
                self._end(self._untaken(pending, timeout_s, answers))
            elif isinstance(pending, Receiving):
                self._end(self._unsent(pending, timeout_s, answers))

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
        if self._error is not None:
            raise GroupClosedError(f"group {self.group!r} refuses further work since a message failed: {self._error}")
        if self._progress.is_closed:
            raise GroupClosedError(f"group {self.group!r} is closed")

    def _send_here(self, sending: Sending) -> None:
        message = Message(self.rank, sending.tag, sending.what, sending.nbytes, is_complete=True)
        if self._matching.match(message):
            posted = message.receive
            assert posted is not None
            assert isinstance(posted.owner, Receiving)
            if posted.fits(message):
                posted.buffer[:] = sending.parts[1]
                posted.owner.finish(self.rank)
            else:
                error = mismatch(message, posted, self.rank)
                posted.owner.fail(error)
                sending.fail(error)
                self._end(error, is_heard=True)
        else:
            message.payload = memoryview(bytes(sending.parts[1]))
            self._matching.keep(message)
        sending.finish(self.rank)
        self._progress.tell()

    def _reach(self, to: int) -> Outgoing:
        """Return the connection to a rank, which may yet have to be made."""
        outgoing = self._outgoing.get(to)
        if outgoing is None:
            outgoing = self._outgoing[to] = Outgoing(to, self._progress, self)
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
            is_over = self._error is not None or self._progress.is_closed or outgoing.error is not None
            if failure is not None and not is_over:
                self._outgoing_failed(outgoing, failure)
            elif connected is not None and not is_over:
                outgoing.attach(connected)
                connected = None
            self._progress.kick()
        if connected is not None:
            self._dismiss(connected)
        with self._progress.lock:
            self._connectors.discard(threading.current_thread())

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
        receive = _receive_of(incoming)
        if receive is not None:
            self._end(failure)
            return
        if incoming.message is not None:
            self._matching.drop(incoming.message)
        self._drop(incoming)
        self._rank_lost(incoming.source, failure)

    def _drop(self, incoming: Incoming) -> None:
        self._incoming.pop(incoming.source, None)
        self._progress.unwatch(incoming)
        incoming.connected.close()

    @override
    def outgoing_lost(self, outgoing: Outgoing, error: OSError | PeerError | None) -> None:
        if self._error is None:
            self._outgoing_failed(outgoing, lost_connection(outgoing.to, error))

    def _outgoing_failed(self, outgoing: Outgoing, failure: RankLostError) -> None:
        if outgoing.fail(failure):
            self._end(failure, is_heard=True)
        # What the rank sent before it went may yet arrive; the end of that connection then says that it has gone.
        elif outgoing.to not in self._incoming and not self._num_coming.get(outgoing.to):
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
        if error is not None:
            self._end(error)

    def _looks_after(self, pending: Pending, deadline: float) -> bool:
        """See to it that the end of the awaited rank shows, though it has never connected; return whether all is over.

        A rank whose process has ended cannot be connected to, and one that has given up says so when asked.
        """
        awaited = pending.to if isinstance(pending, Sending) else None
        with self._progress.lock:
            if isinstance(pending, Receiving) and not pending.finished and not self._progress.is_closed:
                awaited = pending.posted.source
                if awaited not in (None, self.rank) and awaited not in self._incoming:
                    assert awaited is not None
                    self._reach(awaited)
        search = self._search(range(self.size) if awaited is None else (awaited,))
        if search is None:
            return False
        if self._progress.wait(pending, min(time.monotonic() + _ANSWER_S, deadline)):
            return True
        abort = given_up(search.answers())
        if abort is not None:
            with self._progress.lock:
                self.told(abort)
        return abort is not None

    def _search(self, ranks: Sequence[int]) -> Search | None:
        return None if self._ask is None else Search(self._ask, [rank for rank in ranks if rank != self.rank])

    def _untaken(self, sending: Sending, timeout_s: float, answers: dict[int, Status | None]) -> RankLostError:
        """Return the error for a message that was not taken in time."""
        gone = sending.nbytes - min(total(sending.parts), sending.nbytes)
        culprits = find_silent(answers, self.rank, (sending.to,)) if answers else {}
        told = "; ".join(f"rank {rank} {what}" for rank, what in culprits.items())
        return RankLostError(
            f"rank {sending.to} took {gone} of the {describe(sending.nbytes, sending.what)} with tag {sending.tag} in "
            f"{timeout_s:g} s: {told or 'it is stopped, does not receive or cannot be reached'}",
            tuple(culprits) or (sending.to,),
        )

    def _unsent(self, receiving: Receiving, timeout_s: float, answers: dict[int, Status | None]) -> RankLostError:
        """Return the error for a message that did not come in time."""
        source = receiving.posted.source
        begun = next((each for each in self._incoming.values() if _receive_of(each) is receiving), None)
        if begun is not None:
            source = begun.source
        waits_for = range(self.size) if source is None else (source,)
        culprits = find_silent(answers, self.rank, waits_for) if answers else {}
        told = "; ".join(f"rank {rank} {what}" for rank, what in culprits.items())
        what = "no message" if begun is None else "not the whole of a message"
        whom = "any rank" if source is None else f"rank {source}"
        return RankLostError(
            f"{what} with tag {receiving.posted.tag} came from {whom} in {timeout_s:g} s: "
            f"{told or 'it is stopped, has not sent it or cannot be reached'}",
            tuple(culprits) or (() if source is None else (source,)),
        )

    # giving up

    def _end(self, error: CollectiveError, *, is_heard: bool = False) -> None:
        """Fail all that is under way, and begin to say why (with the lock held)."""
        if self._error is not None or self._progress.is_closed:
            return
        self._error = error
        self._last_words = pack_last(abort_of(error))
        is_heard = self._fail_all(error) or is_heard
        if self._on_failure is not None:
            self._on_failure(error, is_heard)
        self._speaker = threading.Thread(target=self._say_why, name="paceline-giving-up", daemon=True)
        self._speaker.start()

    def _fail_all(self, error: CollectiveError) -> bool:
        """Fail all that is under way; return whether there was anything."""
        under_way: list[Pending | None] = [each for out in self._outgoing.values() for each in out.queue]
        for posted in self._matching.posted():
            assert isinstance(posted.owner, Receiving)
            under_way.append(posted.owner)
        under_way += [_receive_of(incoming) for incoming in self._incoming.values()]
        for pending in under_way:
            if pending is not None:
                pending.fail(error)
        self._progress.tell()
        return any(pending is not None for pending in under_way)

    def _say_why(self) -> None:
        """Say on all connections why, and close them; whoever hears it does so too."""
        self._progress.close("given up")  # from here on nobody else uses them
        words = memoryview(self._last_words)
        leaving = []
        with self._progress.lock:
            for outgoing in self._outgoing.values():
                if outgoing.is_connected:
                    outgoing.is_connected = False
                    begun = [part for each in list(outgoing.queue)[:1] if each.has_begun for part in each.parts]
                    leaving.append(Leaving(outgoing.connected, [*begun, words]))
                outgoing.queue.clear()
            leaving += [Leaving(incoming.connected, [words]) for incoming in self._incoming.values()]
            self._incoming.clear()
        say_last_words(leaving, time.monotonic() + _LINGER_S)

    def _dismiss(self, connected: socket.socket) -> None:
        """Close a connection for which it is too late, and say why (without the lock)."""
        words = [memoryview(self._last_words)] if self._last_words else []
        say_last_words([Leaving(connected, words)], time.monotonic() + (_LINGER_S if words else 0.0))


def _receive_of(incoming: Incoming) -> Receiving | None:
    """Return the receive that takes the message that is arriving, if there is one."""
    message = incoming.message
    if message is None or message.receive is None:
        return None
    assert isinstance(message.receive.owner, Receiving)
    return message.receive.owner

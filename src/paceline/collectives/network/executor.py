"""Run one rank's part of a schedule on non-blocking links (sockets), and end the group after an error.

The first rank that fails sends an ABORT message on all its links, and then closes the links. A rank that receives an
ABORT forwards it on all its own links, so the ABORT reaches all connected ranks.

One thread runs the calls, one after another. Any thread may call :meth:`ScheduleExecutor.status`.
"""

from __future__ import annotations

import math
import select
import time
from typing import Final, NoReturn

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall
from paceline.collectives.last_messages import ClosingConnection, send_and_close
from paceline.collectives.network import verdicts as _verdicts
from paceline.collectives.network.blocks import Blocks
from paceline.collectives.network.culprits import RequestStatus, Status
from paceline.collectives.network.frames import Head, Heads, MessageKind, pack_abort, unpack_abort
from paceline.collectives.network.mesh import Mesh
from paceline.collectives.network.patience import LINGER_S, CallEnded, Patience
from paceline.collectives.network.receiving import Combine, LinkBroken, PeerMessages, Scratch, UnexpectedMessage
from paceline.collectives.network.round_loop import RoundLoop
from paceline.collectives.network.rounds import RoundPlanner
from paceline.collectives.network.verdicts import CurrentCall
from paceline.collectives.schedules.base import Copy, Schedule
from paceline.errors import CollectiveError, GroupClosedError, PacelineError, ProtocolError, RankLostError

_ABORT_S: Final = 0.2
"""The time limit for reading an ABORT from a broken link, and for sending an ABORT after the call's timeout."""
_MAX_LINKED: Final = 1000
_CHUNK_BYTES: Final = 1 << 17
_CONNECT_S: Final = 2.5
"""The time that a rank waits for a connection before it checks its other links for an ABORT."""


class ScheduleExecutor:
    """Runs the calls of one rank of a group, until the first error ends the group."""

    def __init__(self, links: Mesh, *, group: str, request_status: RequestStatus | None = None) -> None:
        self._links = links
        self._group = group
        self._request_status = request_status
        self._peers: dict[int, PeerMessages] = {}
        self._linked: dict[int, Schedule] = {}
        """The schedules whose links are connected, by ``id(schedule)``. Python does not reuse the id of a schedule
        while this dictionary refers to it.
        """
        self._loop = RoundLoop()
        self._scratch = Scratch()
        self._status = Status(-1, None, ())
        self._failure = ""
        self._interruption: CollectiveError | None = None

    def status(self) -> Status:
        return self._status

    def run(
        self,
        schedule: Schedule,
        blocks: Blocks,
        *,
        call: CollectiveCall,
        sequence: int,
        combine: Combine | None,
        item_bytes: int,
        timeout_s: float,
    ) -> None:
        """Run this rank's part of one call. All ranks must pass an equal ``call`` and ``sequence``.

        When the method returns, other ranks may still be running the call. After an error, this rank notifies the other
        ranks and closes its links. Raises MismatchError if the ranks make different calls, RankLostError if ranks
        died, left the group or did not make the call in time, and CollectiveError for other failures.
        """
        if self._failure:
            raise GroupClosedError(f"group {self._group!r} refuses further work: a call failed: {self._failure}")
        self._status = Status(sequence, call, ())
        current = CurrentCall(self._group, self._links.rank, call, sequence)
        patience = Patience(
            timeout_s, self._request_status, self._links, self._set_waiting_for, current, self._interruption_abort
        )
        try:
            self._run(schedule, blocks, Heads(call, sequence), combine, item_bytes, patience)
        except (UnexpectedMessage, LinkBroken, CallEnded) as signal:
            self._fail(signal, patience)
        except BaseException as error:
            self._end_group(_verdicts.failed(current, error), time.monotonic() + LINGER_S)
            raise
        self._status = Status(sequence, None, ())

    def interrupt(self, error: CollectiveError) -> None:
        """Make the call that runs in another thread raise ``error`` at its next check (within 0.25 s). Thread-safe."""
        self._interruption = error

    def abort(self, call: CollectiveCall, sequence: int, error: BaseException) -> None:
        """End the group after a part of a call outside :meth:`run` failed. The connected ranks raise ``error`` too."""
        if not self._failure:
            current = CurrentCall(self._group, self._links.rank, call, sequence)
            self._end_group(_verdicts.of_error(current, error), time.monotonic() + LINGER_S)

    def _run(
        self,
        schedule: Schedule,
        blocks: Blocks,
        heads: Heads,
        combine: Combine | None,
        item_bytes: int,
        patience: Patience,
    ) -> None:
        assert schedule.num_blocks == len(blocks)

        if id(schedule) not in self._linked:
            self._connect(schedule, patience)
            if len(self._linked) >= _MAX_LINKED:
                self._linked.clear()
            self._linked[id(schedule)] = schedule

        def peer(rank: int) -> PeerMessages:
            return self._peers[rank]

        planner = RoundPlanner(self._links.rank, heads, blocks, combine, item_bytes, self._scratch, peer)
        for actions in schedule.rounds:
            self._loop.finish(planner.begin(actions), patience.wake)

    def _connect(self, schedule: Schedule, patience: Patience) -> None:
        """Connect to all peers of the schedule. All ranks connect in the order of the pairs of ranks (lower, higher).
        With one order, the ranks cannot wait for each other in a cycle.
        """
        own = self._links.rank
        needed = {action.peer for actions in schedule.rounds for action in actions if not isinstance(action, Copy)}
        for rank in sorted(needed - self._peers.keys(), key=lambda rank: (min(rank, own), max(rank, own))):
            while rank not in self._peers:
                until = min(patience.wait_for((rank,)), time.monotonic() + _CONNECT_S)
                try:
                    self._peers[rank] = PeerMessages(self._links.link(rank, until))
                except RankLostError as error:
                    if time.monotonic() < until - 0.05:
                        raise CallEnded(_verdicts.lost(patience.current, error.ranks or (rank,))) from error
                    self._check_for_aborts()

    def _check_for_aborts(self) -> None:
        for peer in self._peers.values():
            try:
                peer.peek()
            except LinkBroken:
                pass  # the rank may have finished its work; if not, a later send or receive will fail

    def _fail(self, signal: UnexpectedMessage | LinkBroken | CallEnded, patience: Patience) -> NoReturn:
        current = patience.current
        if isinstance(signal, CallEnded):
            abort = signal.abort
        elif isinstance(signal, LinkBroken):
            found = find_abort(signal.peer, time.monotonic() + _ABORT_S)
            abort = _verdicts.received(current, found) if found else _verdicts.lost(current, (signal.peer.rank,))
        else:
            abort = self._explain(current, signal.peer)
        time_s = time.monotonic()
        self._end_group(abort, min(time_s + LINGER_S, max(patience.deadline, time_s + _ABORT_S)))
        raise abort.error(self._group) from signal.__cause__

    def _explain(self, current: CurrentCall, peer: PeerMessages) -> Abort:
        try:
            frame = read_frame(peer, time.monotonic() + LINGER_S)
            if frame is None:
                return _verdicts.lost(current, (peer.rank,))
            if frame.header.kind == MessageKind.ABORT:
                return _verdicts.received(current, unpack_abort(frame))
            return _verdicts.unexpected(current, peer.rank, frame)
        except ProtocolError as error:
            return _verdicts.garbled(current, peer.rank, error)

    def _end_group(self, abort: Abort, deadline: float) -> None:
        self._failure = str(abort.error(self._group))
        message = memoryview(pack_abort(abort))
        try:
            closing = []
            for link in self._links.connected():
                peer = self._peers.get(link.rank)
                unsent = peer.sends[0].unsent if peer is not None and peer.sends else []
                if link.fileno() >= 0:
                    closing.append(ClosingConnection(link.socket, [*unsent, message]))
            send_and_close(closing, deadline)
        finally:
            self._links.close()

    def _interruption_abort(self) -> Abort | None:
        return None if self._interruption is None else Abort.of(self._interruption)

    def _set_waiting_for(self, ranks: tuple[int, ...]) -> None:
        if ranks != self._status.waiting_for:
            self._status = Status(self._status.sequence, self._status.call, ranks)


def read_frame(peer: PeerMessages, deadline: float) -> Head | None:
    """Return the head (header and text) of the next message on a link.

    Returns None if the peer has closed the link or the deadline has passed. Raises ProtocolError for invalid bytes.
    """
    scanner = peer.scan()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    poll = select.poll()
    poll.register(peer.link.fileno(), select.POLLIN)
    while not scanner.frames:
        try:
            count = peer.link.receive_nowait(buffer)
        except PacelineError:
            return None
        if count:
            scanner.feed(buffer[:count])
        elif not poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1e3))):
            return None
    return scanner.frames.popleft()


def find_abort(peer: PeerMessages, deadline: float) -> Abort | None:
    try:
        while (frame := read_frame(peer, deadline)) is not None:
            if frame.header.kind == MessageKind.ABORT:
                return unpack_abort(frame)
    except ProtocolError:
        pass
    return None

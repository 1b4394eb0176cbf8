"""Run one rank's part of a schedule on non-blocking links, and end the group after an error.

One thread runs calls, one at a time; any thread may call :meth:`ScheduleExecutor.status`. The loop is in
``round_loop``, messages are in ``sending`` and ``receiving``, and errors in ``faults``, ``verdicts`` and ``culprits``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final, NoReturn

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network import verdicts as _verdicts
from paceline.collectives.network.blocks import Blocks
from paceline.collectives.network.culprits import Ask, Status
from paceline.collectives.network.faults import find_abort, read_frame, spread, unpack_abort
from paceline.collectives.network.frames import Abort, Heads, MessageKind
from paceline.collectives.network.links import LinkSet
from paceline.collectives.network.patience import GIVE_UP_S, Disagreement, GivenUp, Patience, TooLate
from paceline.collectives.network.receiving import Combine, LinkBroken, PeerMessages, Scratch, UnexpectedMessage
from paceline.collectives.network.round_loop import RoundLoop
from paceline.collectives.network.rounds import RoundPlanner
from paceline.collectives.network.verdicts import CurrentCall
from paceline.collectives.schedules.base import Copy, Schedule
from paceline.errors import CollectiveError, GroupClosedError, ProtocolError, RankLostError

__all__ = ["Ask", "Blocks", "Combine", "ScheduleExecutor", "Status"]

_LAST_WORDS_S: Final = 0.2
"""Time to search a broken link for an ABORT, and to send one after the timeout."""
_MAX_LINKED: Final = 1000
_CONNECT_S: Final = 2.5
"""Time to wait for a connection before checking the other links."""


class ScheduleExecutor:
    """Run the calls of one rank of a group, until the first error ends the group."""

    def __init__(self, links: LinkSet, *, group: str, ask: Ask | None = None) -> None:
        """``ask`` requests a rank's status, for calls that do not finish in time."""
        self._links = links
        self._group = group
        self._ask = ask
        self._peers: dict[int, PeerMessages] = {}
        self._linked: dict[int, Schedule] = {}
        """Schedules with connected links, by ``id``; kept alive so that their ids stay unique."""
        self._loop = RoundLoop()
        self._scratch = Scratch()
        self._status = Status(-1, None, ())
        self._failure = ""
        self._interruption: CollectiveError | None = None

    def status(self) -> Status:
        """Return this rank's status. Thread-safe."""
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
        """Run this rank's part of one call; all ranks must use an equal ``call`` and ``sequence``.

        Schedules with a reduction need ``combine``. Returns when this rank's part is done, possibly before other ranks.
        After any error the other ranks are notified, the links are closed, and further runs raise GroupClosedError.

        Raises MismatchError if ranks made different calls; RankLostError, with the ranks, if ranks died, left or did
        not come within ``timeout_s``; CollectiveError for another error of another rank.
        """
        if self._failure:
            raise GroupClosedError(f"group {self._group!r} refuses further work: a call failed: {self._failure}")
        self._status = Status(sequence, call, ())
        place = CurrentCall(self._group, self._links.rank, call, sequence)
        patience = Patience(timeout_s, self._ask, self._links, self._wait_for, call, sequence, self._interrupted)
        try:
            self._run(schedule, blocks, Heads(call, sequence), combine, item_bytes, patience)
        except (UnexpectedMessage, LinkBroken, _LostError, TooLate, Disagreement, GivenUp) as signal:
            self._fail(place, signal, patience)
        except BaseException as error:
            self._give_up(_verdicts.failed(place, error), (), time.monotonic() + GIVE_UP_S)
            raise
        self._status = Status(sequence, None, ())

    def interrupt(self, error: CollectiveError) -> None:
        """End the call in another thread soon, with this error. Thread-safe."""
        self._interruption = error

    def abort(self, call: CollectiveCall, sequence: int, error: BaseException) -> None:
        """Fail a call outside :meth:`run`: the linked ranks raise the error as if the call had failed here."""
        if not self._failure:
            place = CurrentCall(self._group, self._links.rank, call, sequence)
            self._give_up(_verdicts.of_error(place, error), (), time.monotonic() + GIVE_UP_S)

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

        if id(schedule) not in self._linked:  # before the first round, so that all ranks connect in one order
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
        """Create all links that a schedule needs.

        All ranks connect in the order of the pairs of ranks. So the first unconnected pair is next on both of its
        sides, and no cycle of waiting ranks is possible.
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
                        raise _LostError(error.ranks or (rank,)) from error
                    self._look_for_aborts()

    def _look_for_aborts(self) -> None:
        for peer in self._peers.values():
            try:
                peer.peek()
            except LinkBroken:  # the rank may have finished its work; if not, a later step fails
                pass

    def _fail(
        self,
        place: CurrentCall,
        signal: UnexpectedMessage | LinkBroken | _LostError | TooLate | Disagreement | GivenUp,
        patience: Patience,
    ) -> NoReturn:
        heard: Collection[int] = ()
        if isinstance(signal, TooLate):
            abort = _verdicts.late(place, patience.culprits(place.sequence, signal.ranks), patience.timeout_s)
        elif isinstance(signal, GivenUp):
            abort = _verdicts.received(place, signal.abort)
        elif isinstance(signal, Disagreement):
            abort = _verdicts.disagreement(place, signal.calls)
        elif isinstance(signal, _LostError):
            abort = _verdicts.lost(place, signal.ranks)
        elif isinstance(signal, LinkBroken):
            told = find_abort(signal.peer, time.monotonic() + _LAST_WORDS_S)
            abort = _verdicts.received(place, told) if told else _verdicts.lost(place, (signal.peer.rank,))
            heard = (signal.peer.rank,)
        else:
            abort, heard = self._explain(place, signal.peer)
        if abort.kind == "lost":
            heard = (*heard, *abort.ranks)
        now = time.monotonic()
        self._give_up(abort, heard, min(now + GIVE_UP_S, max(patience.deadline, now + _LAST_WORDS_S)))
        raise _verdicts.to_error(abort, self._group) from signal.__cause__

    def _explain(self, place: CurrentCall, peer: PeerMessages) -> tuple[Abort, Sequence[int]]:
        """Read a message that differs from the expected one."""
        try:
            frame = read_frame(peer, time.monotonic() + GIVE_UP_S)
            if frame is None:
                return _verdicts.lost(place, (peer.rank,)), (peer.rank,)
            if frame.header.kind == MessageKind.ABORT:
                return _verdicts.received(place, unpack_abort(frame)), (peer.rank,)
            return _verdicts.unexpected(place, peer.rank, frame), ()
        except ProtocolError as error:
            return _verdicts.garbled(place, peer.rank, error), (peer.rank,)

    def _give_up(self, abort: Abort, heard: Collection[int], deadline: float) -> None:
        self._failure = str(_verdicts.to_error(abort, self._group))
        try:
            peers = [self._peers.get(link.rank) or PeerMessages(link) for link in self._links.connected()]
            spread(abort, peers, has_come=heard, deadline=deadline)
        finally:
            self._links.close()

    def _interrupted(self) -> Abort | None:
        return None if self._interruption is None else _verdicts.abort_of(self._interruption)

    def _wait_for(self, ranks: tuple[int, ...]) -> None:
        if ranks != self._status.waiting_for:
            self._status = Status(self._status.sequence, self._status.call, ranks)


class _LostError(Exception):
    """A rank ended before a link was established."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.ranks = ranks

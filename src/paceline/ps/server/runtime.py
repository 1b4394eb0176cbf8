"""A server's core at work: events go in, and what it says is done to tables, links and clients.

Everything that changes what a server may acknowledge goes through :meth:`Runtime.feed`. An exception while an
instruction is carried out ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import NoRoomError, PacelineError
from paceline.protocol import Sequential, ServerCore, replication
from paceline.protocol.buckets import to_bytes
from paceline.protocol.server import events
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import CALL, FORWARDED, PUSH, RESULT, STATE_TAKEN, TICKS
from paceline.ps.server.answers import Answers, BlockedRead, timeout_s
from paceline.ps.server.chain_links import ChainLinks
from paceline.ps.server.fills import FillTransfers
from paceline.ps.server.pushes import ERASE, Frame, payload_of
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.ps.server.replicator import Replicator
from paceline.ps.server.snapshots import ServerSnapshots
from paceline.ps.server.stale_gradients import StaleGradients
from paceline.ps.server.sums import IterationSums
from paceline.ps.server.table_changes import TableChanges
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable, ServerTables
from paceline.transport import FrameKind, Header, Peer, Transport, error_of, frame_parts

_EXPIRY_PERIOD_S = 0.25
_logger = logging.getLogger("paceline.ps")


class Runtime:
    """The core of one server with all that it needs to act.

    `transport` is for connections to other servers; `on_filled` takes what the scheduler must hear, and does not raise.
    """

    def __init__(
        self,
        core: ServerCore,
        tables: ServerTables,
        *,
        answers: Answers,
        stale: StaleGradients,
        non_finite: NonFinite,
        snapshots: ServerSnapshots,
        transport: Transport | None,
        on_filled: Callable[[messages.Filled], None],
        fail: Fail,
    ) -> None:
        self.core = core
        self.tables = tables
        self.answers = answers
        self.stale = stale
        self.sums: IterationSums | None = None
        """What is kept until its iteration is complete; None unless consistency is sequential."""
        consistency = core.consistency
        if isinstance(consistency, Sequential):
            self.sums = IterationSums(tables, non_finite, consistency.aggregate == "mean")
        self._snapshots = snapshots
        self._on_filled = on_filled
        self._fail = fail
        self.links: ChainLinks | None = None
        if transport is not None:
            self.links = ChainLinks(
                transport,
                on_up=self._link_up,
                on_frame=self._link_frame,
                fail=fail,
                on_down=lambda target: self.feed_surely(replication.LinkDown(target)),
            )
        checks = ReplicaChecks(tables)
        self.replicator = Replicator(core, tables, self.links, checks, fail=fail)
        self._fills = FillTransfers(core, tables, self.links, checks, non_finite)
        changes = TableChanges(tables, checks, stale, self.sums)
        self._expiry: asyncio.TimerHandle | None = None
        self._again: list[Frame] = []
        self._actions: dict[type, Callable[[Any], None]] = {
            replication.Apply: changes.apply,
            replication.Forward: self._forward,
            replication.Acknowledge: self._acknowledge,
            replication.Withhold: self._withhold,
            replication.RefusePush: lambda each: answers.refuse(each.token),
            replication.Forget: lambda each: answers.refuse(each.token),
            replication.Load: lambda each: self._fills.load(each.token, each.bucket),
            replication.Drop: changes.drop,
            replication.Hold: changes.hold,
            replication.Lead: changes.lead,
            replication.Ready: lambda each: self.replicator.send_ready(each.target, each.version),
            replication.Links: self._have_links,
            replication.ReportFilled: self._report,
            events.SendClocks: lambda each: self.replicator.send_clocks(each.target),
            events.ResumeRequest: lambda each: self._again.append(each.token),
            events.ConfirmJoin: answers.joined,
            events.RejectExpelled: answers.expel,
            events.Stale: lambda each: answers.refuse(each.token),
            events.Serve: self._serve,
            events.Late: answers.late,
            events.DropBuffered: changes.drop_kept,
            events.DropAllBuffered: changes.forget_kept,
            events.SumUp: changes.sum_up,
            events.ApplySum: changes.apply_sum,
            events.Completed: lambda each: self._snapshots.iteration_completed(each.iteration),
            events.ForgetWorker: changes.forget_worker,
        }

    def feed(self, event: events.Event) -> None:
        """Take one event. Raises PacelineError, as the core does, before anything has changed."""
        instructions = self.core.handle(event)
        if instructions:
            self.carry_out(instructions)

    def tick(self, worker: int, clock: int) -> None:
        """Note that a worker has finished `clock` iterations."""
        instructions = self.core.tick(worker, clock)
        if instructions:
            self.carry_out(instructions)

    @must_succeed
    def feed_surely(self, event: events.Event) -> None:
        """Take one event that nothing may refuse any more."""
        for instruction in self.core.handle(event):
            self._actions[type(instruction)](instruction)

    @must_succeed
    def carry_out(self, instructions: Sequence[events.Instruction]) -> None:
        """Do as the core says, in order."""
        for instruction in instructions:
            self._actions[type(instruction)](instruction)

    def take_early(self) -> list[Frame]:
        """Return the frames that came too early, and are to be handled now."""
        frames, self._again = self._again, []
        return frames

    def disconnected(self, peer: Peer) -> None:
        """Forget a connection, and what has come on it: nobody hears an answer."""
        self.core.disconnected(lambda token: _peer(token) is peer)
        self.replicator.disconnected(peer)

    def close(self) -> None:
        """Stop timers, and close the connections to other servers."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._snapshots.close()
        self.replicator.close()
        if self.links is not None:
            self.links.close()

    # Reads and answers.

    def read(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, clock: int, flags: int
    ) -> None:
        """Answer with values as of iteration `clock`, now or when that may begin."""
        worker = peer.hello.incarnation
        if not self.core.takes_part(worker):
            self.answers.check_member(peer)
        elif not self.core.is_readable(clock):
            table.part.num_values(selection)  # what is wrong with it is said now, and to the one who asked
            token = BlockedRead(peer, header, selection.copy(), clock, flags)
            self.feed(events.Read(token, worker, clock, time.monotonic() + timeout_s(peer)))
            self._expire_later()
            return
        self.answers.values(peer, header, table, selection, clock, flags)

    def answer_push(self, peer: Peer, header: Header, selection: Selection, clock: int, flags: int) -> None:
        """Acknowledge a push, or answer it with the values that it has asked for, as of iteration `clock`."""
        if header.kind == PUSH:
            self.answers.acknowledge(peer, header, flags)
        else:
            self.read(peer, header, self.tables.find(header.table), selection, clock, flags)

    def _serve(self, instruction: events.Serve) -> None:
        read = instruction.token
        assert isinstance(read, BlockedRead)
        try:
            table = self.tables.find(read.header.table)
            self.answers.values(read.peer, read.header, table, read.selection, read.clock, read.flags)
        except PacelineError as error:  # its own: whose tick has opened the gate is not concerned
            read.peer.send_error(read.header, error)
        except MemoryError:
            what = f"server {self.tables.rank} has no memory for the values that were asked for"
            read.peer.send_error(read.header, NoRoomError(what))

    def _acknowledge(self, instruction: replication.Acknowledge) -> None:
        """Answer a push that all servers of its chains have."""
        push = payload_of(instruction.token)
        peer, header = push.peer, push.header
        if peer is None or header is None:
            return
        if peer.hello.role == "server":
            self.answers.forwarded(peer, header)
        elif header.kind == CALL:
            is_erasure = push.operation == ERASE
            result = self.tables.num_erased(push.incarnation, push.sequence, push.buckets) if is_erasure else None
            peer.send(*frame_parts(RESULT, request=header.request, meta=messages.encode(result)))
        else:
            clock = header.clock + (1 if header.flags & TICKS else 0)
            try:
                asked = push.pieces[0].selection if push.asked is None else push.asked
                self.answer_push(peer, header, asked, clock, push.flags)
            except PacelineError as error:
                peer.send_error(header, error)
            except MemoryError as error:
                peer.send_error(header, self.answers.no_memory(error))

    def _withhold(self, instruction: replication.Withhold) -> None:
        push = payload_of(instruction.token)
        if push.peer is not None:
            self.core.withhold(push, time.monotonic() + timeout_s(push.peer))
            self._expire_later()

    def _expire_later(self) -> None:
        if self._expiry is None and self.core.num_waiting:
            self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_PERIOD_S, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self.feed(events.Time(time.monotonic()))
        self._expire_later()

    # Pushes.

    def _forward(self, instruction: replication.Forward) -> None:
        push = payload_of(instruction.token)
        push.own()
        self.replicator.forward(push, instruction.target, instruction.number, instruction.buckets)

    def _have_links(self, instruction: replication.Links) -> None:
        self.replicator.have_links(instruction.targets)
        self._fills.send_soon()

    def _report(self, report: replication.ReportFilled) -> None:
        self._on_filled(messages.Filled(report.version, report.target, to_bytes(report.buckets)))

    # Links to the servers behind.

    @must_succeed
    def _link_up(self, target: int) -> None:
        self.feed_surely(replication.LinkUp(target))
        self._fills.send_soon()

    @must_succeed
    def _link_frame(self, target: int, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind == FORWARDED:
            self.feed_surely(replication.Acknowledged(target, header.request))
            self._fills.send_soon()
        elif header.kind == STATE_TAKEN:
            self.feed_surely(replication.Confirmed(target, header.request))
            self._fills.taken(target, header)
        elif header.kind == FrameKind.ERROR:
            _logger.error("a server behind this one did not take a frame, and is sent all again: %s", error_of(meta))
            assert self.links is not None
            self.links.renew(target)


def _peer(token: Any) -> Peer | None:
    peer: Peer | None = token[0] if isinstance(token, tuple) else token.peer
    return peer

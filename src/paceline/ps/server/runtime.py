"""The runtime of a server's core: passes events to the core, and carries out its instructions.

Every change of state on which acknowledgements depend goes through :meth:`Runtime.feed`. An exception in an
instruction ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import NoRoomError, PacelineError
from paceline.protocol import Sequential, ServerCore, replication
from paceline.protocol.server import events
from paceline.ps import messages
from paceline.ps.fail_stop import Fail
from paceline.ps.messages import CALL, FORWARDED, PUSH, RESULT, STATE_TAKEN, TICKS
from paceline.ps.server.answers import Answers, BlockedRead, timeout_s
from paceline.ps.server.fills import FillTransfers
from paceline.ps.server.pushes import ERASURE, GRADIENTS, ChainPush, Frame, apply, payload_of
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.ps.server.replicator import ChainLinks, Replicator
from paceline.ps.server.snapshots import ServerSnapshots
from paceline.ps.server.stale_gradients import StaleGradients
from paceline.tables.aggregation import IterationSums
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable, ServerTables
from paceline.transport import FrameKind, Header, Peer, Transport, error_of, frame_parts

_EXPIRY_PERIOD_S = 0.25
_logger = logging.getLogger("paceline.ps")


class Runtime:
    """The core of one server, and its tables, answers and links; :class:`Server` describes the parameters."""

    def __init__(
        self,
        core: ServerCore,
        tables: ServerTables,
        *,
        answers: Answers,
        stale: StaleGradients,
        non_finite: NonFinite,
        snapshots: ServerSnapshots,
        checks: ReplicaChecks,
        transport: Transport | None,
        on_filled: Callable[[messages.Filled], None],
        fail: Fail,
    ) -> None:
        self.core = core
        self.tables = tables
        self.answers = answers
        self.stale = stale
        self.sums: IterationSums | None = None
        """The pushes of incomplete iterations; None unless consistency is sequential."""
        consistency = core.consistency
        if isinstance(consistency, Sequential):
            self.sums = IterationSums(tables, non_finite, consistency.aggregate == "mean")
        self._snapshots = snapshots
        self.fail = fail
        self.links: ChainLinks | None = None
        if transport is not None:
            self.links = ChainLinks(
                transport,
                on_up=self._link_up,
                on_frame=self._link_frame,
                fail=fail,
                on_down=lambda target: self.feed_or_fail(replication.LinkDown(target)),
            )
        self._checks = checks
        self.replicator = Replicator(core, tables, self.links, checks, fail=fail)
        self._fills = FillTransfers(core, tables, self.links, checks, non_finite)
        self._expiry: asyncio.TimerHandle | None = None
        self._again: list[Frame] = []
        self._actions: dict[type, Callable[[Any], None]] = {
            replication.Apply: self._apply,
            replication.Forward: self._forward,
            replication.Acknowledge: self._acknowledge,
            replication.Withhold: self._withhold,
            replication.RefusePush: lambda item: answers.refuse(item.token),
            replication.Forget: lambda item: answers.refuse(item.token),
            replication.Load: lambda item: self._fills.load(item.token, item.bucket),
            replication.Drop: self._drop,
            replication.CreateBuckets: self._create_buckets,
            replication.Lead: self._lead,
            replication.Ready: lambda item: self.replicator.send_ready(item.target, item.version),
            replication.Links: self._have_links,
            replication.Filled: on_filled,
            events.SendClocks: lambda item: self.replicator.send_clocks(item.target),
            events.ResumeRequest: lambda item: self._again.append(item.token),
            events.ConfirmJoin: answers.joined,
            events.RejectExpelled: answers.expel,
            events.Stale: lambda item: answers.refuse(item.token),
            events.Serve: self._serve,
            events.DeadlinePassed: answers.deadline_passed,
            events.DropBuffered: self._drop_buffered,
            events.DropAllBuffered: self._drop_all_buffered,
            events.SumUp: self._sum_up,
            events.ApplySum: self._apply_sum,
            events.Completed: lambda item: self._snapshots.iteration_completed(item.iteration),
            events.ForgetWorker: self._forget_worker,
        }

    def feed(self, event: events.Event) -> None:
        """Apply one event. Raises the core's PacelineError, before any change."""
        instructions = self.core.handle(event)
        if instructions:
            self.carry_out(instructions)

    def tick(self, worker: int, clock: int) -> None:
        instructions = self.core.tick(worker, clock)
        if instructions:
            self.carry_out(instructions)

    def feed_or_fail(self, event: events.Event) -> None:
        """Apply one event that must not be rejected."""
        self.run_or_fail(lambda: self.core.handle(event))

    def carry_out(self, instructions: Sequence[events.Instruction]) -> None:
        self.run_or_fail(lambda: instructions)

    def run_or_fail(self, change: Callable[[], Sequence[events.Instruction]]) -> None:
        """Change the core and carry out the instructions; every exception ends the server."""
        try:
            for instruction in change():
                self._actions[type(instruction)](instruction)
        except Exception as error:
            self.fail(error)
            raise

    def take_early(self) -> list[Frame]:
        frames, self._again = self._again, []
        return frames

    def disconnected(self, peer: Peer) -> None:
        self.core.disconnected(lambda token: _peer(token) is peer)
        self.replicator.disconnected(peer)

    def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._snapshots.close()
        self.replicator.close()
        if self.links is not None:
            self.links.close()

    def read(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, clock: int, flags: int
    ) -> None:
        """Answer a read with the values of iteration `clock`, as soon as this iteration may begin."""
        worker = peer.hello.incarnation
        if not self.core.takes_part(worker):
            self.answers.check_member(peer)
        elif not self.core.is_readable(clock):
            table.part.num_values(selection)  # raises the errors of the request before the request is blocked
            token = BlockedRead(peer, header, selection.copy(), clock, flags)
            self.feed(events.Read(token, worker, clock, time.monotonic() + timeout_s(peer)))
            self._expire_later()
            return
        self.answers.values(peer, header, table, selection, clock, flags)

    def answer_push(self, peer: Peer, header: Header, selection: Selection, clock: int, flags: int) -> None:
        """Acknowledge a push, or answer a push_pull with the values of iteration `clock`."""
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
        except PacelineError as error:  # the error belongs to this read, and not to the tick that released the read
            read.peer.send_error(read.header, error)
        except MemoryError:
            problem = f"server {self.tables.rank} has no memory for the values of this read"
            read.peer.send_error(read.header, NoRoomError(problem))

    def _acknowledge(self, instruction: replication.Acknowledge) -> None:
        push = payload_of(instruction.token)
        peer, header = push.peer, push.header
        if peer is None or header is None:
            return
        if peer.hello.role == "server":
            self.answers.forwarded(peer, header)
        elif header.kind == CALL:
            is_erasure = push.operation == ERASURE
            result = self.tables.num_erased(push.incarnation, push.sequence, push.buckets) if is_erasure else None
            peer.send(*frame_parts(RESULT, request=header.request, meta=messages.encode(result)))
        else:
            clock = header.clock + (1 if header.flags & TICKS else 0)
            try:
                requested = push.pieces[0].selection if push.requested is None else push.requested
                self.answer_push(peer, header, requested, clock, push.flags)
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

    def _apply(self, instruction: replication.Apply) -> None:
        push = payload_of(instruction.token)
        self._checks.orders.applied(push.incarnation, push.sequence, instruction.buckets)
        apply(self.tables, push, instruction.buckets)

    def _sum_up(self, token: events.SumUp) -> None:
        assert self.sums is not None
        pieces = self.sums.pieces(token.iteration, token.workers, token.buckets)
        sequence, buckets = token.iteration + 1, token.buckets
        token.payload = ChainPush(GRADIENTS, replication.AGGREGATE, sequence, pieces, buckets=buckets, is_owned=True)

    def _apply_sum(self, instruction: events.ApplySum) -> None:
        assert self.sums is not None
        self.sums.apply(instruction.iteration, instruction.workers, instruction.buckets)

    def _drop_buffered(self, instruction: events.DropBuffered) -> None:
        assert self.sums is not None
        self.sums.buffer.forget(instruction.worker, instruction.iteration)

    def _drop_all_buffered(self, instruction: events.DropAllBuffered) -> None:
        if self.sums is not None:
            self.sums.buffer.clear()

    def _forget_worker(self, instruction: events.ForgetWorker) -> None:
        self.stale.forget(instruction.worker)
        for table in self.tables.by_number.values():
            table.staleness.forget(instruction.worker)
            table.refused.pop(instruction.worker, None)

    def _forward(self, instruction: replication.Forward) -> None:
        push = payload_of(instruction.token)
        push.own()
        self.replicator.forward(push, instruction.target, instruction.number, instruction.buckets)

    def _have_links(self, instruction: replication.Links) -> None:
        self.replicator.have_links(instruction.targets)
        self._fills.send_soon()

    def _drop(self, instruction: replication.Drop) -> None:
        self._checks.drop(instruction.buckets)
        for table in self.tables.by_number.values():
            table.part.drop(instruction.buckets)

    def _create_buckets(self, instruction: replication.CreateBuckets) -> None:
        for table in self.tables.by_number.values():
            table.part.hold(instruction.buckets)

    def _lead(self, instruction: replication.Lead) -> None:
        for table in self.tables.by_number.values():
            table.part.set_primary(instruction.buckets)
        if self.sums is not None:
            self.sums.restrict(instruction.buckets)

    def _link_up(self, target: int) -> None:
        self.feed_or_fail(replication.LinkUp(target))
        self._fills.send_soon()

    def _link_frame(self, target: int, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind == FORWARDED:
            self.feed_or_fail(replication.Acknowledged(target, header.request))
            if self.core.filling:
                self._fills.send_soon()
        elif header.kind == STATE_TAKEN:
            self.feed_or_fail(replication.Confirmed(target, header.request))
            self._fills.taken(target, header)
        elif header.kind == FrameKind.ERROR:
            _logger.error("a successor rejected a frame, so everything is sent again: %s", error_of(meta))
            assert self.links is not None
            self.links.renew(target)


def _peer(token: Any) -> Peer | None:
    peer: Peer | None = token[0] if isinstance(token, tuple) else token.peer
    return peer

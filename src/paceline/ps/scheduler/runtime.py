"""The scheduler's runtime: passes events to the core, and carries out the core's instructions.

Events are received frames, ended processes, and the passing of time. The runtime stores only the numbers and settings
of tables. Members store all other state for the next scheduler.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from paceline.errors import PacelineError, PeerError, ProtocolError, TableMismatchError, UsageError
from paceline.meeting.network_store import AGENT, ServedStore
from paceline.protocol import Member, Role
from paceline.protocol.chains import VERSION_GAP
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.core import SchedulerCore
from paceline.protocol.scheduler.events import PROCESS_ENDED
from paceline.protocol.scheduler.numbered_messages import MessageNumbers
from paceline.protocol.scheduler.sessions import PendingCall
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import CALL, NOTICE, RESULT, KnownTable, TableSpec
from paceline.ps.scheduler.processes import ProcessWatch
from paceline.tables.bounds import MAX_TABLES
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields
from paceline.transport import Handler, Header, Peer, frame_parts


class Tables:
    """The tables of a cluster by name."""

    def __init__(self) -> None:
        self._known: dict[str, KnownTable] = {}

    def declare(self, spec: TableSpec) -> KnownTable:
        """Return the table named in `spec`; number and add a new table. Raises TableMismatchError, UsageError."""
        known = self._known.get(spec.name)
        if known is None:
            number = 1 + max((table.number for table in self._known.values()), default=0)
            if number > MAX_TABLES:
                raise UsageError(f"a cluster has at most {MAX_TABLES} tables")
            known = self._known[spec.name] = KnownTable(number=number, declared=spec, spec=spec)
        if spec not in (known.declared, known.spec):
            raise TableMismatchError(
                f"table {spec.name!r} was declared as {spec}, but exists as {known.spec}: use the same settings in "
                "every process, or another name"
            )
        return known

    def change_update(self, name: str, update: dict[str, object]) -> int:
        """Change the hyperparameters of a table; return the revision. Raises UsageError."""
        known = self._known.get(name)
        if known is None:
            raise UsageError(f"unknown table {name!r}: declare it before its hyperparameters change")
        from_fields(RULES, update).check_follows(from_fields(RULES, known.spec.update), f"table {name!r}")
        spec = known.spec.with_update(update)
        revision = known.revision + 1
        self._known[name] = KnownTable(number=known.number, declared=known.declared, spec=spec, revision=revision)
        return revision

    def restore(self, tables: Iterable[KnownTable]) -> None:
        """Restore the members' tables; the latest revision of a table counts.

        The next revision is far above all reported revisions, because dead processes may have had later revisions.
        """
        numbers = {known.number for known in self._known.values()}
        for table in tables:
            known = self._known.get(table.spec.name)
            restored = msgspec.structs.replace(table, revision=table.revision + VERSION_GAP)
            is_new = known is None and table.number not in numbers
            if is_new or (known and known.number == table.number and known.revision < restored.revision):
                numbers.add(table.number)
                self._known[table.spec.name] = restored

    @property
    def specs(self) -> list[TableSpec]:
        return [known.spec for known in sorted(self._known.values(), key=lambda known: known.number)]


_FLUSH_S = 0.02
"""The delay before a new worker is published, so that workers that register together are published in one view."""


class Scheduler(Handler):
    """The scheduler of a cluster. The `settings` must be valid.

    A new scheduler takes over the cluster of a dead scheduler when members of that cluster connect. With `replaces` it
    forms no new cluster before the heartbeat timeout. With `accepts_minority` it takes over after the timeout even with
    a minority of the former servers. `on_note` receives messages for the operator. With `reports_ends`, it also
    receives the ends of processes. `on_loss` is called if buckets are lost, `fail` with an exception after which this
    scheduler must not continue (:mod:`paceline.ps.fail_stop`).
    """

    def __init__(
        self,
        settings: messages.ClusterSettings,
        *,
        fail: Fail,
        replaces: bool = False,
        accepts_minority: bool = False,
        on_note: Callable[[str], None] = lambda text: None,
        on_loss: Callable[[str], None] = lambda text: None,
        reports_ends: bool = True,
    ) -> None:
        self.core = SchedulerCore(
            msgspec.structs.replace(settings, cluster=secrets.token_hex(8)),
            salt=secrets.randbits(16),
            replaces=replaces,
            accepts_minority=accepts_minority,
        )
        self.on_note, self._on_loss = on_note, on_loss
        self.reports_ends = reports_ends
        self._fail = fail
        self._tables = Tables()
        self._processes = ProcessWatch(
            self.process_ended, lambda incarnation: self._feed(events.Suspected(incarnation)), fail
        )
        self._timer: asyncio.TimerHandle | None = None
        # the timer that passes the event Flush to the core, which then publishes the waiting changes
        self._flush: asyncio.TimerHandle | None = None
        # the last message and its encoding: a message to several processes is encoded once
        self._encoded: tuple[Any, bytes] = (None, b"")
        self._store = ServedStore()
        """The store in which torchrun's agents meet (:mod:`paceline.torch.rendezvous`)."""
        self.failure: PacelineError | None = None
        """The reason why this scheduler ended, if no process requested the end."""
        self.ended = asyncio.Event()

    @must_succeed
    def connected(self, peer: Peer) -> None:
        """Start the session of a connection. The first connection starts the timers."""
        if peer.hello.role != AGENT:
            self.core.connected(peer)
        if self._timer is None:
            self._tick()

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if peer.hello.role == AGENT:
            self._store.frame_received(peer, header, meta, body)
            return
        if header.kind not in (CALL, NOTICE):
            raise ProtocolError(
                f"the scheduler does not support frames of kind {header.kind}: run one version everywhere"
            )
        message = messages.decode_to_scheduler(meta)
        self.core.check(peer, message)
        self._receive(peer, header, message, body)

    @must_succeed
    def _receive(self, peer: Peer, header: Header, message: Any, body: memoryview) -> None:
        numbers = MessageNumbers(header.request, header.sequence, header.clock)
        self._execute(self.core.receive(peer, message, numbers, time.monotonic(), bytes(body)))

    @must_succeed
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        if peer.hello.role == AGENT:
            self._store.disconnected(peer, reason)
            return
        self._execute(self.core.disconnected(peer, time.monotonic()))

    def close(self) -> None:
        self._processes.close()
        for timer in (self._timer, self._flush):
            if timer is not None:
                timer.cancel()

    def process_ended(self, incarnation: int) -> None:
        self._feed(events.ProcessEnded(incarnation))

    def end(self, reason: str) -> None:
        """End every process of the cluster without an error."""
        self._execute(self.core.end(reason))

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.core.heartbeat_s, self._tick)
        self._feed(events.TimePassed())

    @must_succeed
    def _feed(self, event: events.Event | events.NewsDue) -> None:
        self._execute(self.core.handle(event, time.monotonic()))

    def _execute(self, instructions: list[events.Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: events.Instruction) -> None:
        loop = asyncio.get_running_loop()
        match instruction:
            case events.SendMessage():
                self._send(instruction)
            case events.Close(peer):
                peer.close()
            case events.ServeRequest(call, request):
                self._serve(call, request)
            case events.WatchProcess(member, is_connected):
                # An earlier event in this loop may have ended the recovery; then an absent process is no longer
                # watched.
                if is_connected or self.core.is_watched(member.incarnation):
                    self._processes.watch(member, connected=is_connected)
            case events.WatchOnly(incarnations):
                self._processes.keep(incarnations)
            case events.MemberDisconnected(incarnation):
                self._processes.disconnected(incarnation)
            case events.Removed(member, reason):
                self._processes.forget(member.incarnation)
                if reason is not None and not self.ended.is_set():
                    self._report_dead(member, reason)
            case events.TakenOver(returned, dead):
                rejoins = [rejoin for _, rejoin in returned]
                # Servers come first, because their records of the tables are the most recent.
                for rejoin in sorted(rejoins, key=lambda rejoin: rejoin.member.role is not Role.SERVER):
                    self._tables.restore(rejoin.tables)
                for member in dead:
                    self._report_dead(member, "it did not rejoin the scheduler that took over")
            case events.FlushSoon():
                last_s = -math.inf if self._flush is None else self._flush.when()
                self._flush = loop.call_at(max(loop.time(), last_s + _FLUSH_S), lambda: self._feed(events.Flush()))
            case events.NewsSoon():
                loop.call_soon(lambda: self._feed(events.NewsDue()))
            case events.BucketsLost(buckets):
                if not self.ended.is_set():  # at the end of the cluster, servers may leave with their buckets
                    self._on_loss(f"{buckets.bit_count()} buckets of the tables are lost: no live server has them")
            case events.NotifyOperator(text):
                self.on_note(text)
            case events.ClusterEnded():
                self.ended.set()
            case events.Superseded(term):
                self.failure = PeerError(
                    f"another scheduler has taken over this cluster (in term {term}): this one ends"
                )
                self.ended.set()

    def _report_dead(self, member: Member, reason: str) -> None:
        if reason != PROCESS_ENDED or self.reports_ends:
            self.on_note(f"{member.role.value} {member.rank} ({member.node}) is declared dead: {reason}")

    def _send(self, send: events.SendMessage) -> None:
        peer: Any = send.peer
        message, request = send.message, send.request
        if isinstance(message, Exception):
            peer.send_error(Header(0, 0, 0, 0, 0, request, 0, 0, 0, 0, 0), message)
            return
        if message is None or message is not self._encoded[0]:
            self._encoded = message, messages.encode(message)
        kind, body = RESULT if request else NOTICE, (send.body,) if send.body else ()
        meta = self._encoded[1]
        peer.send(*frame_parts(kind, request=request, sequence=send.received, meta=meta, body=body))

    def _serve(self, call: Any, request: Any) -> None:
        assert isinstance(call, PendingCall)
        try:
            answer = self._answer(request)
        except PacelineError as error:
            answer = error
        for send in self.core.reply(call, answer):
            self._send(send)

    def _answer(self, request: Any) -> Any:
        match request:
            case messages.DeclareTable(spec=spec):
                return self._tables.declare(spec)
            case messages.ChangeUpdate(table=table, update=update):
                return self._tables.change_update(table, update)
            case messages.ListTables():
                return self._tables.specs

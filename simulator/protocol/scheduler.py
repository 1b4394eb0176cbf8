"""The scheduler of a protocol run: connects the core to virtual connections. It adds no rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.core import SchedulerCore
from paceline.protocol.scheduler.messages import Expelled, Rejoin, SchedulerSettings
from simulator.protocol.links import MessageEnd, MessageProcess
from simulator.protocol.messages import EndWork
from simulator.protocol.node import Surroundings

_FLUSH_S = 0.005


class SimulatedScheduler(MessageProcess):
    """One scheduler process. All schedulers listen at the same address."""

    def __init__(self, name: str, around: Surroundings, *, replaces: bool, accepts_minority: bool) -> None:
        super().__init__(name, around.network)
        settings = self.settings = around.settings
        self.oracle = around.oracle
        self.network.listeners["scheduler"] = self
        self.core = SchedulerCore(
            SchedulerSettings(
                cluster=name, num_servers=settings.num_servers, num_workers=settings.num_workers,
                replicas=settings.replicas, heartbeat_timeout_s=settings.heartbeat_timeout_s,
            ),
            salt=self.world.random.getrandbits(16), replaces=replaces, accepts_minority=accepts_minority,
            num_buckets=settings.num_buckets,
        )  # fmt: skip
        self._flushes = False
        self.later(self.core.cluster.heartbeat_s, self._tick)

    @override
    def accepts(self, connection: MessageEnd) -> bool:
        self.core.connected(connection)
        return True

    @override
    def receive(self, connection: MessageEnd, message: Any) -> None:
        self.core.check(connection, message.content)
        self._execute(self.core.receive(connection, message.content, message.numbers, self.own_time_s))
        if isinstance(message.content, Rejoin):
            self._find_ended()

    @override
    def peer_lost(self, connection: MessageEnd) -> None:
        self._execute(self.core.disconnected(connection, self.own_time_s))

    def _tick(self) -> None:
        self._feed(events.TimePassed())
        self._find_ended()
        self.later(self.core.cluster.heartbeat_s, self._tick)

    # Ends of processes: the kernel reports them if all processes are on one host; otherwise a probe detects them.

    def process_ended(self, name: str) -> None:
        member = self.core.cluster.membership.named(name)
        if member is not None:
            self._feed(events.ProcessEnded(member.incarnation))

    def _find_ended(self) -> None:
        for member in self.core.cluster.missing_members:
            if not self.settings.is_one_host:
                self._probe(member.node, member.incarnation)
            elif member.node not in self.network.listeners:
                self._feed(events.ProcessEnded(member.incarnation))

    def _probe(self, name: str, incarnation: int) -> None:
        is_refused = name not in self.network.listeners and name not in self.network.powerless
        if is_refused and not self.settings.is_one_host and self.core.cluster.membership.find(incarnation):
            self._feed(events.Suspected(incarnation))

    # The core.

    def _feed(self, event: events.Event | events.NewsDue) -> None:
        self._execute(self.core.handle(event, self.own_time_s))

    def _execute(self, instructions: Iterable[events.Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.SendMessage(MessageEnd() as peer):
                peer.send(instruction)
            case events.Close(MessageEnd() as peer):
                peer.send(events.SendMessage(peer, Expelled(reason="it has left")))
            case events.ServeRequest(_, EndWork()):
                for answer in self.core.jobs.end():
                    self._execute(self.core.reply(answer.call, answer.content))  # type: ignore[arg-type]
                self._execute(self.core.reply(instruction.call, None))  # type: ignore[arg-type]
            case events.MemberDisconnected(incarnation):
                member = self.core.cluster.membership.find(incarnation)
                if member is not None:
                    self.later(2 * self.network.latency_s, self._probe, member.node, incarnation)
            case events.Removed(member, reason):
                if reason is not None:
                    self.network.fired["dead"] += 1
                    self.network.fired["expel"] += "could not reach" in reason
                self.world.note(f"{member.node} ({member.incarnation}) is removed: {reason}")
            case events.Publish(view):
                self.oracle.published(view)
            case events.FlushSoon():
                if not self._flushes:
                    self._flushes = True
                    self.later(_FLUSH_S, self._flush)
            case events.NewsSoon():
                self.later(0.0, self._feed, events.NewsDue())
            case events.BucketsLost(buckets):
                if self.core.cluster.term >= self.oracle.view.term:  # false for a superseded scheduler
                    self.oracle.record_loss(buckets)
            case events.NotifyOperator(text):
                self.world.note(text)
            case events.Superseded():
                self.network.fired["superseded"] += 1
                self.kill()

    def _flush(self) -> None:
        self._flushes = False
        self._feed(events.Flush())

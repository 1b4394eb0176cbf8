"""The client's core: requests, retries, retained pushes, and participation in iterations."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from paceline.errors import UsageError
from paceline.protocol.chains import chain_group
from paceline.protocol.client import (
    ClientCore,
    Connect,
    Discard,
    Disconnect,
    Instruction,
    Request,
    RequestJoin,
    RequestKind,
    Resync,
    Transmit,
)

LOST = ValueError("lost")


class Runtime:
    """A client's core with its sent messages by server. A message is (kind, sequence, clock, buckets) or a Resync."""

    def __init__(self, *, is_worker: bool = True, is_sequential: bool = True, replica: int | None = None) -> None:
        self.core = ClientCore(is_worker=is_worker, is_sequential=is_sequential)
        self.replica = replica
        self.sent: dict[int, list[object]] = {}
        self.join_requests: list[RequestJoin] = []
        self.released: list[Request] = []

    def view(self, version: int, leads: dict[int, int], lost: int = 0) -> None:
        """Apply a view, clear `sent`, and connect to the new servers."""
        self.sent = {server: [] for server in leads}
        groups = [chain_group((server,), self.replica, buckets) for server, buckets in leads.items()]
        groups += [chain_group((), None, lost)] if lost else []
        self.execute(self.core.change(version, tuple(groups), LOST))

    def execute(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Transmit(request, pieces):
                    if pieces:
                        request.payload = SimpleNamespace(buckets=sum(buckets for _, buckets in pieces))
                        self.start(request)
                    else:
                        self.transmit(request)
                case Connect(server):
                    self.execute(self.core.connected(server))
                case Disconnect(session):
                    for call in session.departed():
                        session.failed(call, LOST)
                case Resync(server):
                    self.sent.setdefault(server, []).append(instruction)
                case RequestJoin():
                    self.join_requests.append(instruction)
                case Discard(request):
                    self.released.append(request)

    def start(self, request: Request) -> None:
        session = self.core.sessions[request.server]
        if session.start(request) and session.is_connected:
            self.transmit(request)

    def transmit(self, request: Request) -> None:
        buckets = 0 if request.payload is None else request.payload.buckets
        self.sent.setdefault(request.server, []).append((request.kind, request.sequence, request.clock, buckets))

    def make(self, kind: RequestKind, buckets: int, ends_iteration: bool = False) -> list[Request]:
        """Make one request for each server that leads some of the buckets."""
        core, made = self.core, []
        sequence = core.sequence if kind is RequestKind.PULL else core.next_sequence()
        for session in core.sessions.values():
            if buckets & session.leads:
                payload = SimpleNamespace(buckets=buckets & session.leads)
                made.append(session.request(kind, core.clock, sequence, payload, ends_iteration))
                self.start(made[-1])
        if ends_iteration:
            core.tick()
        return made

    def push(self, buckets: int) -> list[Request]:
        return self.make(RequestKind.PUSH, buckets)

    def answer(self, *servers: int) -> None:
        """Answer all pending requests of these servers."""
        for server in servers:
            session = self.core.sessions[server]
            for request in session.unanswered():
                session.answered(request)

    def stabilize(self, server: int, clock: int) -> list[Request]:
        """Answer a tick of a server with `clock` as the number of stable iterations; return the released pushes."""
        session = self.core.sessions[server]
        tick = session.request(RequestKind.TICK, 0, 0)
        self.start(tick)
        released = session.stabilize(tick.number, clock)
        session.answered(tick)
        return released

    def answered_push(self, buckets: int) -> list[Request]:
        made = self.push(buckets)
        self.answer(*self.core.sessions)
        return made


def joined(replica: int | None = 9, **leads: int) -> Runtime:
    """Return a worker that takes part in iterations."""
    runtime = Runtime(replica=replica)
    runtime.core.takes_part = True
    runtime.view(1, {int(name[1:]): buckets for name, buckets in leads.items()})
    return runtime


def test_rejected_requests_are_resent_in_order_before_a_resync() -> None:
    runtime = joined(None, s1=0b1)
    [first], [second] = runtime.push(1), runtime.push(1)
    [pull] = runtime.make(RequestKind.PULL, 1)
    session = runtime.core.sessions[1]
    runtime.start(session.request(RequestKind.TICK, 0, 0))
    runtime.core.tick()
    session.refused(first)
    [late] = runtime.push(1)
    assert (RequestKind.PUSH, 3, 1, 1) not in runtime.sent[1]  # the later push is blocked
    runtime.view(2, {1: 1})
    assert runtime.sent[1] == [
        (RequestKind.PUSH, 1, 0, 1), (RequestKind.PUSH, 2, 0, 1), (RequestKind.PULL, 2, 0, 1),
        (RequestKind.PUSH, 3, 1, 1), Resync(1, 2, 1, True),
    ]  # fmt: skip
    assert not any(request.is_done for request in (first, second, pull, late))
    runtime.answer(1)
    assert all(request.is_done for request in (first, second, pull, late))


def test_answers_to_replaced_requests_are_ignored() -> None:
    runtime = joined(None, s1=0b1)
    [pull] = runtime.make(RequestKind.PULL, 1)
    session = runtime.core.sessions[1]
    runtime.view(2, {1: 1})
    assert session.num_bodies == 2  # the answer to the old request is not yet read
    assert pull.number not in session.in_flight
    assert session.orphan_answered(pull.number)
    assert not session.orphan_answered(pull.number)
    assert session.num_bodies == 1
    session.disconnected()
    assert session.num_bodies == 1


def test_a_resent_push_pull_at_the_end_of_an_iteration_becomes_a_push_and_a_pull() -> None:
    runtime = joined(None, s1=0b0011, s2=0b1100)
    parts = runtime.make(RequestKind.PUSH_PULL, 0b1111, ends_iteration=True)
    runtime.view(2, {1: 0b0101, 2: 0b1010})
    for server, buckets in ((1, 0b0101), (2, 0b1010)):  # one frame per server contains the push
        pulls = runtime.sent[server][1:-1]
        assert runtime.sent[server][0] == (RequestKind.PUSH, 1, 0, buckets)
        assert pulls == [(RequestKind.PULL, 1, 1, buckets & 0b0011), (RequestKind.PULL, 1, 1, buckets & 0b1100)]
        assert runtime.sent[server][-1] == Resync(server, 2, 1, True)
    runtime.answer(1)
    assert not any(part.is_done for part in parts)
    runtime.answer(2)
    assert all(part.is_done for part in parts)


def test_requests_are_merged_after_several_views() -> None:
    runtime = joined(None, s1=0b01, s2=0b10)
    first, second = runtime.push(0b11)
    runtime.view(2, {2: 0b10, 3: 0b01})
    runtime.view(3, {2: 0b11})
    # one frame, although the push was in two frames before
    assert runtime.sent[2] == [
        (RequestKind.PUSH, 1, 0, 0b11),
        Resync(2, 3, 0, True),
    ]
    runtime.view(3, {3: 0b11})
    assert runtime.sent == {3: []}  # the same version: no effect
    runtime.answer(2)
    assert first.is_done
    assert second.is_done


def test_after_a_lost_connection_all_pending_requests_are_resent() -> None:
    runtime = joined(None, s1=0b1)
    runtime.view(2, {1: 1})
    runtime.answered_push(1)
    runtime.push(1)
    runtime.start(runtime.core.sessions[1].request(RequestKind.CALL, 0, 0))
    runtime.core.sessions[1].disconnected()
    runtime.push(1)
    runtime.core.tick()
    runtime.sent = {}
    runtime.execute(runtime.core.connected(1))
    assert runtime.sent[1] == [
        (RequestKind.PUSH, 2, 0, 1), (RequestKind.PUSH, 3, 0, 1), Resync(1, 2, 1, True), (RequestKind.CALL, 0, 0, 0),
    ]  # fmt: skip


def test_calls_continue_after_a_view_unless_the_server_leaves() -> None:
    runtime = joined(None, s1=0b01, s2=0b10)
    calls = [session.request(RequestKind.CALL, 0, 0) for session in runtime.core.sessions.values()]
    for call in calls:
        call.is_reported = True
        runtime.start(call)
    runtime.view(2, {1: 0b11})
    assert [call.error for call in calls] == [None, LOST]
    assert runtime.core.failures == []
    runtime.core.sessions[1].awaits_view = True
    runtime.answer(1)
    assert calls[0].is_done


@pytest.mark.parametrize("is_worker", [True, False])
def test_only_workers_send_clocks(is_worker: bool) -> None:
    runtime = Runtime(is_worker=is_worker)
    runtime.view(1, {1: 1})  # also for the first view, because a server waits for all workers in it
    assert runtime.sent[1] == [Resync(1, 1, 0, False)] * is_worker
    runtime.view(2, {1: 0b01, 2: 0b10})
    expected = [Resync(server, 2, 0, False) for server in (1, 2) if is_worker]
    assert [message for sent in runtime.sent.values() for message in sent] == expected
    with pytest.raises(UsageError, match="take part in the iterations"):
        runtime.core.check_takes_part()


def test_a_worker_joins_at_the_latest_reported_iteration() -> None:
    runtime = Runtime()
    runtime.view(1, {1: 0b01, 2: 0b10})
    core = runtime.core
    runtime.execute(core.join())
    assert runtime.join_requests == [RequestJoin(1, 1, 0), RequestJoin(2, 1, 0)]
    runtime.execute(core.joined(1, 1, 0))
    runtime.execute(core.joined(2, 1, 7))
    assert runtime.join_requests[2:] == [RequestJoin(1, 2, 7), RequestJoin(2, 2, 7)]
    runtime.execute(core.joined(1, 1, 0))  # a reply of an earlier round
    runtime.execute(core.joined(1, 2, 7))
    assert core.is_joining
    runtime.sent = {1: [], 2: []}
    for server in (1, 2):
        core.sessions[server].disconnected()
        runtime.execute(core.connected(server))
    assert runtime.sent == {1: [], 2: [Resync(2, 1, 0, False)]}, "server 1 has already counted this worker"
    runtime.execute(core.joined(2, 2, 7))
    assert (core.is_joining, core.takes_part, core.clock) == (False, True, 7)
    # Without this resync, a server that receives the view later would wait for the worker.
    assert [sent[-1:] for sent in runtime.sent.values()] == [[Resync(1, 1, 7, True)], [Resync(2, 1, 7, True)]]


def test_a_worker_joins_in_a_given_iteration() -> None:
    """The server has not yet received the end of the other workers' iteration."""
    runtime = Runtime()
    runtime.view(1, {1: 0b01})
    runtime.execute(runtime.core.join(7))
    assert runtime.join_requests == [RequestJoin(1, 1, 7)]
    runtime.execute(runtime.core.joined(1, 1, 7))
    assert (runtime.core.clock, runtime.core.takes_part) == (7, True)


def test_a_view_during_a_join_makes_the_worker_join_all_servers_again() -> None:
    runtime = Runtime()
    runtime.view(1, {1: 0b01, 2: 0b10})
    runtime.execute(runtime.core.join())
    runtime.execute(runtime.core.joined(1, 1, 5))
    runtime.view(2, {1: 0b01, 3: 0b10})
    assert runtime.sent[1] == [Resync(1, 2, 0, False)]
    assert runtime.join_requests[2:] == [RequestJoin(1, 2, 5), RequestJoin(3, 2, 5)]
    assert runtime.core.joined(2, 1, 5) == []
    runtime.core.stop_joining()
    assert not runtime.core.is_joining


def test_a_call_to_join_is_sent_after_the_resync() -> None:
    """If the resync came last, the server would remove the worker that has just joined from its iterations."""
    runtime = Runtime()
    runtime.view(1, {1: 0b01, 2: 0b10})
    runtime.push(0b01)
    runtime.view(2, {1: 0b01, 2: 0b10})
    session = runtime.core.sessions[1]
    session.disconnected()
    runtime.execute(runtime.core.join())
    runtime.start(session.request(RequestKind.CALL, 0, 0, SimpleNamespace(buckets=0)))
    runtime.push(0b01)
    runtime.sent = {}
    runtime.execute(runtime.core.connected(1))
    assert [message if isinstance(message, Resync) else message[0] for message in runtime.sent[1]] == [  # type: ignore[index]
        RequestKind.PUSH,
        RequestKind.PUSH,
        Resync(1, 2, 0, False),
        RequestKind.CALL,
    ]


def test_answered_pushes_are_retained_until_stable() -> None:
    runtime = joined(s1=0b01, s2=0b10)
    for _ in range(3):
        runtime.answered_push(0b11)
        runtime.core.tick()
    assert runtime.core.unstable() is runtime.core.sessions[1]
    assert [message.sequence for message in runtime.stabilize(2, 1)] == [1]
    assert runtime.stabilize(2, 1) == []
    runtime.view(2, {1: 0b11})
    assert runtime.sent[1] == [(RequestKind.PUSH, 2, 1, 0b10), (RequestKind.PUSH, 3, 2, 0b10), Resync(1, 2, 3, True)]
    assert len(runtime.released) == 2  # pushes that only the lost server had
    runtime.answer(1)
    runtime.view(3, {3: 0b11})  # resent pushes are retained too
    assert runtime.sent[3][:-1] == [
        (RequestKind.PUSH, 1, 0, 0b01),
        (RequestKind.PUSH, 2, 1, 0b11),
        (RequestKind.PUSH, 3, 2, 0b11),
    ]
    runtime.answer(3)
    runtime.stabilize(3, 3)
    assert runtime.core.unstable() is None
    assert not runtime.core.has_unfinished


def test_after_a_missed_view_all_retained_pushes_are_resent() -> None:
    runtime = joined(s1=0b1)
    runtime.answered_push(1)
    runtime.view(2, {1: 1})
    assert runtime.sent[1] == [Resync(1, 2, 0, True)]
    runtime.view(4, {1: 1})  # the server may have lost the bucket in version 3
    assert runtime.sent[1] == [(RequestKind.PUSH, 1, 0, 1), Resync(1, 4, 0, True)]


def test_stability_is_reset_with_every_view() -> None:
    # The new primary of a bucket may have completed fewer iterations.
    runtime = joined(s1=0b01, s2=0b10)
    runtime.stabilize(1, 1)
    assert not runtime.core.sessions[1].answered(runtime.push(0b01)[0])
    runtime.answered_push(0b10)
    runtime.view(2, {1: 0b11})
    runtime.answer(1)
    runtime.view(3, {3: 0b11})
    assert runtime.sent[3][:-1] == [(RequestKind.PUSH, 2, 0, 0b10)]


@pytest.mark.parametrize("kind", [RequestKind.TICK, RequestKind.CALL])
def test_answers_of_an_earlier_view_make_no_push_stable(kind: RequestKind) -> None:
    # Server 2 led only one bucket when it received the request, and may lack the sum of the other bucket.
    runtime = joined(s1=0b01, s2=0b10)
    session = runtime.core.sessions[2]
    request = session.request(kind, 0, 0)
    runtime.start(request)
    runtime.answered_push(0b01)
    runtime.core.tick()
    runtime.view(2, {2: 0b11})
    assert session.stabilize(request.number, 1) == []
    runtime.answer(2)
    assert [push.sequence for push in session.retained] == [1]
    runtime.view(3, {3: 0b11})
    assert runtime.sent[3] == [(RequestKind.PUSH, 1, 0, 0b01), Resync(3, 3, 1, True)]


def test_nothing_is_retained_without_replicas() -> None:
    runtime = joined(None, s1=0b01, s2=0b10)
    runtime.answered_push(0b11)
    assert not runtime.core.has_unfinished
    runtime.replica = 9
    runtime.view(2, {1: 0b01, 2: 0b10})
    runtime.answered_push(0b11)
    runtime.replica = None
    # In the first view without retention, pushes of moved buckets are resent, and other pushes are released.
    runtime.view(3, {1: 0b01, 3: 0b10})
    assert runtime.sent[1] == [Resync(1, 3, 0, True)]
    assert runtime.sent[3] == [(RequestKind.PUSH, 2, 0, 0b10), Resync(3, 3, 0, True)]
    assert len(runtime.released) == 2
    runtime.answer(3)
    assert not runtime.core.has_unfinished


def test_a_retired_worker_retains_nothing() -> None:
    runtime = joined(s1=0b1)
    runtime.answered_push(1)
    runtime.execute(runtime.core.retire())
    assert len(runtime.released) == 1
    runtime.answered_push(1)
    assert not runtime.core.has_unfinished


def test_requests_for_lost_buckets_fail() -> None:
    runtime = joined(None, s1=0b001, s2=0b110)
    [living, lost_push] = runtime.push(0b011)
    [full_pull] = runtime.make(RequestKind.PULL, 0b110)
    runtime.view(2, {1: 0b011}, lost=0b100)
    assert runtime.core.lost == 0b100
    assert [request.error for request in (living, lost_push, full_pull)] == [None, None, LOST]
    assert [full_pull.is_done] == [False]  # a part is still missing
    runtime.answer(1)
    assert full_pull.is_done
    assert runtime.core.failures == [full_pull]
    runtime.core.report(full_pull)
    assert runtime.core.failures == []


def test_a_request_fails_if_its_replacement_fails() -> None:
    runtime = joined(None, s1=0b1)
    [reported], [unreported] = runtime.push(1), runtime.push(1)
    runtime.core.report(reported)
    runtime.view(2, {2: 1})
    session = runtime.core.sessions[2]
    for request in session.unanswered():
        session.failed(request, LOST)
    assert [reported.error, unreported.error] == [LOST, LOST]
    assert runtime.core.failures == [unreported]

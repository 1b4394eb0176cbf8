"""A client continues while fake servers die, join and move buckets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.memory_transport import MemoryTransport
from tests.waiting import wait_until

from paceline.errors import ConnectionLostError, DeadlineError, NonFiniteError, PacelineError, StaleEpochError
from paceline.protocol import Member, Role
from paceline.protocol.buckets import ALL, bucket_set, to_bytes
from paceline.protocol.chains import ChainGroup
from paceline.protocol.client import ClientCore
from paceline.ps import SGD, Client, Ticket, messages
from paceline.ps.client.exchange import fill
from paceline.ps.client.following import ViewFollower
from paceline.ps.client.servers import Servers
from paceline.ps.messages import ACK, CALL, PULL, PUSH, PUSH_PULL, RANGE, RESULT, SYNCED, TICK, VALUES
from paceline.tables.bucket_arrays import bucket_width, buckets_of_keys, clip_runs, runs_in
from paceline.testing import Served, serve_in_thread
from paceline.transport import Handler, Header, Hello, Peer, frame_parts

LOW, HIGH = ALL >> 256, ALL & ~(ALL >> 256)
KEYS = np.arange(64, dtype=np.uint64)
DENSE = 1000


class Seen(NamedTuple):
    """A data frame that a server has received."""

    kind: int
    flags: int
    epoch: int
    clock: int
    sequence: int
    keys: tuple[int, ...]
    grads: tuple[float, ...]


class FakeServer(Handler):
    """A server whose row for each key is the key itself. It answers immediately, or never if `is_silent`."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.version = 1
        self.leads = 0
        self.dim = 1
        self.is_mute = False
        self.is_silent = False
        self.durable = 0
        self.fails: PacelineError | None = None
        self.seen: list[Seen] = []
        self.calls: list[msgspec.Struct] = []
        self.served: Served
        self.peers: set[Peer] = set()
        self._held: list[tuple[Peer, Header]] = []

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """See :meth:`Handler.frame_received`."""
        self.peers.add(peer)
        if header.kind == CALL:
            message = messages.decode_to_server(bytes(meta))
            self.calls.append(message)
            if self.is_mute:
                return
            answer = message.clock if isinstance(message, messages.JoinClock) else None
            peer.send(*frame_parts(RESULT, request=header.request, meta=messages.encode(answer)))
            return
        keys, grads = self._split(header, body)
        self.seen.append(
            Seen(header.kind, header.flags, header.epoch, header.clock, header.sequence, tuple(keys), tuple(grads))
        )
        if header.kind == SYNCED:
            return
        if header.epoch < self.version:
            raise StaleEpochError("an old map")
        if self.is_silent:
            self._held.append((peer, header))
            return
        if self.fails is not None and header.kind != TICK:
            raise self.fails
        values = np.repeat(np.array(keys, np.float32), self.dim if header.kind in (PULL, PUSH_PULL) else 0)
        kind = VALUES if header.kind in (PULL, PUSH_PULL) else ACK
        peer.send(*frame_parts(kind, request=header.request, clock=self.durable, body=values))

    def _split(self, header: Header, body: memoryview) -> tuple[list[int], list[float]]:
        if header.kind in (TICK, SYNCED):
            return [], []
        if header.flags & RANGE:
            start, stop = np.frombuffer(body, np.uint64, 2).tolist()
            runs = clip_runs(runs_in(DENSE, self.leads), start, stop)
            keys = [key for a, b in runs for key in range(a, b)]
            return keys, np.frombuffer(body, np.float32, offset=16).tolist()
        size = 8 if header.kind == PULL else 8 + 4 * self.dim
        count = len(body) // size
        return np.frombuffer(body, np.uint64, count).tolist(), np.frombuffer(body, np.float32, -1, 8 * count).tolist()

    def change(self, version: int, *, is_silent: bool = False) -> None:
        """Set a newer version of the view, and reject waiting requests."""

        def refuse() -> None:
            self.version = version
            self.is_silent = is_silent
            for peer, header in self._held:
                peer.send_error(header, StaleEpochError("an old map"))
            self._held = []

        self.served.call(refuse)

    def cut(self) -> None:
        """End the connections."""
        self.served.call(lambda: [peer.close() for peer in self.peers])

    def data(self, epoch: int) -> list[Seen]:
        """Return the frames of a view, without ticks."""
        return [message for message in self.seen if message.epoch == epoch and message.kind != TICK]


class FakeLink:
    """A link to a fake scheduler, which numbers tables by kind."""

    def call(self, message: msgspec.Struct, *arguments: Any) -> messages.KnownTable:
        """Return the declared table: number 1 if sparse, 2 if dense."""
        assert isinstance(message, messages.DeclareTable)
        number = 1 if message.spec.kind == "sparse" else 2
        return messages.KnownTable(number=number, declared=message.spec, spec=message.spec)

    def close(self) -> None:
        """Do nothing."""


class World:
    """Servers with incarnations 11, 12, … and ranks 0, 1, …, and a client whose view lists the servers."""

    def __init__(self, stack: ExitStack, leads: Mapping[int, int], filling: int | None = None, **settings: Any) -> None:
        self.stack = stack
        self.transport = MemoryTransport()
        self.servers: dict[int, FakeServer] = {}
        for incarnation in (11, 12, 13):
            server = self.servers[incarnation] = FakeServer(incarnation)
            server.served = stack.enter_context(serve_in_thread(server, self.transport))
        self.settings = messages.ClusterSettings(
            **{"consistency": "eventual", "stale": "accept", "num_servers": 2, "num_workers": 1, **settings}
        )
        self.first = self.map(1, leads, filling)

    def connect(self, timeout_s: float = 10.0, reconnect_s: float = 3.0) -> Client:
        """Return a worker's client."""
        follower = ViewFollower()
        follower.take(self.first)
        welcome = messages.Welcome(rank=3, incarnation=70, heartbeat_s=1.0, settings=self.settings, view=self.first)
        core = ClientCore(is_worker=True, is_sequential=self.settings.consistency == "sequential")
        hello = Hello(role="worker", rank=3, incarnation=70)
        options = {"timeout_s": timeout_s, "reconnect_s": reconnect_s}
        servers = follower.servers = Servers(self.transport, hello, core, follower.watch, **options)
        client = Client(FakeLink(), welcome, servers, follower)  # type: ignore[arg-type]
        self.stack.callback(client.close)
        servers.open(has_replicas=False)
        client.join()
        return client

    def map(self, version: int, leads: Mapping[int, int], filling: int | None = None) -> messages.View:
        """Return a view in which each server leads some buckets. A server without buckets is dead."""
        named = 0
        groups = []
        for incarnation, buckets in leads.items():
            named |= buckets
            if buckets:
                groups.append(ChainGroup((incarnation,), filling, to_bytes(buckets)))
            self.servers[incarnation].leads = buckets
        if ALL & ~named:
            groups.append(ChainGroup((), None, to_bytes(ALL & ~named)))
        members = tuple(
            Member(
                node=f"s{incarnation}",
                role=Role.SERVER,
                rank=incarnation - 11,
                incarnation=incarnation,
                address=self.servers[incarnation].served.endpoint,
            )
            for incarnation in (*leads, *(() if filling is None else (filling,)))
        )
        return messages.View(epoch=version, members=members, version=version, groups=tuple(groups))

    def publish(self, client: Client, version: int, leads: Mapping[int, int], filling: int | None = None) -> None:
        """Pass a newer view to the client."""
        client.follower.take(self.map(version, leads, filling))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until_synced(server: FakeServer, version: int) -> None:
    """Wait for the resync after the resent requests."""
    wait_until(lambda: any(message.kind == SYNCED for message in server.data(version)))


def until_pulled(server: FakeServer, version: int) -> None:
    """Wait for requests for values of both kinds of tables."""
    wait_until(lambda: sum(message.kind == PULL for message in server.data(version)) >= 2)


def in_thread(stack: ExitStack, function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    stack.callback(thread.join, 10)
    return thread


def keys_in(buckets: int) -> tuple[int, ...]:
    return tuple(key for key in KEYS.tolist() if buckets_of_keys(np.array([key], np.uint64)) & buckets)


def ones(count: int = 64) -> Any:
    return np.ones(count, np.float32)


def test_unanswered_requests_to_a_dead_server_are_sent_to_its_successor(stack: ExitStack) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    table = client.sparse_table("w", dim=2, update=SGD(lr=1.0))
    for server in world.servers.values():
        server.dim = 2
    world.servers[12].is_silent = True
    pushed = table.push(KEYS, np.arange(128, dtype=np.float32).reshape(64, 2))
    queries: list[bool] = []
    waiting = in_thread(stack, lambda: queries.append(pushed.dropped))  # the thread waits for the server that will die
    wait_until(lambda: any(message.kind == PUSH for message in world.servers[12].seen))
    began = time.monotonic()
    world.publish(client, 2, {11: ALL})
    waiting.join(10)
    assert queries == [False]
    assert time.monotonic() - began < 5
    until_synced(world.servers[11], 2)
    again = world.servers[11].data(2)
    assert [message.kind for message in again] == [PUSH, SYNCED]
    assert again[0].keys == keys_in(HIGH)
    assert client.servers.routes.server_ranks == (0,)
    assert set(client.servers.routes.owners.tolist()) == {0}
    assert len(client.servers.newest()) == 1


def test_a_pull_is_split_again_and_the_values_are_joined(stack: ExitStack) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    table = client.sparse_table("w", update=SGD(lr=1.0))
    dense = client.dense_table("d", size=DENSE, update=SGD(lr=1.0))
    for server in world.servers.values():
        server.is_silent = True
    out = np.zeros(64, np.float32)
    keys = KEYS[::-1].copy()
    sparse = table.push_pull_async(keys, keys.astype(np.float32), out, tick=True)
    ranged = dense.push_pull_async(np.arange(DENSE, dtype=np.float32)[7:990], start=7)
    by_key = dense.pull_async(keys=[5, 999, 500, 5])
    own_buckets = ALL // 3  # every second bucket
    wait_until(lambda: sum(message.kind != SYNCED for message in world.servers[12].seen) == 3)
    for server in world.servers.values():
        server.change(2)
    world.publish(client, 2, {11: LOW & own_buckets, 12: HIGH & own_buckets, 13: ALL & ~own_buckets})
    assert (sparse.result() == keys).all()
    assert (out == keys).all()
    assert (ranged.result() == np.arange(7, 990)).all()
    assert (by_key.result() == [5, 999, 500, 5]).all()
    width = bucket_width(DENSE)
    pushed: dict[int, float] = {}
    for server in world.servers.values():
        until_synced(server, 2)
        frames = server.data(2)
        kinds = [frame.kind for frame in frames]
        assert kinds[-1] == SYNCED
        assert kinds.count(PUSH) == 2
        assert not any(frame.flags for frame in frames[:-1])
        push, ranged_push = (frame for frame in frames if frame.kind == PUSH)
        assert kinds[:2] == [PUSH, PULL]
        assert (push.clock, frames[1].clock) == (0, 1)  # the tick separates the push and the pull
        assert push.keys == push.grads
        assert buckets_of_keys(np.array(push.keys, np.uint64)) & ~server.leads == 0
        assert all(server.leads >> key // width & 1 for key in ranged_push.keys)
        pushed.update(zip(ranged_push.keys, ranged_push.grads, strict=True))
        # Each server gets one frame per push. It would drop a second frame with this sequence as a repetition.
        assert len({(frame.kind, frame.sequence) for frame in frames if frame.kind == PUSH}) == 2
    assert pushed == {key: float(key) for key in range(7, 990)}
    assert client.clock == 1


@pytest.mark.parametrize("seed", range(3))
def test_values_find_the_rows_after_any_number_of_view_changes(stack: ExitStack, seed: int) -> None:
    """Each view change divides the requests again, in another order of keys than the caller's order."""
    random = np.random.default_rng(seed)

    def divided() -> dict[int, int]:
        """Return servers with buckets, each bucket on a random server."""
        owners = random.choice((11, 12, 13), 512)
        return {server: bucket_set(np.flatnonzero(owners == server).tolist()) for server in (11, 12, 13)}

    world = World(stack, divided())
    client = world.connect()
    sparse = client.sparse_table("w", update=SGD(lr=1.0))
    dense = client.dense_table("d", size=DENSE, update=SGD(lr=1.0))
    for server in world.servers.values():
        server.is_silent = True
    keys, wanted = random.permutation(KEYS), random.permutation(DENSE)[:300]
    tickets = sparse.pull_async(keys), dense.pull_async(start=7, stop=990), dense.pull_async(keys=wanted)
    expected = keys[:, None], np.arange(7, 990), wanted
    for version in range(2, 5):
        for server in world.servers.values():
            until_pulled(server, version - 1)
            server.change(version, is_silent=version < 4)
        world.publish(client, version, divided())
    for ticket, values in zip(tickets, expected, strict=True):
        assert (ticket.result() == values).all()


def test_a_waiting_client_resyncs_with_another_server_after_a_cut(
    stack: ExitStack,
) -> None:
    """The simulation found this: the awaited reply may depend on a worker that waits for the data lost in the cut."""
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    table = client.sparse_table("w", update=SGD(lr=1.0))
    busy, other = world.servers[11], world.servers[12]
    until_synced(other, 1)
    busy.is_silent = True
    in_thread(stack, table.pull_async(keys_in(LOW)).wait)
    wait_until(lambda: any(message.kind == PULL for message in busy.data(1)))
    other.cut()
    wait_until(client.servers.connections[1].channel.has_ended)
    for server in (busy, other):
        server.change(2, is_silent=server is busy)
    world.publish(client, 2, {11: LOW, 12: HIGH})
    until_synced(other, 2)
    busy.change(3)
    world.publish(client, 3, {11: LOW, 12: HIGH})


def test_an_idle_client_resyncs(stack: ExitStack) -> None:
    world = World(stack, {11: ALL})
    client = world.connect()
    client.tick()
    world.publish(client, 2, {11: LOW, 12: HIGH})
    for incarnation in (11, 12):
        server = world.servers[incarnation]
        wait_until(lambda server=server: server.data(2))  # type: ignore[misc]
        assert [message[:5] for message in server.data(2)] == [(SYNCED, 1, 2, 1, 3)]
    client.retire()
    assert [type(call) for call in world.servers[12].calls] == [messages.Retire]
    world.publish(client, 3, {11: LOW, 13: HIGH})
    wait_until(lambda: world.servers[13].data(3))
    assert world.servers[13].data(3)[0][:4] == (SYNCED, 0, 3, 1)


def test_a_joining_worker_resyncs(stack: ExitStack) -> None:
    """Otherwise a server that records the worker before it receives the view would wait for the worker forever."""
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    for incarnation in (11, 12):
        server = world.servers[incarnation]
        wait_until(lambda server=server: len(server.data(1)) == 2)  # type: ignore[misc]
        # One resync follows the first view, and one follows the join.
        assert [message[:5] for message in server.data(1)] == [(SYNCED, 0, 1, 0, 3), (SYNCED, 1, 1, 0, 3)]
    assert client.clock == 0


def sequential_world(stack: ExitStack, **options: Any) -> tuple[World, Client]:
    world = World(stack, {11: LOW, 12: HIGH}, 13, consistency="sequential", **options)
    return world, world.connect()


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_answered_pushes_are_retained_until_stable(stack: ExitStack, kind: str) -> None:
    world, client = sequential_world(stack)
    sparse, dense = client.sparse_table("w", update=SGD(lr=1.0)), client.dense_table("d", size=DENSE, update=SGD(lr=1))

    def push(grads: Any) -> Ticket:
        return sparse.push(KEYS, grads) if kind == "sparse" else dense.push(grads, start=100)

    grads = ones()
    for number in range(1, 4):
        grads[:] = number
        push(grads).wait()
        client.tick()
        client.flush()
    grads[:] = 0  # retained pushes are copies
    world.servers[12].durable = 1
    push(ones() * 4).wait()
    world.publish(client, 2, {11: ALL}, filling=13)
    until_synced(world.servers[11], 2)
    again = world.servers[11].data(2)[:-1]
    high = len(keys_in(HIGH)) if kind == "sparse" else 64  # elements 100 to 163 may lie in both halves
    if kind == "dense":
        high = sum(b - a for a, b in clip_runs(runs_in(DENSE, HIGH), 100, 164))
    if high:
        assert [(message.clock, message.grads) for message in again] == [
            (number - 1, (float(number),) * high) for number in (2, 3, 4)
        ]
        assert [message.sequence - again[0].sequence for message in again] == [0, 1, 2]
    # Resent pushes are retained too.
    client.flush()
    world.publish(client, 3, {13: ALL})
    until_synced(world.servers[13], 3)
    sequences = [message.sequence for message in world.servers[13].data(3)[:-1]]
    assert sequences == list(range(sequences[0], sequences[0] + 4))
    whole = world.servers[13].data(3)[2]
    assert len(set(whole.keys)) == 64
    assert whole.grads == (3.0,) * 64


@pytest.mark.parametrize("is_answered", [True, False])
def test_resent_pushes_are_retained_unchanged(stack: ExitStack, is_answered: bool) -> None:
    """A retained push stays unchanged if the caller reuses its arrays, or if a later push reuses freed memory."""
    world = World(stack, {11: ALL}, 13, consistency="sequential")
    client = world.connect()
    table = client.dense_table("d", size=DENSE, update=SGD(lr=1.0))
    world.servers[11].is_silent = not is_answered
    grads = ones(DENSE)
    ticket = table.push(grads)
    if is_answered:
        ticket.wait()
    world.publish(client, 2, {12: ALL}, filling=13)
    ticket.wait()
    client.flush()
    grads[:] = 2
    table.push(grads).wait()
    world.publish(client, 3, {13: ALL})
    until_synced(world.servers[13], 3)
    assert [set(message.grads) for message in world.servers[13].data(3)[:-1]] == [{1.0}, {2.0}]


def test_retiring_waits_until_pushes_are_durable(stack: ExitStack) -> None:
    world, client = sequential_world(stack)
    table = client.sparse_table("w", update=SGD(lr=1.0))
    table.push(KEYS, ones(), tick=True).wait()
    table.push(KEYS, ones()).wait()
    for server in world.servers.values():
        server.durable = 1
    client.retire()
    for incarnation in (11, 12):
        pull = world.servers[incarnation].seen[-1]
        assert (pull.kind, pull.clock, pull.keys) == (PULL, 1, ())  # an empty pull of the next iteration
    assert not any(connection.session.retained for connection in client.servers.newest())
    table.push(KEYS, ones()).wait()
    assert not any(connection.session.retained for connection in client.servers.newest())  # applied immediately


def test_lost_buckets(stack: ExitStack) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    table = client.sparse_table("w", update=SGD(lr=1.0))
    dense = client.dense_table("d", size=DENSE, update=SGD(lr=1.0))
    world.servers[12].is_silent = True
    ticket = table.push(KEYS, ones())
    message = "^server 1 died: 256 of 512 buckets .* no replica: start again from the last saved model$"
    world.publish(client, 2, {11: LOW})
    with pytest.raises(ConnectionLostError, match=message):
        ticket.wait()
    low = np.array(keys_in(LOW), np.uint64)
    high = np.array(keys_in(HIGH), np.uint64)
    requests: list[Callable[[], object]] = [
        lambda: table.pull(high), lambda: table.push(high, ones(len(high))), dense.pull, lambda: dense.pull(keys=[999]),
        lambda: table.erase(high), lambda: dense.push(ones(DENSE)),
    ]  # fmt: skip
    for request in requests:
        with pytest.raises(ConnectionLostError, match=message):
            request()
    assert (table.pull(low).reshape(-1) == low).all()
    assert (dense.pull(start=10, stop=20) == np.arange(10, 20)).all()
    world.publish(client, 3, {13: 0})
    with pytest.raises(ConnectionLostError, match=r"^servers 0 and 1 died: 512 of 512 buckets"):
        table.pull(low)


def test_a_missing_newer_view_is_a_deadline_error(stack: ExitStack) -> None:
    world = World(stack, {11: ALL})
    client = world.connect(timeout_s=0.2, reconnect_s=0.1)
    table = client.sparse_table("w", update=SGD(lr=1.0))
    world.servers[11].change(2)
    with pytest.raises(DeadlineError, match="version 1"):
        table.pull(KEYS)
    world.publish(client, 2, {11: ALL})
    assert (table.pull(KEYS).reshape(-1) == KEYS).all()


def test_an_unreachable_new_server(stack: ExitStack) -> None:
    world = World(stack, {11: ALL})
    client = world.connect()
    table = client.sparse_table("w", update=SGD(lr=1.0))
    new = world.map(2, {11: LOW, 12: HIGH})
    address = world.servers[12].served.endpoint.tcp
    listener = world.transport.listeners.pop(address.host)
    world.servers[11].change(2)
    client.follower.take(new)
    wait_until(lambda: world.servers[11].data(2))
    world.transport.listeners[address.host] = listener
    assert (table.pull(KEYS).reshape(-1) == KEYS).all()
    until_synced(world.servers[12], 2)


def test_calls_go_to_all_servers_of_the_newest_view(stack: ExitStack) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    world.publish(client, 2, {11: LOW, 12: HIGH}, filling=13)
    client.sparse_table("w", update=SGD(lr=1.0))
    assert client.servers.routes.server_ranks == (0, 1)
    assert len(client.servers.newest()) == 3
    assert isinstance(world.servers[13].calls[-1], messages.CreateTable)


def test_a_call_to_a_server_dying_during_the_call(stack: ExitStack) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    world.servers[12].is_mute = True
    done: list[object] = []
    thread = in_thread(stack, lambda: done.append(client.sparse_table("w", update=SGD(lr=1.0))))
    wait_until(lambda: world.servers[12].calls[1:])
    world.publish(client, 2, {11: LOW, 13: HIGH})
    thread.join(10)
    assert done
    assert isinstance(world.servers[13].calls[-1], messages.CreateTable)


def test_a_push_lost_with_the_servers_raises_an_error(stack: ExitStack) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    table = client.sparse_table("w", update=SGD(lr=1.0))
    world.servers[12].is_silent = True
    table.push(KEYS, ones())
    wait_until(lambda: any(frame.kind == PUSH for frame in world.servers[12].seen))
    client.follower.take(world.map(2, {11: LOW}))
    with pytest.raises(PacelineError, match="server 1 died"):
        client.flush()


def test_a_rejection_is_raised_after_the_loss_of_another_server(stack: ExitStack) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    table = client.sparse_table("w", update=SGD(lr=1.0))
    world.servers[11].fails = NonFiniteError("refused")
    low = np.array(keys_in(LOW), np.uint64)
    table.push(low, np.ones(len(low), np.float32))
    wait_until(lambda: any(frame.kind == PUSH for frame in world.servers[11].seen))
    world.servers[11].fails = None
    table.pull(low)  # the rejection arrived before the reply to this pull
    world.publish(client, 2, {11: ALL})
    with pytest.raises(NonFiniteError, match="refused"):
        client.flush()


def test_an_interrupted_view_change_continues_later(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(stack, {11: LOW, 12: HIGH})
    client = world.connect()
    table = client.sparse_table("w", update=SGD(lr=1.0))
    world.servers[12].is_silent = True
    ticket = table.push(KEYS, ones())
    wait_until(lambda: any(frame.kind == PUSH for frame in world.servers[12].seen))
    fails = iter([True])

    def fill_once(*arguments: Any) -> Any:
        if next(fails, False):
            raise MemoryError
        return fill(*arguments)

    monkeypatch.setattr("paceline.ps.client.servers.fill", fill_once)
    world.servers[11].seen.clear()
    client.follower.take(world.map(2, {11: ALL}))
    while True:
        try:
            ticket.wait()
            break
        except MemoryError:
            continue
    assert any(frame.kind == PUSH for frame in world.servers[11].seen)

"""Every push is applied exactly once, however the connection breaks. The tests check that the faults occurred."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests.faulty import Fault, FaultPlan, FaultyTransport
from tests.waiting import in_threads, wait_until

from paceline.protocol import BoundedDelay, Consistency, DropStale, Eventual, Sequential
from paceline.protocol.client import Request
from paceline.ps import SGD, Client, messages
from paceline.ps.client.connection import ServerConnection
from paceline.ps.client.exchange import DataRequest
from paceline.ps.client.records import write_records
from paceline.ps.client.snapshot_loading import load_snapshot, load_state
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.ps.messages import FORWARD, PULL, PUSH, PUSH_PULL, TICK
from paceline.ps.snapshot_messages import LoadParts
from paceline.storage.snapshot_directory import read_newest
from paceline.tables.bucket_arrays import buckets_of_keys
from paceline.tables.settings import to_fields
from paceline.transport import SocketTransport

from .harness import TOKEN, Cluster, floats, key_of, keys_of, statistics_of

KEYS = np.arange(300, dtype=np.uint64)  # a key on every server
ONES = np.ones(300, np.float32)


def bucket_of(key: np.uint64) -> int:
    return buckets_of_keys(np.array([key])).bit_length() - 1


def faulty(cluster: Cluster, *faults: Fault, rank: int = 0) -> tuple[Client, FaultPlan]:
    plan = FaultPlan(faults)
    return cluster.connect(rank=rank, transport=FaultyTransport(cluster.transport, plan)), plan


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [0, pytest.param(1, marks=pytest.mark.thorough), 7, 19])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_cut_among_pipelined_pushes(servers: int, step: int, when: Literal["before", "after"]) -> None:
    with Cluster(servers=servers) as cluster:
        client, plan = faulty(cluster, Fault(action="cut", rank=0, step=step, kind=PUSH, when=when))
        table = client.sparse_table("w", update=SGD(lr=1.0))
        tickets = [table.push(KEYS, ONES) for _ in range(20)]
        for ticket in reversed(tickets):
            ticket.wait()
        plan.check_all_fired()
        assert (table.pull(KEYS) == -20).all()
        assert [counted.pushes for counted in statistics_of(client, "w")] == [20] * servers


@pytest.mark.parametrize("kind", [PUSH, PUSH_PULL, PULL, TICK], ids=["push", "push_pull", "pull", "tick"])
@pytest.mark.parametrize(
    "fault",
    [
        {"action": "cut", "when": "before"},
        {"action": "cut", "when": "after"},
        {"action": "delay", "delay_s": 0.01},
    ],
    ids=["cut before", "cut after", "delay"],
)
@pytest.mark.parametrize(
    "consistency",
    [Sequential(), pytest.param(BoundedDelay(tau=0), marks=pytest.mark.thorough), Eventual()],
    ids=str,
)
def test_every_kind_of_request(kind: int, fault: dict[str, object], consistency: Consistency) -> None:
    with Cluster(servers=2, workers=1, consistency=consistency) as cluster:
        client, plan = faulty(cluster, Fault(rank=0, step=3, kind=kind, **fault))  # type: ignore[arg-type]
        table = client.sparse_table("w", update=SGD(lr=1.0))
        dense = client.dense_table("d", size=1000, update=SGD(lr=1.0))
        for step in range(4):
            push, ranges = table.push(KEYS, ONES), dense.push(np.ones(500, np.float32), start=300)
            values = table.push_pull_async(KEYS, ONES, tick=True)
            pulled = table.pull_async(KEYS)
            client.tick()
            assert (values.result() == -2 * (step + 1)).all()
            assert (pulled.result() == -2 * (step + 1)).all()
            assert (dense.pull()[300:800] == -(step + 1)).all()
            push.wait()
            ranges.wait()
        plan.check_all_fired()
        assert [counted.pushes for counted in statistics_of(client, "w")] == [8, 8]
        assert [counted.pushes for counted in statistics_of(client, "d")] == [4, 4]
        assert client.clock == 8


def test_several_cuts_and_a_repeated_frame() -> None:
    faults = [
        Fault(action="cut", rank=0, step=2, kind=PUSH, when="after"),
        Fault(action="cut", rank=0, step=3, kind=PUSH, when="before"),  # during the resend
        Fault(action="cut", rank=0, step=5, kind=PUSH, when="after"),
        Fault(action="delay", rank=0, step=9, kind=PUSH, delay_s=0.01),
        Fault(action="cut", rank=0, step=30, kind=PUSH, when="after"),
    ]
    with Cluster() as cluster:
        client, plan = faulty(cluster, *faults)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        for _ in range(3):
            tickets = [table.push(KEYS, ONES) for _ in range(10)]
            for ticket in tickets:
                ticket.wait()
        plan.check_all_fired()
        assert [fault.step for fault in plan.fired] == [2, 3, 5, 9, 30]
        assert (table.pull(KEYS) == -30).all()
        assert statistics_of(client, "w")[0].pushes == 30


@pytest.mark.parametrize("kind", [PUSH, PUSH_PULL, TICK], ids=["push", "push_pull", "tick"])
def test_a_duplicate_frame_is_applied_once(kind: int) -> None:
    with Cluster(workers=1, consistency=Sequential()) as cluster:
        client, plan = faulty(cluster, Fault(action="duplicate", rank=0, step=1, kind=kind))
        table = client.sparse_table("w", update=SGD(lr=1.0))
        for step in range(5):
            table.push(KEYS, ONES).wait()
            assert (table.push_pull(KEYS, ONES) == -2 * step).all()
            client.tick()
            assert client.statistics()[0].tables["w"].pushes == 2 * step + 2
        plan.check_all_fired()
        assert (table.pull(KEYS) == -10).all()


@pytest.mark.parametrize("seed", range(6))
def test_random_faults(seed: int) -> None:
    """With two workers, three servers and a dozen cuts and delays, all counters and values are exact."""
    random = np.random.default_rng(seed)
    pushes = 60
    consistencies: list[Consistency] = [Sequential(), BoundedDelay(tau=2), Eventual()]
    with Cluster(servers=3, workers=2, consistency=consistencies[seed % 3]) as cluster:
        plans, clients = [], []
        for rank in range(2):
            faults = []
            for step in random.choice(2 * pushes, 8, replace=False).tolist():
                when: Literal["before", "after"] = "before" if random.random() < 0.5 else "after"
                action: Literal["cut", "delay"] = "delay" if random.random() < 0.2 else "cut"
                faults.append(Fault(action=action, rank=rank, step=step, kind=PUSH, when=when, delay_s=0.002))
            client, plan = faulty(cluster, *faults, rank=rank)
            clients.append(client)
            plans.append(plan)

        def work(rank: int) -> None:
            table = clients[rank].sparse_table("w", update=SGD(lr=1.0))
            tickets = []
            for step in range(pushes):
                tickets.append(table.push(KEYS, ONES, tick=True))
                if step % 10 == 9:
                    table.pull(KEYS[step:])
            for ticket in tickets:
                ticket.wait()

        in_threads(lambda: work(0), lambda: work(1))
        for plan in plans:
            plan.check_all_fired()
        table = clients[0].sparse_table("w", update=SGD(lr=1.0))
        assert (table.pull(KEYS) == -2 * pushes).all()
        assert [counted.pushes for counted in statistics_of(clients[0], "w")] == [2 * pushes] * 3


def test_a_dropped_gradient_stays_dropped_after_a_lost_reply() -> None:
    with Cluster(workers=2, consistency=Eventual(), stale=DropStale(beyond=0)) as cluster:
        client, plan = faulty(cluster, Fault(action="cut", rank=0, step=0, kind=PUSH, when="after"))
        other = cluster.connect(rank=1)
        table, other_table = (connection.sparse_table("w", update=SGD(lr=1.0)) for connection in (client, other))
        table.pull([1])
        other_table.push([1], floats(1)).wait()
        assert table.push([1], floats(8)).dropped
        plan.check_all_fired()
        counted = statistics_of(other, "w")[0]
        assert (counted.pushes, counted.dropped) == (2, 1)
        assert other_table.pull([1]) == -1


def test_clients_have_independent_numbers() -> None:
    with Cluster(workers=3) as cluster:
        for rank in range(3):
            table = cluster.connect(rank=rank).sparse_table("w", update=SGD(lr=1.0))
            for _ in range(3):
                table.push(keys_of(1), floats(1)).wait()
        assert table.pull(keys_of(1)) == -9


@pytest.mark.parametrize("method", ["send", "receive", "receive_header"])
def test_an_interrupt_during_a_push(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C while a frame is in flight. Later calls (for example a save) work, and the push is applied once."""
    with Cluster() as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(KEYS, ONES).wait()
        channel = client.servers.connections[0].channel

        def interrupted(*arguments: object) -> None:
            monkeypatch.undo()  # once
            raise KeyboardInterrupt

        monkeypatch.setattr(channel, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.statistics() if method == "receive_header" else table.push(KEYS, ONES).wait()
        expected = 1 if method == "receive_header" else 2
        assert (table.pull(KEYS) == -expected).all()
        assert statistics_of(client, "w")[0].pushes == expected
        assert client.servers.connections[0].channel is not channel


def test_a_repeat_is_acknowledged_when_the_replica_has_the_push() -> None:
    plan = FaultPlan(
        [
            Fault(action="delay", role="server", rank=0, step=0, kind=FORWARD, delay_s=0.3),
            Fault(action="duplicate", rank=0, step=0, kind=PUSH),
        ]
    )
    with Cluster(servers=2, replicas=1, transport=FaultyTransport(SocketTransport(TOKEN), plan)) as cluster:
        client = cluster.connect(rank=0)
        key = key_of(client, 0)
        client.sparse_table("w", update=SGD(lr=1.0)).push(key, floats(1)).wait()
        plan.check_all_fired()
        bucket = buckets_of_keys(key).bit_length() - 1
        primary, replica = (node.server.core.replication.applied_to(bucket) for node in cluster.nodes)
        assert primary
        assert replica == primary


def cut_once_after_sending(connection: ServerConnection, between: Callable[[], object], kind: str = "") -> None:
    """Close the connection once, after a server has applied a call (of a kind). Call `between` before the repeat."""
    channel, transmit = connection.channel, connection.transmit

    def transmit_and_cut(frame: tuple[Any, ...], request: Request) -> None:
        if kind.encode() not in frame[1]:
            transmit(frame, request)
            return
        connection.transmit = transmit  # type: ignore[method-assign]
        transmit(frame, request)
        channel.receive_header(5.0)  # the server has applied the call, but its answer is lost
        between()
        channel.close()

    connection.transmit = transmit_and_cut  # type: ignore[method-assign]


@pytest.mark.parametrize(("servers", "replicas"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("change", ["write", "erase"])
def test_a_repeated_change_keeps_a_push_between_the_changes(servers: int, replicas: int, change: str) -> None:
    with Cluster(servers=servers, replicas=replicas) as cluster:
        client, other = cluster.connect(observer=True), cluster.connect(observer=True)
        table, other_table = (connection.sparse_table("w", update=SGD(lr=1.0)) for connection in (client, other))
        other_table.push(KEYS, ONES).wait()
        cut_once_after_sending(client.servers.connections[0], lambda: other_table.push(KEYS, ONES).wait())
        if change == "write":
            write_records(client, table.spec, KEYS, np.full((len(KEYS), 1), 7, np.float32))
            after = 7
        else:
            assert table.erase(KEYS) == len(KEYS)
            after = 0
        found = other_table.pull(KEYS)
        assert (found == after - 1).any()  # the push came between the change and its repeat
        if servers == 1:
            assert (found == after - 1).all()
        assert not any(server.differences for server in client.statistics())


@pytest.mark.parametrize("change", ["write", "erase"])
def test_a_server_dies_during_a_change(change: str) -> None:
    """The replica has applied the change and does not apply the repetition: the push between them stays."""
    with Cluster(servers=2, replicas=1) as cluster:
        client, other = cluster.connect(observer=True), cluster.connect(observer=True)
        table, other_table = (connection.sparse_table("w", update=SGD(lr=1.0)) for connection in (client, other))
        other_table.push(KEYS, ONES).wait()
        keys = np.array([key for key in KEYS if client.servers.routes.owners[bucket_of(key)] == 0])

        def die() -> None:
            cluster.nodes[0].stop()
            other_table.push(keys, ONES[: len(keys)]).wait()

        cut_once_after_sending(client.servers.connections[0], die)
        if change == "write":
            write_records(client, table.spec, KEYS, np.full((len(KEYS), 1), 7, np.float32))
        else:
            assert table.erase(KEYS) == len(KEYS)
        after = 7 if change == "write" else 0
        assert (other_table.pull(keys) == after - 1).all()
        assert (other_table.pull(np.setdiff1d(KEYS, keys)) == after).all()


def test_a_push_after_a_later_change_is_applied() -> None:
    """Repeat the push like a client whose push was rejected because of the server's view."""
    with Cluster() as cluster:
        client = cluster.connect(observer=True)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        sequence = client.servers.core.next_sequence()
        write_records(client, table.spec, KEYS, np.full((len(KEYS), 1), 7, np.float32))
        connection = client.servers.connections[0]
        client.servers.wait(connection.send(DataRequest(PUSH, table.number, sequence=sequence, parts=(KEYS, ONES))))
        assert (table.pull(KEYS) == 6).all()


def test_a_repeated_begin_pass_does_not_replace_the_next_pass() -> None:
    with Cluster(servers=2) as cluster:
        client, other = cluster.connect(observer=True), cluster.connect(observer=True)
        table, other_table = (connection.sparse_table("w", update=SGD(lr=1.0)) for connection in (client, other))
        cut_once_after_sending(client.servers.connections[1], lambda: other_table.begin_pass(2))
        table.begin_pass(1)
        parts = [node.server.tables.by_number[table.number].part for node in cluster.nodes]
        assert [part.pass_number for part in parts] == [2, 2]


@pytest.mark.parametrize("has_unseen", [True, False], ids=["unseen rows", "no unseen rows"])
@pytest.mark.parametrize("replicas", [0, 1])
def test_repeated_erasing_of_unseen_rows_does_not_undo_the_pass_between(replicas: int, has_unseen: bool) -> None:
    with Cluster(servers=2, replicas=replicas) as cluster:
        client, other = cluster.connect(observer=True), cluster.connect(observer=True)
        table, other_table = (connection.sparse_table("w", update=SGD(lr=1.0)) for connection in (client, other))
        keys = np.array([key for key in np.arange(3000, dtype=np.uint64) if bucket_of(key) == 0])
        ones = np.ones(len(keys), np.float32)

        def push_in_last_pass() -> None:
            other_table.push(keys, ones).wait()
            other_table.begin_pass(3)  # all these rows are unseen now

        other_table.begin_pass(1 if has_unseen else 2)
        other_table.push(keys, ones).wait()
        other_table.begin_pass(2)
        owner = client.servers.connections[client.servers.routes.owners[0]]
        cut_once_after_sending(owner, push_in_last_pass)
        assert table.erase_unseen(1) == (len(keys) if has_unseen else 0)
        assert (other_table.pull(keys) == (-1 if has_unseen else -2)).all()
        assert len(keys) > 0


def test_repeated_loading_of_parts_does_not_undo_a_push_between_the_loads(tmp_path: Path) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        client.sparse_table("w", update=SGD(lr=1.0)).push(KEYS, -7 * ONES).wait()
        with contextlib.closing(SnapshotCoordinator(cluster.connect(observer=True), tmp_path)) as coordinator:
            coordinator.begin()
            wait_until(lambda: coordinator.poll() is not None)
    with Cluster(servers=2) as cluster:
        client, other = cluster.connect(observer=True), cluster.connect(observer=True)
        other_table = other.sparse_table("w", update=SGD(lr=1.0))
        owners = client.servers.routes.owners
        keys = np.array([key for key in KEYS if owners[bucket_of(key)] == 1])

        def push_when_loaded() -> None:
            wait_until(lambda: load_state(other.servers.connections[-1]).done)
            other_table.push(keys, ONES[: len(keys)]).wait()

        cut_once_after_sending(client.servers.connections[-1], push_when_loaded, "LoadParts")
        load_snapshot(client, read_newest(tmp_path))
        assert (other_table.pull(keys) == 6).all()
        assert (other_table.pull(np.setdiff1d(KEYS, keys)) == 7).all()


def test_a_late_repeat_of_an_older_call_does_not_permit_repeats_of_newer_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        client.sparse_table("w", update=SGD(lr=1.0)).push(KEYS, -7 * ONES).wait()
        with contextlib.closing(SnapshotCoordinator(cluster.connect(observer=True), tmp_path)) as coordinator:
            coordinator.begin()
            wait_until(lambda: coordinator.poll() is not None)
    with Cluster() as cluster:
        client = cluster.connect(observer=True)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.begin_pass(1)
        connection = client.servers.connections[0]
        send, loads = connection.call, []

        def record(request: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(request, LoadParts):
                loads.append((request, options))
            return send(request, *arguments, **options)

        monkeypatch.setattr(connection, "call", record)
        load_snapshot(client, read_newest(tmp_path))
        table.push(KEYS, ONES).wait()
        send(messages.BeginPass(table=table.number, number=1, rows_of=0), sequence=1)
        for request, options in loads:
            send(request, **options)
        wait_until(lambda: load_state(connection).done)
        assert (table.pull(KEYS) == 6).all()


def test_every_server_has_the_last_change_of_hyperparameters() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect(observer=True)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        updates = [to_fields(SGD(lr=lr)) for lr in (0.5, 0.25)]
        changes = [
            messages.SetUpdate(
                table=table.number,
                update=update,
                revision=client.link.call(messages.ChangeUpdate(table="w", update=update), int),
            )
            for update in updates
        ]
        for order, connection in zip((changes, changes[::-1]), client.servers.connections, strict=True):
            for change in order:
                connection.call(change, sequence=client.servers.core.next_sequence())
        table.push(KEYS, ONES).wait()
        assert (table.pull(KEYS) == -0.25).all()

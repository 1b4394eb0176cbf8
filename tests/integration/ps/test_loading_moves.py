"""A snapshot is loaded while servers join, leave and die. Then every server of every chain has the snapshot's rows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import ConnectionLostError, PeerError, StaleEpochError
from paceline.protocol.buckets import buckets_in
from paceline.ps import SGD, Adagrad, Client, DenseTable, SparseTable, Uniform
from paceline.ps.client.snapshot_loading import load_snapshot
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.ps.server import snapshots as server_snapshots
from paceline.ps.server.fills import FillTransfers
from paceline.ps.snapshot_messages import LoadParts
from paceline.storage import parts
from paceline.storage.snapshot_directory import Snapshot, read_buckets, read_newest

from .harness import Cluster, Floats, ServerNode, random_keys
from .test_replication import cluster_view, is_whole
from .test_snapshots import take

KEYS = random_keys(np.random.default_rng(11), 8_000)
SIZE = 5_000


def declare(client: Client) -> tuple[SparseTable, DenseTable]:
    start = Uniform(low=-1, high=1)
    return (
        client.sparse_table("sparse", dim=2, update=Adagrad(lr=0.1), initializer=start, seed=1),
        client.dense_table("dense", size=SIZE, update=SGD(lr=0.5), initializer=start, seed=2),
    )


def values(client: Client) -> list[Floats]:
    sparse, dense = declare(client)
    return [sparse.pull(KEYS), dense.pull()]


def same(one: list[Floats], other: list[Floats]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Floats]]:
    """A snapshot in many small parts, and the contents of its tables."""
    folder = tmp_path_factory.mktemp("snapshots")
    with pytest.MonkeyPatch.context() as patch, Cluster(servers=2) as cluster:
        patch.setattr(parts, "PART_BYTES", 8_000)
        client, observer = cluster.connect(), cluster.connect(observer=True)
        sparse, dense = declare(client)
        random = np.random.default_rng(3)
        sparse.push(KEYS, random.standard_normal((len(KEYS), 2), np.float32))
        dense.push(random.standard_normal(SIZE, np.float32))
        client.flush()
        take(SnapshotCoordinator(observer, folder))
        return folder, values(client)


class Loads:
    """Lets servers read the parts of a snapshot one by one, and all remaining parts after :meth:`finish`."""

    def __init__(self, patch: pytest.MonkeyPatch, free: int) -> None:
        self._free = threading.Semaphore(free)
        self._is_open = False
        self.num_read = 0
        read = read_buckets

        def read_when_allowed(*arguments: object, **options: object) -> object:
            if not self._is_open:
                self._free.acquire(timeout=20.0)
            self.num_read += 1
            return read(*arguments, **options)  # type: ignore[arg-type]

        patch.setattr(server_snapshots, "read_buckets", read_when_allowed)

    def finish(self) -> None:
        """Let the servers read all parts."""
        self._is_open = True
        self._free.release(1000)


def check_all_copies(cluster: Cluster, client: Client) -> None:
    """Check that all members of a chain have equal records in their buckets."""
    nodes = {node.server.replicator.incarnation: node for node in cluster.nodes if node.served is not None}

    def copies(node: ServerNode, bucket: int) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for _, table in sorted(node.server.tables.by_number.items()):
            keys, records = table.part.read_bucket(bucket)
            order = np.argsort(keys)
            found.append((keys[order].tobytes(), records[order].tobytes()))
        return found

    for group in cluster_view(client).groups:
        for bucket in buckets_in(group.buckets):
            found = [copies(nodes[member], bucket) for member in group.members]
            assert all(other == found[0] for other in found), (bucket, group.members)


def load_while(
    cluster: Cluster, client: Client, snapshot: Snapshot, patch: pytest.MonkeyPatch, change: Callable[[Loads], None]
) -> None:
    """Load the snapshot; call `change` when the servers have read some of the parts."""
    loads = Loads(patch, free=6)

    def meanwhile() -> None:
        try:
            wait_until(lambda: loads.num_read >= 6)
            change(loads)
        finally:
            loads.finish()

    in_threads(lambda: load_snapshot(client, snapshot), meanwhile)


def test_replicas_are_compared_during_the_load(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers of a chain load a bucket at different times. This does not count as a difference."""
    folder, expected = snapshot
    with Cluster(servers=2, replicas=1) as cluster:
        client = cluster.connect()

        def compare(loads: Loads) -> None:
            assert cluster.compare_replicas() > 0  # raises AssertionError if a server reports a difference

        load_while(cluster, client, read_newest(folder), monkeypatch, compare)
        assert cluster.compare_replicas() > 0
        assert not any(node.server.replicator.checks.num_unordered for node in cluster.nodes)
        assert same(values(client), expected)


@pytest.mark.parametrize("replicas", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_server_joins_during_the_load(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    folder, expected = snapshot
    with Cluster(servers=2, replicas=replicas) as cluster, ExitStack() as stack:
        client, observer = cluster.connect(), cluster.connect(observer=True)

        def join(loads: Loads) -> None:
            cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
            wait_until(lambda: is_whole(observer, 3, replicas))

        load_while(cluster, client, read_newest(folder), monkeypatch, join)
        wait_until(lambda: is_whole(observer, 3, replicas))
        check_all_copies(cluster, observer)
        assert same(values(client), expected)
        if replicas:
            cluster.nodes[0].stop()
            assert same(values(client), expected)
            wait_until(lambda: is_whole(observer, 2, 1))
            check_all_copies(cluster, observer)


def test_a_loading_client_receives_the_view_with_a_new_server_late(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = snapshot
    with Cluster(servers=2, replicas=1) as cluster, ExitStack() as stack:
        client, observer = cluster.connect(), cluster.connect(observer=True)

        def join_unnoticed(loads: Loads) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(client.servers.watch, "take", lambda cluster: False)
                cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
                wait_until(lambda: is_whole(observer, 3, 1))
                loads.finish()
                time.sleep(0.3)  # time enough to load all parts with the old view
            client.follower.take(cluster_view(observer))

        # One table only, because the request for the next table would report the failure.
        manifest = read_newest(folder).manifest
        one = Snapshot(folder, msgspec.structs.replace(manifest, tables=manifest.tables[:1]))
        load_while(cluster, client, one, monkeypatch, join_unnoticed)
        check_all_copies(cluster, observer)
        assert same(values(client)[:1], expected[:1])


def test_a_server_ignores_messages_of_another_version(snapshot: tuple[Path, list[Floats]]) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        number = client.open_table(read_newest(snapshot[0]).manifest.tables[0].spec).number
        request = LoadParts(version=7, table=number, directory=str(snapshot[0]), parts=(), buckets=())
        with pytest.raises(StaleEpochError, match=r"server 0 has view 1, .* view 7"):
            client.servers.newest()[0].call(request, sequence=1)


def test_a_server_dies_and_another_server_replaces_it(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = snapshot
    with Cluster(servers=3, replicas=1) as cluster, ExitStack() as stack:
        client, observer = cluster.connect(), cluster.connect(observer=True)

        def die(loads: Loads) -> None:
            cluster.nodes[1].stop()
            cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())

        load_while(cluster, client, read_newest(folder), monkeypatch, die)
        wait_until(lambda: is_whole(observer, 3, 1))
        check_all_copies(cluster, observer)
        cluster.nodes[0].stop()
        assert same(values(client), expected)


def test_the_last_server_of_a_bucket_dies_during_the_loading(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        with pytest.raises(ConnectionLostError, match=r"server 1 died: \d+ of 512 buckets"):
            load_while(cluster, client, read_newest(snapshot[0]), monkeypatch, lambda loads: cluster.nodes[1].stop())


def test_loading_starts_when_no_server_is_being_filled(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is being filled may receive rows from before the load, and later pushes from after the load."""
    folder, expected = snapshot
    fills = threading.Event()
    pump = FillTransfers.send_next

    def pump_when_allowed(self: FillTransfers, target: int) -> None:
        if fills.is_set():
            pump(self, target)
        else:
            asyncio.get_running_loop().call_later(0.005, self.send_next, target)

    monkeypatch.setattr(FillTransfers, "send_next", pump_when_allowed)
    with Cluster(servers=2, replicas=1) as cluster, ExitStack() as stack:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        loads = Loads(monkeypatch, free=1000)

        def fill() -> None:
            time.sleep(0.3)
            assert not loads.num_read
            fills.set()

        in_threads(lambda: load_snapshot(client, read_newest(folder)), fill)
        wait_until(lambda: is_whole(observer, 3, 1))
        check_all_copies(cluster, observer)
        assert same(values(client), expected)


@pytest.mark.parametrize("blind", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_replica_without_the_files_is_reported(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch, blind: int
) -> None:
    folder, expected = snapshot
    load = server_snapshots.ServerSnapshots.load

    def see(self: server_snapshots.ServerSnapshots, request: LoadParts) -> None:
        elsewhere = {"directory": "/nowhere"} if self._tables.rank == blind else {}
        load(self, msgspec.structs.replace(request, **elsewhere))

    monkeypatch.setattr(server_snapshots.ServerSnapshots, "load", see)
    with Cluster(servers=3, replicas=1) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        load_snapshot(client, read_newest(folder))
        check_all_copies(cluster, observer)
        cluster.nodes[1 - blind].stop()
        assert same(values(client), expected)


def test_too_many_changes_of_servers_fail(snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FillTransfers, "send_next", lambda self, target: None)
    with Cluster(servers=1, replicas=0) as cluster, ExitStack() as stack:
        client = cluster.connect()
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        with pytest.raises(PeerError, match=r"for 0.2 s \(servers keep"):
            load_snapshot(client, read_newest(snapshot[0]), timeout_s=0.2)


def test_waiting_clients_can_be_interrupted(
    snapshot: tuple[Path, list[Floats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    loads = Loads(monkeypatch, free=0)
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        try:
            with pytest.raises(KeyboardInterrupt):
                load_snapshot(client, read_newest(snapshot[0]), check=interrupt)
        finally:
            loads.finish()

"""Snapshots of a cluster in this process: their contents, and parts that later snapshots reuse."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import ModelError, PeerError, TableMismatchError, UsageError
from paceline.protocol import Sequential
from paceline.ps import SGD, Adagrad, Client, DenseTable, SparseTable, Uniform
from paceline.ps.client import snapshots
from paceline.ps.client.snapshot_loading import load_snapshot
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.ps.messages import View
from paceline.ps.server import snapshots as server_snapshots
from paceline.ps.snapshot_messages import DropSnapshot
from paceline.storage import parts
from paceline.storage.format import SnapshotManifest
from paceline.storage.snapshot_directory import SnapshotWriteError, folder_name, numbers_in, read_newest

from .harness import Cluster, Floats, ServerNode, files_up_to, keys_of, random_keys

KEYS = random_keys(np.random.default_rng(5), 5_000)
SIZE = 2_000


def declare(client: Client) -> tuple[SparseTable, SparseTable, DenseTable]:
    start = Uniform(low=-1, high=1)
    return (
        client.sparse_table("narrow", update=SGD(lr=0.5), initializer=start, seed=1),
        client.sparse_table("wide", dim=6, update=Adagrad(lr=0.1), initializer=start, seed=2),
        client.dense_table("dense", size=SIZE, update=Adagrad(lr=0.1), initializer=start, seed=3),
    )


def train(client: Client, steps: range, keys: int = 1000) -> None:
    narrow, wide, dense = declare(client)
    for step in steps:
        random = np.random.default_rng(step)
        chosen = random.choice(KEYS, keys, replace=False)
        narrow.push(chosen, random.standard_normal(keys, np.float32))
        wide.push(chosen, random.standard_normal((keys, 6), np.float32))
        dense.push(random.standard_normal(SIZE // 2, np.float32), start=step).wait()


def values(client: Client) -> list[Floats]:
    narrow, wide, dense = declare(client)
    return [narrow.pull(KEYS), wide.pull(KEYS), dense.pull()]


def same(one: list[Floats], other: list[Floats]) -> bool:
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(one, other, strict=True))


def finish(coordinator: SnapshotCoordinator) -> SnapshotManifest:
    found: list[SnapshotManifest] = []

    def is_listed() -> bool:
        manifest = coordinator.poll()
        if manifest is not None:
            found.append(manifest)
        return bool(found)

    wait_until(is_listed)
    return found[0]


def take(coordinator: SnapshotCoordinator) -> SnapshotManifest:
    coordinator.begin()
    return finish(coordinator)


def restored(directory: Path, servers: int) -> tuple[list[Floats], list[int]]:
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        load_snapshot(client, read_newest(directory))
        return values(client), [len(table) for table in declare(client)[:2]]


def test_a_snapshot_can_be_loaded_into_a_cluster_of_any_size(tmp_path: Path) -> None:
    with Cluster(servers=3) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(4))
        manifest = take(SnapshotCoordinator(observer, tmp_path))
        expected, rows = values(client), [len(table) for table in declare(client)[:2]]
    assert manifest.full
    assert manifest.iteration is None
    assert [table.rows for table in manifest.tables] == [*rows, SIZE]
    for servers in (1, 5):
        found, found_rows = restored(tmp_path, servers)
        assert same(found, expected)
        assert found_rows == rows


def test_unchanged_parts_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 5_000)
    with Cluster(servers=2) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(4))
        coordinator = SnapshotCoordinator(observer, tmp_path, keep=2)
        sizes = []
        for step in range(snapshots.FULL_EVERY + 2):
            manifest = take(coordinator)
            assert manifest.full == (step % snapshots.FULL_EVERY == 0)
            written = list((tmp_path / folder_name(manifest.number)).glob("*.safetensors"))
            sizes.append(sum(path.stat().st_size for path in written))
            expected = values(client)
            if step in (2, 7, snapshots.FULL_EVERY + 1):
                found, _ = restored(tmp_path, 1 + step % 2)
                assert same(found, expected)
            train(client, range(step, step + 1), keys=5)
            # The directory has exactly the files that snapshots need.
            manifests = [
                number for number in numbers_in(tmp_path) if (tmp_path / folder_name(number) / "manifest.json").exists()
            ]
            assert len(manifests) == min(step + 1, 2)
            assert manifests[-1] == manifest.number
        assert all(size < sizes[0] / 2 for size in sizes[1 : snapshots.FULL_EVERY])
        assert sizes[snapshots.FULL_EVERY] >= sizes[0]
        assert numbers_in(tmp_path) == [11, 12]  # no remaining snapshot refers to the files of the first ten


def test_pushes_continue_during_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1)  # a part for each bucket makes the snapshot slow
    with Cluster(servers=2) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        table = client.sparse_table("count", update=SGD(lr=1.0))
        ones = np.full(len(KEYS), -1.0, np.float32)
        for _ in range(3):
            table.push(KEYS, ones)
        client.flush()
        coordinator = SnapshotCoordinator(observer, tmp_path)
        coordinator.begin()
        pushes = 3
        while coordinator.poll() is None:
            table.push(KEYS, ones).wait()
            pushes += 1
        take(coordinator)  # the next snapshot contains all pushes so far
        assert pushes > 5
    with Cluster() as cluster:
        client = cluster.connect()
        load_snapshot(client, read_newest(tmp_path))
        assert set(client.sparse_table("count", update=SGD(lr=1.0)).pull(KEYS).reshape(-1)) == {float(pushes)}


def test_a_sequential_snapshot_is_between_two_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row contains the number of its iterations. In a snapshot all rows on all servers have the same number."""
    monkeypatch.setattr(parts, "PART_BYTES", 1_000)
    with Cluster(servers=2, workers=2, consistency=Sequential()) as cluster:
        clients = cluster.connect_all()
        observer = cluster.connect(observer=True)
        going = [True]

        def work(client: Client) -> int:
            sparse = client.sparse_table("sparse", dim=2, update=SGD(lr=0.5))
            late = client.sparse_table("late", update=SGD(lr=0.5))
            dense = client.dense_table("dense", size=SIZE, update=SGD(lr=0.5))
            iteration = 0
            while iteration < 10_000:
                sparse.push(KEYS[:1000], np.full((1000, 2), -1, np.float32))
                late.push(keys_of(10**6 + iteration), np.full(1, -1, np.float32))
                dense.push(np.full(SIZE, -1, np.float32), tick=True)
                sparse.pull(KEYS[:10])
                time.sleep(0.05)  # otherwise the servers, which are threads of this process, would write slowly
                iteration += 1
                if not going[0]:  # the gate makes every worker end at the same iteration
                    client.retire()
                    break
            return iteration

        def watch() -> list[tuple[int, list[Floats], int]]:
            found: list[tuple[int, list[Floats], int]] = []
            coordinator = SnapshotCoordinator(observer, tmp_path, keep=10)
            wait_until(lambda: len(observer.tables()) == 3)
            for _ in range(2):
                manifest = take(coordinator)
                assert manifest.iteration is not None
                copy = tmp_path / f"copy{manifest.number}"
                shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy*"))
                found.append((manifest.iteration, [], manifest.number))
            going[0] = False
            return found

        results = in_threads(*(lambda client=client: work(client) for client in clients), watch)
    for iteration, _, number in results[2]:
        with Cluster(servers=3) as cluster:
            client = cluster.connect()
            load_snapshot(client, read_newest(tmp_path / f"copy{number}"))
            sparse = client.sparse_table("sparse", dim=2, update=SGD(lr=0.5))
            late = client.sparse_table("late", update=SGD(lr=0.5))
            dense = client.dense_table("dense", size=SIZE, update=SGD(lr=0.5))
            assert set(sparse.pull(KEYS[:1000]).reshape(-1)) == {float(iteration)}
            assert set(dense.pull()) == {float(iteration)}
            assert len(late) == iteration
            assert len(sparse) == 1000


def test_damage_is_reported_and_the_earlier_snapshot_is_used(tmp_path: Path) -> None:
    with Cluster(servers=2) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        coordinator = SnapshotCoordinator(observer, tmp_path)
        kept = []
        for step in range(3):
            train(client, range(step, step + 1))
            take(coordinator)
            kept.append(values(client))
        coordinator.close()
    reports: list[str] = []
    (tmp_path / folder_name(3) / "manifest.json").write_bytes(b"{")
    assert read_newest(tmp_path, reports.append).manifest.number == 2
    assert "damaged" in reports.pop()
    found, _ = restored(tmp_path, 1)
    assert same(found, kept[1])
    part = next((tmp_path / folder_name(2)).glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    assert read_newest(tmp_path, reports.append).manifest.number == 1
    assert [re.findall(r"snapshot-\d+", line.partition(":")[0]) for line in reports] == [
        [folder_name(number), folder_name(1)] for number in (3, 2)
    ]
    assert "SHA-256" in reports[-1]
    assert str(part) in reports[-1]
    os.truncate(next((tmp_path / folder_name(1)).glob("*.safetensors")), 100)
    reports.clear()
    with pytest.raises(ModelError, match=r"no complete snapshot to resume from: .*; .*SHA-256.*; .*100 bytes"):
        read_newest(tmp_path, reports.append)
    assert not reports
    with pytest.raises(ModelError, match="holds no complete snapshot"):
        read_newest(tmp_path / "nowhere")


def test_an_unsuitable_cluster(tmp_path: Path) -> None:
    with Cluster(servers=2) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(1))
        take(SnapshotCoordinator(observer, tmp_path))
        with pytest.raises(UsageError, match="already has rows"):
            load_snapshot(client, read_newest(tmp_path))
    with Cluster() as cluster:
        client = cluster.connect()
        client.sparse_table("wide", dim=3, update=Adagrad(lr=0.1))
        with pytest.raises(TableMismatchError, match=r"'wide' as sparse\(dim=6.*has it as sparse\(dim=3"):
            load_snapshot(client, read_newest(tmp_path))


def test_replicas_have_the_loaded_rows(tmp_path: Path) -> None:
    with Cluster(servers=2, replicas=1) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(3))
        take(SnapshotCoordinator(observer, tmp_path))
        expected = values(client)
    with Cluster(servers=3, replicas=1) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        load_snapshot(client, read_newest(tmp_path))
        assert same(values(client), expected)
        coordinator = SnapshotCoordinator(observer, tmp_path)
        coordinator.begin()
        cluster.nodes[1].stop()
        assert same(values(client), expected)
        try:
            finish(coordinator)  # unless the snapshot was complete before
        except (SnapshotWriteError, PeerError):
            coordinator.give_up()
        assert take(coordinator).tables[2].rows == SIZE
    found, _ = restored(tmp_path, 1)
    assert same(found, expected)


def test_servers_without_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(servers=2) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(3))
        take(SnapshotCoordinator(observer, tmp_path))
        expected = values(client)
    monkeypatch.setattr(server_snapshots, "do_all_exist", lambda directory, parts: False)
    found, _ = restored(tmp_path, 2)
    assert same(found, expected)


def test_a_hanging_file_system_delays_no_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, hung = threading.Event(), threading.Event()
    callers = threading.current_thread()

    def hanging(function: Any) -> Any:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(str(tmp_path)) and threading.current_thread() is not callers:
                hung.set()
                goes_on.wait(20)
            return function(path, *arguments, **options)

        return call

    def serves(client: Client) -> None:
        """Check that a server replies while one of its threads waits for the file system."""
        assert hung.wait(20)
        train(client, range(1), keys=10)
        assert not goes_on.is_set()
        goes_on.set()

    def serves_concurrently(table: SparseTable) -> None:
        assert hung.wait(20)
        table.pull(KEYS)
        assert not goes_on.is_set()
        goes_on.set()

    with Cluster() as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(2))
        for name in ("mkdir", "stat", "unlink", "scandir", "listdir", "open", "rmdir"):
            monkeypatch.setattr(os, name, hanging(getattr(os, name)))
        coordinator = SnapshotCoordinator(observer, tmp_path)
        coordinator.begin()
        serves(client)
        finish(coordinator)
        coordinator.begin()
        goes_on.clear()
        hung.clear()
        cluster.nodes[0].call(
            lambda: cluster.nodes[0].server.snapshots.drop(DropSnapshot(directory=str(tmp_path), number=2))
        )
        serves(client)
        coordinator.close()
    newest = read_newest(tmp_path)
    goes_on.clear()
    hung.clear()
    with Cluster() as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        other = observer.sparse_table("other", update=SGD(lr=1.0))
        in_threads(lambda: load_snapshot(client, newest), lambda: serves_concurrently(other))


def test_each_directory_has_its_own_history(tmp_path: Path) -> None:
    """A bucket that has not changed since snapshot 1 in one directory may have changed since snapshot 1 in another."""
    first, second = tmp_path / "first", tmp_path / "second"
    with Cluster() as cluster:
        client, one, other = cluster.connect(), cluster.connect(observer=True), cluster.connect(observer=True)
        coordinators = [SnapshotCoordinator(one, first), SnapshotCoordinator(other, second)]
        train(client, range(2))
        take(coordinators[0])
        train(client, range(2, 4), keys=100)
        take(coordinators[1])
        take(coordinators[0])
        expected = values(client)
        for coordinator in coordinators:  # a server takes only the later of two snapshots
            coordinator.begin()
        with pytest.raises(SnapshotWriteError, match=r"snapshot 2 in .*second"):
            finish(coordinators[0])
        finish(coordinators[1])
        for coordinator in coordinators:
            coordinator.close()
    for directory in (first, second):
        assert same(restored(directory, 1)[0], expected)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt reports the full disk and leaves no files, and the servers continue.

    With free space the next snapshot succeeds.
    """

    tries: list[str] = []

    def full(directory: Path, file: str, *arguments: object) -> object:
        if "/s0-" in file:
            time.sleep(0.1)  # the other snapshot has failed, and its files are removed
        tries.append(file)
        (directory / file).write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with Cluster(servers=2) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(2))
        coordinator = SnapshotCoordinator(observer, tmp_path)
        take(coordinator)
        train(client, range(2, 3), keys=5)
        for number in (2, 3):
            monkeypatch.setattr(server_snapshots, "write_part", full)
            coordinator.begin()
            wait_until(lambda: {file.split("/")[1][:2] for file in tries} == {"s0", "s1"})
            tries.clear()
            with pytest.raises(SnapshotWriteError, match=f"snapshot {number} was not taken: .*no space left in"):
                finish(coordinator)
            assert not coordinator.is_taking
            wait_until(lambda: numbers_in(tmp_path) == [1])
        monkeypatch.undo()
        manifest = take(coordinator)
        assert manifest.number == 4
        assert not manifest.full
        expected = values(client)
    found, _ = restored(tmp_path, 1)
    assert same(found, expected)


@pytest.mark.parametrize(("part_bytes", "role"), [(1 << 20, r"server \d: "), (2_000, "")], ids=["parts", "manifest"])
def test_files_with_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, role: str) -> None:
    """The operating system refuses the write after half of the file."""
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    with Cluster(servers=2) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(2))
        coordinator = SnapshotCoordinator(observer, tmp_path)
        take(coordinator)
        kept, before = values(client), sorted(tmp_path.rglob("*"))
        train(client, range(2, 4))
        with (
            files_up_to(10_000),
            pytest.raises(SnapshotWriteError, match=f"2 was not taken: {role}cannot .* too large$"),
        ):
            take(coordinator)
        wait_until(lambda: sorted(tmp_path.rglob("*")) == before)
        found, _ = restored(tmp_path, 1)
        assert same(found, kept)
        assert take(coordinator).number == 3
        expected = values(client)
    found, _ = restored(tmp_path, 1)
    assert same(found, expected)


def test_an_impossible_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Cluster() as cluster:
        observer = cluster.connect(observer=True)
        coordinator = SnapshotCoordinator(observer, tmp_path / "file" / "snapshots")
        with pytest.raises(SnapshotWriteError, match="cannot write in"):
            coordinator.begin()
        assert not coordinator.is_taking


def test_an_abandoned_snapshot_leaves_no_files(tmp_path: Path) -> None:
    """If the workers never reach the iteration of the snapshot, no files remain."""
    with Cluster(consistency=Sequential()) as cluster:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        train(client, range(1))
        coordinator = SnapshotCoordinator(observer, tmp_path)
        coordinator.begin()
        assert coordinator.poll() is None
        coordinator.give_up()
        assert numbers_in(tmp_path) == []
        client.tick()
        client.tick()
        client.tick()
        coordinator.begin()
        assert coordinator.is_taking


def test_last_passes_of_rows_are_kept_and_sent_to_new_servers(tmp_path: Path) -> None:
    """Otherwise every row would count as seen after a resumption, and would be dropped too late."""

    def mark(client: Client) -> SparseTable:
        table = declare(client)[0]
        for number in (3, 4, 5):
            table.begin_pass(number)
            table.push(KEYS[: 6000 - 1000 * number], np.ones(6000 - 1000 * number, np.float32)).wait()
        return table

    def is_whole(client: Client) -> bool:
        found: View = client.link.get_view()
        return all(len(group.members) == 2 and group.filling is None for group in found.groups)

    with Cluster(servers=2, replicas=1) as cluster, ExitStack() as stack:
        client = cluster.connect()
        table = mark(client)
        coordinator = SnapshotCoordinator(client, tmp_path)
        take(coordinator)
        coordinator.close()
        cluster.nodes[0].stop()
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        wait_until(lambda: is_whole(client))
        cluster.nodes[1].stop()
        assert table.erase_unseen(2) == 1000
        assert table.erase_unseen(1) == 1000
        assert len(table) == 1000
    with Cluster(servers=1) as cluster:
        client = cluster.connect()
        load_snapshot(client, read_newest(tmp_path))
        table = declare(client)[0]
        table.begin_pass(5)
        assert table.erase_unseen(2) == 1000
        assert table.erase_unseen(1) == 1000
        np.testing.assert_array_equal(table.pull(KEYS[1000:3000]), declare(client)[0].pull(KEYS[1000:3000]))
        assert len(table) == 1000

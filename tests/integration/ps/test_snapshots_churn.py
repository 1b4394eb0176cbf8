"""Snapshots while servers join and leave: they complete, and each bucket has the state of one moment."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import wait_until

from paceline.kernels.hashing import mix
from paceline.protocol import Consistency, Eventual, Sequential
from paceline.protocol.buckets import bucket_set
from paceline.ps import SGD
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.ps.server import snapshots as server_snapshots
from paceline.storage import parts
from paceline.storage.format import SnapshotManifest
from paceline.storage.snapshot_directory import SnapshotWriteError, read_buckets

from .harness import Cluster, ServerNode, random_keys
from .test_replication import drain, is_whole

KEYS = random_keys(np.random.default_rng(5), 5_000)
NUM_BUCKETS = len(np.unique(mix(KEYS) >> np.uint64(55)))
CHANGES = ("join", "death", "join", "drain", "join", "death")


def values_in(manifest: SnapshotManifest, directory: Path, table: int) -> dict[int, set[float]]:
    """Return the values in each bucket of a table of one float32 a row."""
    found: dict[int, set[float]] = {}
    for use in manifest.tables[table].uses:
        for bucket, _, records in read_buckets(directory, use.part, bucket_set(use.buckets)):
            assert bucket not in found
            found[bucket] = set((-records[:, 0]).tolist())
    return found


class Counting:
    """A worker that repeatedly adds 1 to all keys of two tables."""

    def __init__(self, cluster: Cluster) -> None:
        self.client = cluster.connect()
        self.pushed = self.acknowledged = 0
        self.error: BaseException | None = None
        self._is_stopped = False
        self._tables = [self.client.sparse_table(name, update=SGD(lr=1.0)) for name in ("one", "two")]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self.acknowledged > 2)

    def _run(self) -> None:
        ones = np.ones(len(KEYS), np.float32)
        try:
            while not self._is_stopped:
                self.pushed += 1
                self._tables[0].push(KEYS, ones).wait()
                self._tables[1].push(KEYS, ones, tick=True).wait()
                self.acknowledged = self.pushed
                time.sleep(0.005)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.thorough
@pytest.mark.parametrize("consistency", [Eventual(), Sequential()], ids=["eventual", "sequential"])
def test_snapshots_complete(consistency: Consistency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_snapshots, "PAUSE", 10.0)  # so that servers join and leave during a snapshot
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)
    with Cluster(servers=3, replicas=1, consistency=consistency) as cluster, ExitStack() as stack:
        joined = stack.enter_context(ExitStack())
        counting, observer = Counting(cluster), cluster.connect(observer=True)
        stack.callback(counting.stop)
        coordinator = SnapshotCoordinator(observer, tmp_path)
        failures: list[str] = []
        num_rounds = 0

        def change(kind: str) -> None:
            if kind == "join":
                cluster.nodes.append(ServerNode(cluster, None, joined, extra=True).join())
            elif kind == "drain":
                drain(cluster, cluster.nodes[0], observer)
            else:
                cluster.nodes.pop(0).stop()
            wait_until(lambda: is_whole(observer, len(cluster.nodes), 1))

        for kind in CHANGES:
            at_least = counting.acknowledged
            coordinator.begin()
            assert coordinator.poll() is None
            change(kind)
            manifest = None
            try:
                while manifest is None:
                    assert coordinator.attempt is not None
                    num_rounds = max(num_rounds, coordinator.attempt.round)
                    manifest = coordinator.poll()
                    time.sleep(0.01)
            except SnapshotWriteError as error:
                failures.append(str(error))
                continue
            at_most = counting.pushed
            for table in (0, 1):
                found = values_in(manifest, tmp_path, table)
                assert len(found) == NUM_BUCKETS
                assert all(len(values) == 1 for values in found.values())
                values = {value for (value,) in found.values()}
                if manifest.iteration is None:
                    assert at_least <= min(values) <= max(values) <= at_most
                else:
                    assert values == {float(manifest.iteration)}
        coordinator.close()
    assert num_rounds > 0  # servers changed between the snapshots
    assert not failures

"""Measure a snapshot of 10^7 rows: the delay of pushes, the rate of writing, and the recovery.

    python benchmarks/snapshots.py [--rows 10000000] [--dim 16] [--keys 2000] [--directory DIR] [--json]

One server process and one worker run. The worker pushes without a pause (Adagrad) and waits for each push.
`longest_ms` is the longest push during the snapshot. `usual_longest_ms` is the longest push in three seconds without a
snapshot. `floor_mb_per_s` is the rate of the disk alone: a loop writes and syncs the same number of bytes, in files of
the same size, in the same folder.

The recovery is the time from opening the directory to the last row in a new cluster with as many servers. The start of
the cluster is not included. Checksums are verified twice: before the first row is loaded, and by the server. Then all
of this is repeated under sequential consistency. There, the server copies a row before it changes the row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.launch import local_cluster
from paceline.protocol import Consistency, Eventual, Sequential
from paceline.ps import Adagrad, Client, SparseTable
from paceline.ps.client.snapshot_loading import load_snapshot
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.storage.format import SnapshotManifest
from paceline.storage.parts import PART_BYTES
from paceline.storage.snapshot_directory import read_newest

_LOAD_KEYS = 200_000


@dataclass(frozen=True, kw_only=True)
class Result:
    consistency: str
    rows: int
    dim: int
    megabytes: float
    snapshot_s: float
    written_mb_per_s: float
    floor_mb_per_s: float
    usual_median_ms: float
    usual_longest_ms: float
    median_ms: float
    p99_ms: float
    longest_ms: float
    incremental_megabytes: float
    incremental_s: float
    recovery_s: float
    verify_s: float


class Pushing(threading.Thread):
    """A worker that pushes without a pause. `times` has the seconds of each push."""

    def __init__(self, table: SparseTable, keys: np.ndarray, count: int, ticks: bool) -> None:
        super().__init__(daemon=True)
        self._table = table
        self._keys = keys
        self._count = count
        self._ticks = ticks
        self._ends = False
        self.times: list[float] = []

    def run(self) -> None:
        random = np.random.default_rng(2)
        grads = np.full((self._count, self._table.dim), 0.5, np.float32)
        while not self._ends:
            at = int(random.integers(0, len(self._keys) - self._count))
            start = time.perf_counter()
            self._table.push(self._keys[at : at + self._count], grads, tick=self._ticks, assume_unique=True).wait()
            self.times.append(time.perf_counter() - start)

    def end(self) -> None:
        self._ends = True
        self.join()


def floor(directory: Path, num_bytes: int) -> float:
    """Return the seconds of a loop that writes and syncs `num_bytes`, in files of a part's size."""
    block = np.random.default_rng(3).integers(0, 256, PART_BYTES, dtype=np.uint8).tobytes()
    folder = Path(tempfile.mkdtemp(dir=directory))
    start = time.perf_counter()
    for number in range(-(-num_bytes // len(block))):
        with open(folder / str(number), "wb", buffering=0) as file:
            file.write(block[: num_bytes - number * len(block)])
            os.fsync(file.fileno())
    taken = time.perf_counter() - start
    shutil.rmtree(folder)
    return taken


def take(coordinator: SnapshotCoordinator) -> tuple[SnapshotManifest, float]:
    start = time.perf_counter()
    coordinator.begin()
    while (manifest := coordinator.poll()) is None:
        time.sleep(0.01)
    return manifest, time.perf_counter() - start


def size_of(directory: Path, number: int) -> int:
    return sum(path.stat().st_size for path in (directory / f"snapshot-{number:06d}").glob("*.safetensors"))


def fill(client: Client, rows: int, dim: int) -> tuple[SparseTable, np.ndarray]:
    table = client.sparse_table("rows", dim=dim, update=Adagrad(lr=0.1))
    keys = np.unique(np.random.default_rng(1).integers(0, 2**64, rows, np.uint64))
    np.random.default_rng(4).shuffle(keys)
    client.retire()
    grads = np.random.default_rng(5).standard_normal((_LOAD_KEYS, dim), np.float32)
    for at in range(0, len(keys), _LOAD_KEYS):
        part = keys[at : at + _LOAD_KEYS]
        table.push(part, grads[: len(part)], assume_unique=True).wait()
    client.join()
    return table, keys


def measure(consistency: Consistency, rows: int, dim: int, count: int, directory: Path) -> Result:
    with (
        local_cluster(consistency=consistency) as cluster,
        cluster.connect() as client,
        cluster.connect(observer=True) as observer,
    ):
        table, keys = fill(client, rows, dim)
        ticks = isinstance(consistency, Sequential)
        coordinator = SnapshotCoordinator(observer, directory)
        usual = Pushing(table, keys, count, ticks)
        usual.start()
        time.sleep(3.0)
        usual.end()
        pushing = Pushing(table, keys, count, ticks)
        pushing.start()
        manifest, seconds = take(coordinator)
        pushing.end()
        written = size_of(directory, manifest.number)
        # A few buckets change, and the worker ends the iterations for which the snapshot waits.
        ending = Pushing(table, keys[:8], 4, ticks)
        ending.start()
        take(coordinator)  # contains the pushes since the first snapshot
        incremental, incremental_s = take(coordinator)
        ending.end()
        incremental_bytes = size_of(directory, incremental.number)
    floor_s = floor(directory, written)
    with local_cluster() as cluster, cluster.connect(observer=True) as client:
        start = time.perf_counter()
        snapshot = read_newest(directory)
        verify_s = time.perf_counter() - start
        load_snapshot(client, snapshot)
        recovery_s = time.perf_counter() - start
        found = client.statistics()[0].tables["rows"].rows
        assert found == len(keys), (found, len(keys))
    before, times = np.array(usual.times) * 1e3, np.array(pushing.times) * 1e3
    return Result(
        consistency=str(consistency),
        rows=len(keys),
        dim=dim,
        megabytes=round(written / 1e6),
        snapshot_s=round(seconds, 2),
        written_mb_per_s=round(written / 1e6 / seconds),
        floor_mb_per_s=round(written / 1e6 / floor_s),
        usual_median_ms=round(float(np.median(before)), 2),
        usual_longest_ms=round(float(before.max()), 1),
        median_ms=round(float(np.median(times)), 2),
        p99_ms=round(float(np.percentile(times, 99)), 1),
        longest_ms=round(float(times.max()), 1),
        incremental_megabytes=round(incremental_bytes / 1e6, 1),
        incremental_s=round(incremental_s, 2),
        recovery_s=round(recovery_s, 2),
        verify_s=round(verify_s, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--keys", type=int, default=2000, help="keys per push")
    parser.add_argument(
        "--directory", type=Path, help="existing folder; snapshots are written to a temporary folder in it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    arguments = parser.parse_args()
    for consistency in (Eventual(), Sequential()):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            result = measure(consistency, arguments.rows, arguments.dim, arguments.keys, Path(folder))
        if arguments.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            print("\n".join(f"{name:24} {value}" for name, value in asdict(result).items()) + "\n", flush=True)


if __name__ == "__main__":
    main()

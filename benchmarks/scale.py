"""Measure a server's table of 10^8 features: memory, rates, pauses, snapshot and recovery.

    python benchmarks/scale.py [--rows 100000000] [--memory-limit 1G --spill-dir DIR] [--directory DIR] [--json]

One server process and one client run. The client pushes 100,000 keys at a time (FTRL, dim 1) and waits for each push.
The program prints ten lines, each after a tenth of the rows:

- the growth of the server's resident memory per row, and its ratio to the 20 bytes of key, value and state. It does not
include the pages of mapped files; *file* shows them.
- new keys per second, and known keys per second. Known keys are random keys that already have a row; 3 million of them
are pushed, and 3 million are pulled.
- the median and the longest push of new keys since the last line. Buckets grow in these pushes.

Then the program takes a snapshot, and loads it into a new cluster with verified checksums.

If --memory-limit is given, the server stores the rows above this limit in files. The columns of known keys show how
much slower this is. The result is meaningful only if memory is short. So run the program with about 400 MB more than
the limit, for example with ``systemd-run --scope -p MemoryMax=1400M``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from paceline import MemoryLimit
from paceline.launch.local import LocalCluster
from paceline.ps import FTRL, Client, SparseTable
from paceline.ps.client.snapshot_loading import load_snapshot
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.storage.snapshot_directory import read_newest

BARE_BYTES = 8 + 3 * 4
KEYS = 100_000
NUM_LINES = 10
NUM_KNOWN = 30  # for each line: pushes and pulls of keys that already have a row
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Line:
    rows: int
    bytes_per_row: float
    ratio: float
    file_megabytes: int
    new_per_s: int
    known_per_s: int
    pulled_per_s: int
    median_ms: float
    longest_ms: float


@dataclass(frozen=True, kw_only=True)
class Ending:
    rows: int
    snapshot_s: float
    snapshot_megabytes: int
    longest_push_meanwhile_ms: float
    recovery_s: float
    recovered_rows: int


def keys_of(numbers: np.ndarray) -> np.ndarray:
    """Return different keys for different feature numbers."""
    return (numbers.astype(np.uint64) + np.uint64(1)) * _ODD


def resident(server: psutil.Process) -> tuple[int, int]:
    """Return a process's resident bytes: those of its own memory, and those of mapped files."""
    found = server.memory_info()
    return found.rss - found.shared, found.shared


def push(table: SparseTable, keys: np.ndarray, grads: np.ndarray) -> float:
    start = time.perf_counter()
    table.push(keys, grads[: len(keys)], assume_unique=True).wait()
    return time.perf_counter() - start


def fill(table: SparseTable, server: psutil.Process, first: int, rows: int, before: tuple[int, int]) -> Line:
    """Push new keys for features `first` to `rows`, then push and pull known keys. Return the measurements."""
    random = np.random.default_rng(first)
    grads = random.standard_normal((KEYS, 1), np.float32)
    times = [push(table, keys_of(np.arange(at, min(at + KEYS, rows))), grads) for at in range(first, rows, KEYS)]
    own, mapped = resident(server)
    known, pulled, size = 0.0, 0.0, min(KEYS, rows)
    for _ in range(NUM_KNOWN):
        known += push(table, np.unique(keys_of(random.integers(0, rows, size))), grads)
        known_keys = np.unique(keys_of(random.integers(0, rows, size)))
        start = time.perf_counter()
        table.pull(known_keys, assume_unique=True)
        pulled += time.perf_counter() - start
    return Line(
        rows=rows,
        bytes_per_row=round((own - before[0]) / rows, 1),
        ratio=round((own - before[0]) / rows / BARE_BYTES, 2),
        file_megabytes=round((mapped - before[1]) / 1e6),
        new_per_s=round((rows - first) / sum(times)),
        known_per_s=round(NUM_KNOWN * size / known),
        pulled_per_s=round(NUM_KNOWN * size / pulled),
        median_ms=round(1e3 * float(np.median(times)), 1),
        longest_ms=round(1e3 * max(times), 1),
    )


def snapshot(client: Client, table: SparseTable, rows: int, directory: Path) -> tuple[float, float]:
    """Take a snapshot during pushes of known keys. Return its seconds and those of the longest push."""
    random = np.random.default_rng(1)
    grads = np.full((KEYS, 1), 0.5, np.float32)
    coordinator, times = SnapshotCoordinator(client, directory), [0.0]
    start = time.perf_counter()
    coordinator.begin()
    while coordinator.poll() is None:
        times.append(push(table, np.unique(keys_of(random.integers(0, rows, min(2000, rows)))), grads))
        time.sleep(0.005)
    return time.perf_counter() - start, max(times)


def measure(rows: int, limit: MemoryLimit | None, directory: Path, as_json: bool) -> None:
    with (
        LocalCluster.start(memory_limit=limit) as cluster,
        cluster.connect() as client,
        cluster.connect(observer=True) as observer,
    ):
        table = client.sparse_table("weights", dim=1, update=FTRL(alpha=0.05, l1=0.1))
        server = psutil.Process(cluster.pids("server")[0])
        push(table, keys_of(np.arange(1)), np.ones((1, 1), np.float32))
        before, steps = resident(server), [rows * (number + 1) // NUM_LINES for number in range(NUM_LINES)]
        for first, last in zip([0, *steps], steps, strict=False):
            print_line(fill(table, server, first, last, before), as_json=as_json)
        seconds, longest_s = snapshot(observer, table, rows, directory)
        written = sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
    with (
        LocalCluster.start(memory_limit=limit) as cluster,
        cluster.connect(observer=True) as client,
    ):
        start = time.perf_counter()
        load_snapshot(client, read_newest(directory))
        recovery_s = time.perf_counter() - start
        found = client.statistics()[0].tables["weights"].rows
    ending = Ending(
        rows=rows,
        snapshot_s=round(seconds, 1),
        snapshot_megabytes=round(written / 1e6),
        longest_push_meanwhile_ms=round(1e3 * longest_s, 1),
        recovery_s=round(recovery_s, 1),
        recovered_rows=found,
    )
    print(json.dumps(asdict(ending)) if as_json else "\n".join(f"{k:26} {v}" for k, v in asdict(ending).items()))


def print_line(line: Line, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(line)), flush=True)
    else:
        print(
            f"{line.rows:>11,} {line.bytes_per_row:>9.1f} {line.ratio:>6.2f} {line.file_megabytes:>8} "
            f"{line.new_per_s:>11,} {line.known_per_s:>11,} {line.pulled_per_s:>11,} {line.median_ms:>9.1f} "
            f"{line.longest_ms:>10.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--memory-limit", help="memory for rows, as 512M or 8G; further rows are stored in files")
    parser.add_argument("--spill-dir", type=Path, help="folder of the files with further rows")
    parser.add_argument(
        "--directory", type=Path, help="existing folder; the snapshot is written to a temporary folder in it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    arguments = parser.parse_args()
    limit = MemoryLimit.parse(arguments.memory_limit, arguments.spill_dir)
    if not arguments.json:
        print(f"load {os.getloadavg()[0]:.1f}, {psutil.virtual_memory().available / 1e9:.1f} GB of memory available")
        print(
            f"{'rows':>11} {'bytes/row':>9} {'ratio':>6} {'file MB':>8} {'new/s':>11} {'known/s':>11} "
            f"{'pulled/s':>11} {'median ms':>9} {'longest ms':>10}"
        )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        measure(arguments.rows, limit, Path(folder), arguments.json)


if __name__ == "__main__":
    main()

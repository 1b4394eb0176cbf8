"""Measure the memory of a sparse row, and the delay of a push while buckets grow.

    python benchmarks/memory.py [--rows 10000000] [--keys 10000] [--json]

Each table is filled in a new process, with the memory settings of a local cluster's servers. Each push has new random
keys. Memory for them is reserved before the push. Bytes per row are the growth of the process's resident memory,
divided by the number of rows. The next column is the size of only key, value and state. The last columns show the
longest push, and the longest time that a push spent on growing buckets. The network is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import psutil

from paceline.launch.fork_server import MALLOC
from paceline.ps import FTRL, SGD, Adagrad, SparseStore, UpdateRule
from paceline.tables.compile import compile_kernels

CASES: dict[str, tuple[int, UpdateRule]] = {
    "sgd 1": (1, SGD(lr=0.1)),
    "ftrl 1": (1, FTRL(alpha=0.05, l1=0.1)),
    "adagrad 16": (16, Adagrad(lr=0.1)),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    update: str
    dim: int
    rows: int
    bytes_per_row: float
    bare_bytes: int
    ratio: float
    seconds: float
    keys_per_push: int
    median_ms: float
    longest_ms: float
    longest_growth_ms: float
    longest_growth_at_rows: int


class TimedStore(SparseStore):
    """A store that measures the time of its growth."""

    growth_s = 0.0

    def resize(self, bucket: int, limit: int, **options: int) -> None:
        start = time.perf_counter()
        super().resize(bucket, limit, **options)
        self.growth_s += time.perf_counter() - start


def measure(case: str, rows: int, keys_per_push: int) -> Result:
    """Fill a table in this process and return the measurements."""
    dim, rule = CASES[case]
    compile_kernels()
    random = np.random.default_rng(0)
    grads = np.full(keys_per_push * dim, 0.5, np.float32)
    warm = SparseStore(dim=dim, rule=rule)
    warm.push(random.integers(0, 2**64, keys_per_push, dtype=np.uint64), grads)
    del warm
    process = psutil.Process()
    before = process.memory_info().rss
    store = TimedStore(dim=dim, rule=rule)
    pushes: list[tuple[float, float, int]] = []
    while len(store) < rows:
        keys = random.integers(0, 2**64, min(keys_per_push, rows - len(store)), dtype=np.uint64)
        store.growth_s = 0.0
        start = time.perf_counter()
        store.reserve(keys)
        store.push(keys, grads[: len(keys) * dim])
        pushes.append((time.perf_counter() - start, store.growth_s, len(store)))
    resident = (process.memory_info().rss - before) / len(store)
    bare = 8 + 4 * dim * (1 + rule.num_states)
    growth_s, at_rows = max((growth_s, at_rows) for _, growth_s, at_rows in pushes)
    times = np.array([push_s for push_s, _, _ in pushes])
    return Result(
        update=case.split()[0],
        dim=dim,
        rows=len(store),
        bytes_per_row=round(resident, 1),
        bare_bytes=bare,
        ratio=round(resident / bare, 2),
        seconds=round(float(times.sum()), 2),
        keys_per_push=keys_per_push,
        median_ms=round(1e3 * float(np.median(times)), 2),
        longest_ms=round(1e3 * float(times.max()), 2),
        longest_growth_ms=round(1e3 * growth_s, 2),
        longest_growth_at_rows=at_rows,
    )


def measure_in_fresh_process(case: str, rows: int, keys_per_push: int) -> Result:
    """Call :func:`measure` in a new process."""
    command = [sys.executable, __file__, "--rows", str(rows), "--keys", str(keys_per_push), "--case", case]
    done = subprocess.run(command, env={**MALLOC, **os.environ}, stdout=subprocess.PIPE, text=True, check=True)
    return Result(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows to fill a table with")
    parser.add_argument("--keys", type=int, default=10_000, help="keys per push")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(asdict(measure(arguments.case, arguments.rows, arguments.keys))))
        return
    if not arguments.json:
        print(
            f"{'update':8} {'dim':>4} {'bytes/row':>10} {'bare':>5} {'ratio':>6} {'median ms':>10} {'longest ms':>11} "
            f"{'most growth ms':>15}"
        )
    for case in CASES:
        result = measure_in_fresh_process(case, arguments.rows, arguments.keys)
        if arguments.json:
            print(json.dumps(asdict(result)), flush=True)
            continue
        print(
            f"{result.update:8} {result.dim:4} {result.bytes_per_row:10.1f} {result.bare_bytes:5} {result.ratio:6.2f} "
            f"{result.median_ms:10.2f} {result.longest_ms:11.2f} {result.longest_growth_ms:15.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

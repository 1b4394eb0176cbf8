"""Measure the cost of a replica, and the delay of workers while a server joins.

``python benchmarks/replication.py`` has two parts. The first part measures pushes (until their acknowledgement) and
pulls, in turns without and with a replica. It prints the median times on two servers, for rows of dim 16 with Adagrad.
In the second part a third server joins a cluster with 10^6 rows while a worker pushes and pulls. This part prints the
worker's rate before and during the move, the longest request, and the number of moved buckets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table as Grid

import paceline
from paceline.ps import Client, SparseTable, messages

DIM = 16
ROWS = 1_000_000
TURNS = 3
WARM = 5
"""The number of requests at the start of each turn that are not measured."""


def open_rows(client: Client) -> SparseTable:
    """Declare the table."""
    return client.sparse_table("rows", dim=DIM, update=paceline.Adagrad(lr=0.1))


def fill(table: SparseTable) -> None:
    """Create all rows."""
    for start in range(0, ROWS, 100_000):
        keys = np.arange(start, start + 100_000, dtype=np.uint64)
        table.push(keys, np.ones((100_000, DIM), np.float32), assume_unique=True).wait()


def cost(rounds: int) -> None:
    """Print the medians with and without a replica."""
    grid = Grid("work", "keys", "one copy µs", "with a replica µs", "ratio")
    with (
        paceline.local_cluster(servers=2) as one,
        paceline.local_cluster(servers=2, replicas=1) as two,
        one.connect(observer=True) as first,
        two.connect(observer=True) as second,
    ):
        tables = [open_rows(first), open_rows(second)]
        for table in tables:
            fill(table)
        random = np.random.default_rng(1)
        for count in (1, 100, 1_000, 10_000, 100_000):
            keys = random.choice(ROWS, count, replace=False).astype(np.uint64)
            grads = np.ones((count, DIM), np.float32)
            times: dict[str, list[list[float]]] = {"push": [[], []], "pull": [[], []]}
            num_requests = max(rounds // max(1, count // 1_000), 15)
            for which in range(2 * TURNS):
                table = tables[which % 2]
                times["push"][which % 2] += [timed(push, table, keys, grads) for _ in range(num_requests)][WARM:]
                times["pull"][which % 2] += [timed(pull, table, keys) for _ in range(num_requests)][WARM:]
            for work, (alone, copied) in times.items():
                a, b = statistics.median(alone) * 1e6, statistics.median(copied) * 1e6
                grid.add_row(work, f"{count:,}", f"{a:,.1f}", f"{b:,.1f}", f"{b / a:.2f}")
    Console().print(grid)


def push(table: SparseTable, keys: npt.NDArray[np.uint64], grads: npt.NDArray[np.float32]) -> None:
    """Push, and wait for the acknowledgement of the whole chain."""
    table.push(keys, grads, assume_unique=True).wait()


def pull(table: SparseTable, keys: npt.NDArray[np.uint64]) -> None:
    table.pull(keys, assume_unique=True)


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def work(client: Client, seconds: float, servers: int | None = None) -> tuple[float, float]:
    """Push and pull for `seconds`, or until `servers` servers are primaries.

    Returns the rounds per second and the longest round in seconds.
    """
    table = open_rows(client)
    random, began, rounds, longest = np.random.default_rng(2), time.perf_counter(), 0, 0.0
    while time.perf_counter() - began < seconds:
        keys = random.choice(ROWS, 2_000, replace=False).astype(np.uint64)
        start = time.perf_counter()
        table.push(keys, np.ones((2_000, DIM), np.float32), assume_unique=True)
        table.pull(keys, assume_unique=True)
        longest = max(longest, time.perf_counter() - start)
        rounds += 1
        if servers is not None and is_balanced(client, servers):
            break
    return rounds / (time.perf_counter() - began), longest


def is_balanced(client: Client, servers: int) -> bool:
    """Return whether `servers` servers are primaries and no bucket moves."""
    cluster = client.link.view
    assert cluster is not None
    leaders = {group.members[0] for group in cluster.groups}
    return len(leaders) == servers and all(group.filling is None for group in cluster.groups)


def join() -> None:
    """Print the cost of a join."""
    with paceline.local_cluster(servers=2) as cluster, cluster.connect(observer=True) as client:
        fill(open_rows(client))
        before: messages.View = client.link.get_view()
        rate, _ = work(client, 3.0)
        server = subprocess.Popen(
            [sys.executable, "-m", "paceline", "server", "--join", "--scheduler", cluster.scheduler.split("//")[-1]],
            env={**os.environ, "PACELINE_TOKEN": cluster.token},
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        server.stdout.readline()
        began = time.perf_counter()
        during, longest = work(client, 60.0, servers=3)
        took = time.perf_counter() - began
        after: messages.View = client.link.get_view()
        were = {group.members[0]: group.buckets for group in before.groups}
        stay = sum((were.get(group.members[0], 0) & group.buckets).bit_count() for group in after.groups)
        print(
            f"a third server joins {ROWS:,} rows of dim {DIM}: {512 - stay} of 512 buckets moved in {took:.1f} s; "
            f"rounds of a push and a pull of 2,000 keys: {rate:.0f}/s before, {during:.0f}/s meanwhile, the longest "
            f"{longest * 1e3:.0f} ms"
        )
    server.wait()


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    cost(parser.parse_args().rounds)
    join()


if __name__ == "__main__":
    main()

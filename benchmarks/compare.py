"""Compare source trees by the time of a push and of a pull, in clusters that run at the same time.

    python benchmarks/compare.py old=../paceline-before new=. [--keys 1 1000] [--dims 1 16] [--replicas 0 1]
                                 [--servers 2] [--work push pull] [--blocks 40] [--seconds 0.05] [--json]

A tree is a checkout (or its `src`). If you pass one tree under two names, the ratios show the noise. The clusters of
all trees run at the same time, but only one of them works at any moment. In turn, each cluster handles a block of
requests; then all do so in the opposite order. Other programs on the machine therefore slow all trees equally. So
ratios are reliable even if times are not.

The table has the median time of each tree, and two ratios to the first tree: the median over blocks of the ratio of
medians, and of the ratio of the fastest tenths. It also has the processor time and the number of sleeps per request,
for the client and for all servers. A waiting thread may poll for the reply instead of sleeping. This takes processor
time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROWS = 200_000
MAX_DRAWN_KEYS = 100_000
"""This number of keys is drawn in advance, so that small requests have different keys."""
WARM = 3
"""The number of requests at the start of each block that are not measured."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The mean cost of a request in a block. Times are in microseconds."""

    median: float
    fastest_tenth: float
    client_cpu: float
    client_sleeps: float
    servers_cpu: float
    servers_sleeps: float


class Tree:
    """A child process that imports one source tree and runs a cluster and a client."""

    def __init__(self, name: str, path: Path, servers: int, replicas: int, dims: list[int]) -> None:
        self.name = name
        source = path / "src" if (path / "src").is_dir() else path
        command = [sys.executable, __file__, "--child", *map(str, (servers, replicas, *dims))]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        used = Path(self._read())
        if source.resolve() not in used.parents:
            sys.exit(f"compare.py: {name}: expected paceline in {source}, but Python imported {used}")

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"compare.py: {self.name} has failed; see its output above")
        return json.loads(line)

    def measure(self, work: str, keys: int, dim: int, seconds: float) -> Block:
        """Run one block of requests in the child process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([work, keys, dim, seconds]) + "\n")
        self._process.stdin.flush()
        return Block(**self._read())

    def close(self) -> None:
        """End the child process and its cluster."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def compare(trees: list[Tree], options: argparse.Namespace, replicas: int) -> list[dict[str, Any]]:
    """Measure all trees in turns. Print the results of each kind of request."""
    results = []
    for dim in options.dims:
        for keys in options.keys:
            for work in options.work:
                blocks: dict[str, list[Block]] = {tree.name: [] for tree in trees}
                for number in range(options.blocks):
                    for tree in trees if number % 2 else trees[::-1]:
                        blocks[tree.name].append(tree.measure(work, keys, dim, options.seconds))
                case = {"work": work, "keys": keys, "dim": dim, "replicas": replicas}
                results.append(summarize(case, blocks))
                if not options.json:
                    print(line_of(results[-1]), flush=True)
    return results


def summarize(case: dict[str, Any], blocks: dict[str, list[Block]]) -> dict[str, Any]:
    """Return each tree's medians, and its ratios to the first tree."""
    first = next(iter(blocks.values()))
    trees = {}
    for name, own in blocks.items():
        rows = [asdict(block) for block in own]
        medians = {field: statistics.median(row[field] for row in rows) for field in rows[0]}
        pairs = list(zip(own, first, strict=True))
        medians["ratio"] = statistics.median(block.median / base.median for block, base in pairs)
        medians["fastest_ratio"] = statistics.median(block.fastest_tenth / base.fastest_tenth for block, base in pairs)
        trees[name] = {field: round(value, 3) for field, value in medians.items()}
    return {**case, "trees": trees}


def line_of(result: dict[str, Any]) -> str:
    """Return a result as the lines of a table."""
    heading = f"{result['work']:5} {result['keys']:>7,} {result['dim']:>4} {result['replicas']:>8}"
    lines = []
    for name, tree in result["trees"].items():
        lines.append(
            f"{heading}  {name:8} {tree['median']:>9,.1f} {tree['ratio']:>6.2f} {tree['fastest_ratio']:>8.2f} "
            f"{tree['client_cpu']:>11,.0f} {tree['client_sleeps']:>7.2f} {tree['servers_cpu']:>11,.0f} "
            f"{tree['servers_sleeps']:>7.2f}"
        )
        heading = " " * len(heading)
    return "\n".join(lines)


HEADING = (
    f"{'work':5} {'keys':>7} {'dim':>4} {'replicas':>8}  {'tree':8} {'median µs':>9} {'ratio':>6} {'fastest':>8} "
    f"{'client µs':>11} {'sleeps':>7} {'servers µs':>11} {'sleeps':>7}"
)


# Code of the child process.


def serve(servers: int, replicas: int, dims: list[int]) -> None:
    """Start a source tree's cluster and run the requested measurements until standard input ends."""
    import numpy as np
    import psutil

    import paceline

    print(json.dumps(paceline.__file__), flush=True)
    random = np.random.default_rng(0)
    all_keys = np.arange(ROWS, dtype=np.uint64) * np.uint64(7919)
    with (
        paceline.local_cluster(servers=servers, replicas=replicas) as cluster,
        cluster.connect(observer=True) as client,
    ):
        tables = {dim: client.sparse_table(f"of{dim}", dim=dim, update=paceline.SGD(lr=0.01)) for dim in dims}
        for dim, table in tables.items():
            table.push(all_keys, np.ones((ROWS, dim), np.float32)).wait()
        client_process, server_processes = psutil.Process(), [psutil.Process(pid) for pid in cluster.pids("server")]
        batches: dict[int, list[Any]] = {}
        for line in sys.stdin:
            work, count, dim, seconds = json.loads(line)
            if count not in batches:
                num_batches = min(max(8, MAX_DRAWN_KEYS // count), 1_000)
                batches[count] = [all_keys[random.choice(ROWS, count, replace=False)] for _ in range(num_batches)]
            request = requests(tables[dim], work, np.ones((count, dim), np.float32))
            print(
                json.dumps(asdict(measure_block(request, batches[count], seconds, client_process, server_processes))),
                flush=True,
            )


def requests(table: Any, work: str, grads: Any) -> Callable[[Any], Any]:
    """Return a function that makes one request and waits for its reply."""
    if work == "pull":
        return lambda keys: table.pull(keys)
    if work == "push":
        return lambda keys: table.push(keys, grads).wait()
    return lambda keys: table.push_pull(keys, grads)


def measure_block(
    request: Callable[[Any], Any], batches: list[Any], seconds: float, client: Any, servers: list[Any]
) -> Block:
    """Make requests for `seconds`, and return their cost."""
    for number in range(WARM):
        request(batches[number % len(batches)])
    before = usage([client]), usage(servers)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < WARM or time.perf_counter() < end:
        keys = batches[len(times) % len(batches)]
        start = time.perf_counter()
        request(keys)
        times.append(time.perf_counter() - start)
    after = usage([client]), usage(servers)
    counts = [(end_count - start_count) / len(times) for counts_before, counts_after in zip(before, after, strict=True)
              for start_count, end_count in zip(counts_before, counts_after, strict=True)]  # fmt: skip
    times.sort()
    return Block(
        median=times[len(times) // 2] * 1e6,
        fastest_tenth=times[len(times) // 10] * 1e6,
        client_cpu=counts[0] * 1e6,
        client_sleeps=counts[1],
        servers_cpu=counts[2] * 1e6,
        servers_sleeps=counts[3],
    )


def usage(processes: list[Any]) -> tuple[float, int]:
    """Return the processor time in seconds, and the number of sleeps, of some processes."""
    seconds, sleeps = 0.0, 0
    for process in processes:
        times = process.cpu_times()
        seconds += times.user + times.system
        sleeps += process.num_ctx_switches().voluntary
    return seconds, sleeps


def main() -> None:
    """Compare the trees, or run the child process of one tree."""
    if sys.argv[1:2] == ["--child"]:
        servers, replicas, *dims = map(int, sys.argv[2:])
        serve(servers, replicas, dims)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 1_000, 10_000])
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--replicas", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--servers", type=int, default=1, help="servers of each cluster; at least one more than --replicas"
    )
    parser.add_argument("--work", nargs="+", choices=("push", "pull", "push_pull"), default=["push", "pull"])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.05, help="duration of a block")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    paths = dict(tree.partition("=")[::2] for tree in options.trees)
    if not all(paths.values()) or len(paths) < len(options.trees):
        parser.error("expected NAME=PATH for every tree, with different names")
    if not all(0 < keys <= ROWS for keys in options.keys) or options.blocks < 1:
        parser.error(f"expected 1 to {ROWS} keys, and at least 1 block")
    if not options.json:
        print(HEADING)
    results = []
    for replicas in options.replicas:
        trees: list[Tree] = []
        try:
            servers = max(options.servers, 1 + replicas)
            trees += [Tree(name, Path(path), servers, replicas, options.dims) for name, path in paths.items()]
            results += compare(trees, options, replicas)
        finally:
            for tree in trees:
                tree.close()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

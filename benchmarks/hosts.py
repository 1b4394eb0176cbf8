"""Measure all-reduce between hosts, and compare the times with the model's predictions.

    sudo python benchmarks/hosts.py [--mbit 200] [--bytes 8000000] [--hosts 2 4 8]

The hosts are network namespaces. Each host has a full-duplex link to one switch (a bridge), which ``tc`` limits in both
directions. Each algorithm, and Gloo if torch is installed, runs the same all-reduce on the same links in turns. The
α-β-γ model, with constants that the group measured on these links, makes the prediction. The last column is the ratio
to the lowest possible time of p ranks that send equally much: 2 (p - 1) / p n / B, for n bytes and B bytes/s. Needs
root, iproute2 and the kernel's tbf.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

ALGORITHMS = ("ring", "halving-doubling", "recursive-doubling", "double-binary-tree", "central")
NETWORK = "10.203.7"
MAX_HOSTS = 64
ROUNDS = 5
LARGEST_PACKET = 16_000
_NETWORKS = itertools.count()


def ip(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(num_hosts: int, rate: str) -> Iterator[list[str]]:
    """Create hosts, a switch, and links of the speed `rate` (``100Mbit``). Yield the names of the namespaces.

    At the end, also after SIGINT and SIGTERM, the processes on the hosts are killed and the hosts are removed.
    """
    tag = f"pl{os.getpid() % 10000}n{next(_NETWORKS)}"  # the kernel deletes namespaces in the background
    names = [f"{tag}h{number}" for number in range(num_hosts)]
    limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
    handlers = {number: signal.signal(number, exit_at) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ip("ip", "link", "add", f"{tag}br", "type", "bridge")
        ip("ip", "link", "set", f"{tag}br", "up")
        for number, name in enumerate(names):
            inside, outside = f"{tag}i{number}", f"{tag}o{number}"
            ip("ip", "netns", "add", name)
            ip("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            ip("ip", "link", "set", inside, "netns", name)
            ip("ip", "link", "set", outside, "master", f"{tag}br", "up")
            ip("ip", "-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", inside)
            ip("ip", "-n", name, "link", "set", inside, "up")
            ip("ip", "-n", name, "link", "set", "lo", "up")
            # tbf would divide larger packets into frames, which takes more processor time than 1 Gbit/s leaves.
            for where, device in (((), outside), (("-n", name), inside)):
                ip("ip", *where, "link", "set", device, "gso_max_size", LARGEST_PACKET)
            ip("tc", "qdisc", "add", "dev", outside, *limit)
            ip("tc", "-n", name, "qdisc", "add", "dev", inside, *limit)
        yield names
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        for name in names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{tag}br"], capture_output=True, check=False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def exit_at(number: int, _: object) -> None:
    """Handle a signal."""
    sys.exit(128 + number)


def run_rank(rank: int, size: int, num_bytes: int) -> None:
    """Run one rank. Rank 0 prints the results as one JSON object."""
    import numpy as np

    from paceline import collectives

    array = np.ones(num_bytes // 4, np.float32)
    free = collectives.init(rank, size, address=f"{NETWORK}.1:29400", timeout=timedelta(minutes=2))
    groups = {
        name: collectives.init(
            rank, size, address=f"{NETWORK}.1:{29401 + number}", algorithm=name, timeout=timedelta(minutes=2)
        )
        for number, name in enumerate(ALGORITHMS)
    }
    runs: dict[str, Any] = {
        name: lambda group=group: group.all_reduce(array, out=array) for name, group in groups.items()
    }
    runs["chosen"] = lambda: free.all_reduce(array, out=array)
    with contextlib.suppress(ImportError):
        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["INTERFACE"]
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            f"{NETWORK}.1", 29500, size, rank == 0
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        tensor = torch.ones(num_bytes // 4)
        runs["gloo"] = lambda: dist.all_reduce(tensor)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            array[:] = 1
            free.barrier()
            start = time.perf_counter()
            run()
            free.barrier()
            if number:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        found = {name: predicted for name, predicted, _ in free.candidates(num_bytes)}
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        print(json.dumps({"ranks": size, "measured": medians, "predicted": found, "explain": free.explain(num_bytes)}))
    free.barrier()


def measure(num_hosts: int, mbit: int, num_bytes: int) -> dict[str, Any]:
    """Run one rank per host. Return the JSON object of rank 0."""
    with network(num_hosts, f"{mbit}Mbit") as names:
        tag = names[0][:-2]
        processes = []
        for rank, name in enumerate(names):
            own = {
                **os.environ,
                "PACELINE_TOKEN": "token of the hosts",
                "INTERFACE": f"{tag}i{rank}",
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", name, sys.executable, __file__]
            options = ["--rank", str(rank), "--size", str(num_hosts), "--bytes", str(num_bytes)]
            processes.append(subprocess.Popen([*command, *options], env=own, stdout=subprocess.PIPE, text=True))
        try:
            output = processes[0].communicate(timeout=300)[0]
            if processes[0].returncode:
                sys.exit(f"hosts.py: rank 0 of {num_hosts} failed; see its output above")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result


def show(results: list[dict[str, Any]], mbit: int, num_bytes: int) -> None:
    """Print the table."""
    print(f"all_reduce of {num_bytes / 1e6:g} MB between hosts with links of {mbit} Mbit/s; medians of {ROUNDS}")
    print(f"{'hosts':>5}  {'algorithm':<20}{'measured':>10}{'predicted':>11}{'error':>8}{'of limit':>10}")
    for result in results:
        size = result["ranks"]
        limit = 2 * (size - 1) / size * num_bytes * 8 / (mbit * 1e6)
        for name, seconds in result["measured"].items():
            predicted = result["predicted"].get(name)
            prediction = (
                "" if predicted is None else f"{predicted * 1e3:>8.0f} ms{(predicted / seconds - 1) * 100:>+7.0f}%"
            )
            print(f"{size:>5}  {name:<20}{seconds * 1e3:>7.0f} ms{prediction:>19}{seconds / limit:>9.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=8_000_000)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.size, options.bytes)
        return
    if min(options.hosts) < 2 or options.mbit < 1 or options.bytes < 4:
        parser.error("expected at least 2 hosts, 1 Mbit/s and 4 bytes")
    if max(options.hosts) > MAX_HOSTS:
        parser.error(f"expected at most {MAX_HOSTS} hosts")
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc")):
        sys.exit("hosts.py: network namespaces need root, and ip and tc of iproute2")
    results = [measure(number, options.mbit, options.bytes) for number in options.hosts]
    if options.json:
        for result in results:
            print(json.dumps(result))
    else:
        show(results, options.mbit, options.bytes)
        print(results[-1]["explain"])


if __name__ == "__main__":
    main()

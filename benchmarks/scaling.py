"""Measure the step of a training between hosts, and compare it with the limit of the wire.

    sudo python benchmarks/scaling.py [--mbit 100] [--hosts 1 2 4] [--megabytes 4] [--steps 10] [--json]
                                      [--strategies all-reduce parameter-server hybrid sharded]

The hosts are network namespaces, like those of ``hosts.py``. Each host runs one rank with ``paceline run``, and, for
strategies with servers, one server. The model is a perceptron with `megabytes` of parameters and one row per step,
so that the network takes almost all of the time. The limit is the time that a host's link needs for the bytes that the
host must send. With p hosts, n bytes of parameters and B bytes/s, the limit is 2 (p - 1) / p n / B for all-reduce. It
is the same for parameter servers: a rank sends gradients to the p - 1 other servers, and a server sends parameters to
the p - 1 other ranks. ``sharded`` gathers the parameters twice and reduces the gradients once: 3 (p - 1) / p n / B.
Needs root, iproute2 and the kernel's tbf.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hosts import NETWORK, network  # type: ignore[import-not-found]  # a module of this folder

STRATEGIES = ("all-reduce", "parameter-server", "hybrid", "sharded")
WITH_SERVERS = ("parameter-server", "hybrid")
WIDTH = 256
WARM_UP = 2


def run_rank(megabytes: float, steps: int, report: Path) -> None:
    """Train with the strategy of ``paceline run``. Rank 0 writes the seconds of each step."""
    import torch
    from torch import nn

    import paceline.torch as pt

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = max(round(megabytes * 1e6 / (4 * WIDTH * WIDTH)), 1)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    strategy = pt.strategy()
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    inputs = torch.randn(1, WIDTH)
    seconds = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    if strategy.rank == 0:
        num_bytes = 4 * layers * WIDTH * WIDTH
        report.write_text(json.dumps({"bytes": num_bytes, "seconds": seconds[WARM_UP:]}))


def measure(strategy: str, num_hosts: int, mbit: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train on hosts. Return the median seconds of a step, and the limit of the wire."""
    with tempfile.TemporaryDirectory() as folder, network(num_hosts, f"{mbit}Mbit") as names:
        report = Path(folder, "report.json")
        words = ["--strategy", strategy, "--nproc-per-node", 1]
        words += ["--servers", num_hosts] if strategy in WITH_SERVERS else []
        script = [__file__, "--report", report, "--megabytes", options.megabytes, "--steps", options.steps]
        environment = {**os.environ, "PACELINE_TOKEN": "token of the benchmark's hosts"}
        launchers = []
        for node, name in enumerate(names):
            command: list[Any] = ["ip", "netns", "exec", name, sys.executable, "-m", "paceline", "run"]
            if num_hosts > 1:
                command += ["--nnodes", num_hosts, "--node-rank", node, "--master-addr", f"{NETWORK}.1"]
            launchers.append(subprocess.Popen(list(map(str, [*command, *words, *script])), env=environment))
        try:
            statuses = [launcher.wait(600) for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
        if any(statuses):
            sys.exit(f"scaling.py: {strategy} on {num_hosts} hosts failed; see the output above")
        result = json.loads(report.read_text())
    rounds = 3 if strategy == "sharded" else 2
    limit_s = rounds * (num_hosts - 1) / num_hosts * result["bytes"] * 8 / (mbit * 1e6)
    return {
        "strategy": strategy,
        "hosts": num_hosts,
        "mbit": mbit,
        "bytes": result["bytes"],
        "step_s": statistics.median(result["seconds"]),
        "limit_s": limit_s,
    }


def show(result: dict[str, Any]) -> None:
    """Print a row of the table."""
    ratio = f"{result['step_s'] / result['limit_s']:9.2f}x" if result["limit_s"] else ""
    times = f"{1e3 * result['step_s']:8.0f} ms{1e3 * result['limit_s']:8.0f} ms"
    print(f"{result['strategy']:<18}{result['hosts']:>5}{result['mbit']:>7}{times}{ratio}", flush=True)


def main() -> None:
    """Measure all strategies, speeds and numbers of hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[100])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report is not None:
        run_rank(options.megabytes, options.steps, options.report)
        return
    if not options.json:
        print(f"a step with {options.megabytes:g} MB of parameters; medians of {options.steps} steps")
        print(f"{'strategy':<18}{'hosts':>5}{'Mbit/s':>7}{'step':>11}{'limit':>11}{'of limit':>10}")
    for mbit in options.mbit:
        for strategy in options.strategies:
            for num_hosts in options.hosts:
                result = measure(strategy, num_hosts, mbit, options)
                print(json.dumps(result), flush=True) if options.json else show(result)


if __name__ == "__main__":
    main()

"""Measure how long a training between hosts pauses when a rank, a host or a server is lost.

    sudo python benchmarks/host_faults.py [--mbit 1000 100] [--hosts 3] [--kills 3] [--strategies all-reduce ...]

The hosts are network namespaces, like those of ``hosts.py``. Each host runs one rank with ``paceline run``, and, for
strategies with servers, one server. The model has 0.5 MB of parameters, and a step sleeps for 20 ms. The program prints
the median of the time from a fault to the end of the first host's next step, and the smallest and the largest value:

- killed rank: SIGKILL of the last host's rank, with ``--min-ranks 1``. The launcher of that host replaces the rank;
- joining rank: the longest step of the first host while the replacement joins, minus its median step;
- lost host: the last host's link is cut, with ``--min-ranks 1 --heartbeat-timeout 2``;
- killed server: SIGKILL of the last host's server, with ``--replicas 1``.

Needs root, iproute2 and the kernel's tbf.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from hosts import NETWORK, ip, network  # type: ignore[import-not-found]  # a module of this folder

STRATEGIES = ("all-reduce", "hybrid", "parameter-server")
WITH_SERVERS = ("hybrid", "parameter-server")
WIDTH = 256
SLEEP_S = 0.02
HEARTBEAT_S = 2
PATIENCE_S = 120.0
USUAL_STEPS = 40


def run_rank(folder: Path) -> None:
    """Train until the launcher ends. Write the end of each step, and the number of ranks, to a file."""
    import torch
    from torch import nn

    import paceline.torch as pt

    torch.set_num_threads(1)
    torch.manual_seed(1)
    strategy = pt.strategy()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    data = torch.utils.data.TensorDataset(torch.randn(1, WIDTH).expand(1 << 16, WIDTH))
    loader = torch.utils.data.DataLoader(data, batch_size=1)
    model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    with open(folder / f"{os.environ['HOST']} {os.getpid()}", "w", buffering=1) as log:
        for (inputs,) in loader:
            time.sleep(SLEEP_S)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            log.write(f"{time.monotonic()} {strategy.world_size}\n")


class Training:
    """A training between hosts."""

    def __init__(self, names: Sequence[str], folder: Path, options: Sequence[str]) -> None:
        self.folder = folder
        self.launchers = []
        for node, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "paceline", "run", "--nproc-per-node", "1"]
            command += ["--nnodes", str(len(names)), "--node-rank", str(node), "--master-addr", f"{NETWORK}.1"]
            environment = {**os.environ, "PACELINE_TOKEN": "token of the benchmark's hosts", "HOST": str(node)}
            command += [*options, __file__, "--folder", str(folder)]
            with open(folder / f"errors-{node}", "w") as errors:
                self.launchers.append(subprocess.Popen(command, env=environment, stdout=errors, stderr=errors))

    def close(self) -> None:
        for launcher in self.launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            launcher.wait()

    def steps(self) -> list[tuple[float, int]]:
        """Return the end of each step of the first host's rank, and its number of ranks."""
        lines = [line for path in self.folder.glob("0 *") for line in path.read_text().split("\n")[:-1]]
        return [(float(line.split()[0]), int(line.split()[1])) for line in lines]

    def wait_step(self, after_s: float, size: int | None = None, count: int = 1) -> float:
        """Wait for steps after a time, with this number of ranks. Return the end of the last one."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self.launchers[0].poll() is None:
            ends = [end_s for end_s, found in self.steps() if end_s > after_s and size in (None, found)]
            if len(ends) >= count:
                return ends[count - 1]
            time.sleep(0.02)
        raise SystemExit(f"host_faults.py: no further step\n{(self.folder / 'errors-0').read_text()[-2000:]}")

    def usual_step(self) -> float:
        """Return the median time between two steps, in seconds."""
        ends = [end_s for end_s, _ in self.steps()]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))

    def kill(self, words: str) -> float:
        """Kill the last host's process whose command has these words. Return the time."""
        for process in psutil.Process(self.launchers[-1].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if words in " ".join(process.cmdline()) and not process.children():
                    process.send_signal(signal.SIGKILL)
                    return time.monotonic()
        raise SystemExit(f"host_faults.py: no process has {words!r}")


@contextlib.contextmanager
def training(num_hosts: int, mbit: int, strategy: str, *options: str) -> Iterator[tuple[Training, list[str]]]:
    """Start a training between hosts, and wait until it has made some steps."""
    servers = ["--servers", str(num_hosts)] if strategy in WITH_SERVERS else []
    with tempfile.TemporaryDirectory() as folder, network(num_hosts, f"{mbit}Mbit") as names:
        running = Training(names, Path(folder), ["--strategy", strategy, *servers, *options])
        try:
            running.wait_step(0.0, num_hosts, USUAL_STEPS)
            yield running, names
        finally:
            running.close()


def show(name: str, strategy: str, mbit: int, seconds: Sequence[float]) -> None:
    """Print median, smallest and largest value."""
    shown = [1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds))]
    print(f"{name:<14}{strategy:<18}{mbit:>7}{shown[0]:>8.0f} ms  ({shown[1]:.0f} to {shown[2]:.0f})", flush=True)


def measure_ranks(num_hosts: int, mbit: int, strategy: str, kills: int) -> None:
    """Kill a rank again and again."""
    lost, joined = [], []
    with training(num_hosts, mbit, strategy, "--min-ranks", "1") as (running, _):
        for _ in range(kills):
            usual_s = running.usual_step()
            killed_s = running.kill("--folder")
            lost.append(running.wait_step(killed_s, num_hosts - 1) - killed_s)
            joined_s = running.wait_step(killed_s + lost[-1], num_hosts)
            running.wait_step(joined_s, num_hosts, USUAL_STEPS)
            ends = [end_s for end_s, _ in running.steps() if killed_s + lost[-1] <= end_s <= joined_s + 1.0]
            joined.append(max(after - before for before, after in itertools.pairwise(ends)) - usual_s)
    show("killed rank", strategy, mbit, lost)
    show("joining rank", strategy, mbit, joined)


def measure_host(num_hosts: int, mbit: int, strategy: str) -> None:
    """Cut the link of the last host."""
    options = ("--min-ranks", "1", "--heartbeat-timeout", str(HEARTBEAT_S))
    with training(num_hosts, mbit, strategy, *options) as (running, names):
        cut_s = time.monotonic()
        ip("ip", "link", "set", names[-1].replace("h", "o"), "down")
        show("lost host", strategy, mbit, [running.wait_step(cut_s, num_hosts - 1) - cut_s])


def measure_server(num_hosts: int, mbit: int, strategy: str, kills: int) -> None:
    """Kill a server, in several trainings, because dead servers are not replaced."""
    pauses = []
    for _ in range(kills):
        with training(num_hosts, mbit, strategy, "--replicas", "1") as (running, _):
            killed_s = running.kill('"role": "server"')
            running.wait_step(killed_s + 1.0)
            ends = [end_s for end_s, _ in running.steps() if end_s > killed_s - 1.0]
            pauses.append(max(after - before for before, after in itertools.pairwise(ends)))
    show("killed server", strategy, mbit, pauses)


def main() -> None:
    """Measure all faults under all strategies and speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 100])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        run_rank(options.folder)
        return
    print(f"{options.hosts} hosts; median, smallest and largest time", flush=True)
    print(f"{'fault':<14}{'strategy':<18}{'Mbit/s':>7}{'pause':>11}")
    for mbit in options.mbit:
        for strategy in options.strategies:
            measure_ranks(options.hosts, mbit, strategy, options.kills)
            if strategy in WITH_SERVERS:
                measure_server(options.hosts, mbit, strategy, options.kills)
            else:
                measure_host(options.hosts, mbit, strategy)


if __name__ == "__main__":
    main()

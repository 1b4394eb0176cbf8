"""Measure elastic all-reduce: recovery from a killed rank, the pause when a rank joins, and the cost without faults.

    python benchmarks/elastic.py [faults] [cost] [balance] [--kills 5] [--steps 200]

Two ranks train a model of 33 kB with AdamW. Each step sleeps instead of computing: 20 ms for the first two figures, 50
ms for the third one. For the last figure, a step has 64 samples. One rank sleeps 1 ms per sample, and the other rank
sleeps 3 ms. The program prints medians, with the smallest and the largest value:

- from SIGKILL of one rank to the next committed step of the other rank;
- the longest step of the old rank when the replacement joins, minus its median step;
- the time of forward, backward and step in an elastic run, minus this time in a run without ``--min-ranks``. The two
runs alternate;
- the time of a step with a rank that is three times slower than the other one, without and with ``--balance``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SCRIPT = """
import itertools, os, sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt

folder, sleep_s, num_steps, batch_size = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
slowness = [float(value) for value in sys.argv[5:]]
strategy = pt.strategy()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 64))
loader = torch.utils.data.DataLoader(data, batch_size=batch_size)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
name = os.environ.get("PACELINE_INCARNATION", os.environ["RANK"])
with open(folder / f"{name} {os.getpid()}", "w", buffering=1) as log:
    count = itertools.count(1)
    for epoch in itertools.count():
        for inputs, targets in loader:
            time.sleep(sleep_s * len(inputs) * slowness[strategy.rank] if slowness else sleep_s)
            begun_s = time.monotonic()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            ended_s = time.monotonic()
            log.write(f"{begun_s} {ended_s} {strategy.world_size}\\n")
            if next(count) == num_steps:
                sys.exit()
"""
RANKS = 2
ELASTIC = ("--min-ranks", "1")
GLOBAL_BATCH = 64
PATIENCE_S = 120.0


class Training:
    """A run of the script. Each rank writes the times of its steps to a file."""

    def __init__(
        self, folder: Path, sleep_s: float, num_steps: int, *options: str, batch_size: int = 4, slowness: str = ""
    ) -> None:
        """Start the run. If `slowness` has a factor per rank, each rank sleeps `sleep_s` times it for each sample."""
        self._folder = folder
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "paceline", "run", "--strategy", "all-reduce", "--nproc-per-node", str(RANKS)]
        command += [*options, str(folder / "script.py"), str(folder), str(sleep_s), str(num_steps), str(batch_size)]
        command += slowness.split()
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def steps(self, rank: Path) -> list[tuple[float, float, int]]:
        """Return start, end and number of ranks of each complete step of a rank."""
        lines = rank.read_text().split("\n")[:-1]
        return [(float(line.split()[0]), float(line.split()[1]), int(line.split()[2])) for line in lines]

    def ranks(self) -> list[Path]:
        """Return the files of all ranks so far, the oldest first."""
        return sorted((path for path in self._folder.glob("* *")), key=lambda path: int(path.name.split()[0]))

    def wait_size(self, rank: Path, size: int, after_s: float) -> tuple[float, float]:
        """Return start and end of the rank's first step with this number of ranks that ends after a time."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            for begun_s, ended_s, found in self.steps(rank):
                if ended_s > after_s and found == size:
                    return begun_s, ended_s
            time.sleep(0.05)
        raise SystemExit(f"no step with {size} ranks within {PATIENCE_S:g} s")


def measure_faults(kills: int) -> tuple[list[float], list[float]]:
    """Return the recovery times, and the pauses when a rank joins, in seconds."""
    recoveries, pauses = [], []
    with tempfile.TemporaryDirectory() as name:
        training = Training(Path(name), 0.02, 1_000_000, *ELASTIC)
        try:
            while len(training.ranks()) < RANKS:
                time.sleep(0.1)
            survivor = training.ranks()[0]
            since_s = 0.0
            for _ in range(kills):
                _, joined_s = training.wait_size(survivor, RANKS, since_s)
                time.sleep(1.0)
                killed_s = time.monotonic()
                os.kill(int(training.ranks()[-1].name.split()[1]), signal.SIGKILL)
                _, recovered_s = training.wait_size(survivor, RANKS - 1, killed_s)
                recoveries.append(recovered_s - killed_s)
                _, joined_s = training.wait_size(survivor, RANKS, recovered_s)
                time.sleep(0.3)
                ends = [ended_s for _, ended_s, _ in training.steps(survivor)]
                gaps = {end: end - before for before, end in itertools.pairwise(ends)}
                typical_s = statistics.median(gaps.values())
                pauses.append(max(gap for end, gap in gaps.items() if abs(end - joined_s) < 0.1) - typical_s)
                since_s = joined_s
        finally:
            training.process.send_signal(signal.SIGTERM)
            training.process.wait()
    return recoveries, pauses


def measure_step(num_steps: int, *options: str) -> float:
    """Return the median time of forward, backward and step, in seconds."""
    with tempfile.TemporaryDirectory() as name:
        training = Training(Path(name), 0.05, num_steps, *options)
        training.process.wait()
        steps = training.steps(training.ranks()[0])
        return statistics.median(ended_s - begun_s for begun_s, ended_s, _ in steps[len(steps) // 4 :])


def measure_unequal(num_steps: int, *options: str) -> list[float]:
    """Return the step times, in seconds, in the second half of a run with a rank that is three times slower."""
    options = (*ELASTIC, "--global-batch", str(GLOBAL_BATCH), *options)
    with tempfile.TemporaryDirectory() as name:
        training = Training(Path(name), 0.001, num_steps, *options, batch_size=GLOBAL_BATCH, slowness="1 3")
        training.process.wait()
        ends = [ended_s for _, ended_s, _ in training.steps(training.ranks()[0])]
        return [after - before for before, after in itertools.pairwise(ends[len(ends) // 2 :])]


def show(title: str, seconds: Sequence[float]) -> None:
    """Print median, smallest and largest value."""
    shown = [1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds))]
    print(f"{title:<52} {shown[0]:8.2f} ms  ({shown[1]:.2f} to {shown[2]:.2f})", flush=True)


def show_faults(options: argparse.Namespace) -> None:
    recoveries, pauses = measure_faults(options.kills)
    show("killed rank to the survivor's next committed step", recoveries)
    show("pause of the old rank when a rank joins", pauses)


def show_cost(options: argparse.Namespace) -> None:
    plain, elastic = [], []
    for _ in range(3):
        plain.append(measure_step(options.steps))
        elastic.append(measure_step(options.steps, *ELASTIC))
    show("forward, backward and step, not elastic", plain)
    show("forward, backward and step, elastic", elastic)
    cost = statistics.median(elastic) - statistics.median(plain)
    print(f"cost without faults: {1e3 * cost:.2f} ms, {100 * cost / 0.05:.1f}% of a step of 50 ms")


def show_balance(options: argparse.Namespace) -> None:
    show("step with one rank three times slower", measure_unequal(options.steps))
    show("step with one rank three times slower, --balance", measure_unequal(options.steps, "--balance"))


PARTS = {"faults": show_faults, "cost": show_cost, "balance": show_balance}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"figures to measure: {', '.join(PARTS)}; default all")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    for name in options.parts or PARTS:
        PARTS[name](options)


if __name__ == "__main__":
    main()

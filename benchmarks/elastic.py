"""Measure elastic all-reduce: recovery from a killed rank, the pause when a rank joins, and the cost without faults.

    python benchmarks/elastic.py [faults] [join] [cost] [balance] [endurance] [--kills 5] [--steps 200] [--minutes 30]

Two ranks train a model of 33 kB with AdamW, and sleep in each step instead of computing. The program prints medians,
with the smallest and the largest value:

- faults, with 20 ms of sleep: the time from SIGKILL of one rank to the next committed step of the other rank, and the
longest step of the old rank when the replacement joins, minus its median step. If torchft is installed, the same for
torchft on Gloo. torchft detects a lost replica group after 5 s without a heartbeat by default; 1 s is shown too;
- join, with a state of 400 MB (parameters of 133 MB): the longest step of the old rank while the new rank receives the
state, minus its median step with two ranks; the same for 17 steps without a join, because steps differ without a join
too; the longest time that the old rank spends on the transfer between two steps, without its wait for the new rank; and
the sum over all steps of the join;
- cost, with 50 ms of sleep: the time of forward, backward and step in an elastic run, minus this time in a run without
``--min-ranks``. The two runs alternate;
- balance: the time of a step of 64 samples, without and with ``--balance``. One rank sleeps 1 ms per sample, and the
other rank sleeps 3 ms;
- endurance: the loss of a regression after 30 minutes in which one of three ranks is killed every 5 s, the loss without
kills after the same number of epochs, and the memory of the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

SCRIPT = """
import itertools, os, sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt
from paceline.torch.strategies.elastic.training import ElasticTraining

folder, sleep_s, num_steps, batch_size = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
width, slowness = int(sys.argv[5]), [float(value) for value in sys.argv[6:]]
transfer_s = 0.0

def heal(training, **options):
    global transfer_s
    begun_s = time.monotonic()
    if training._group.has_newcomers:
        training._group.exchange(lambda group: group.barrier())  # wait for the other rank
        transfer_s -= time.monotonic() - begun_s
    original(training, **options)
    transfer_s += time.monotonic() - begun_s

original, ElasticTraining._heal = ElasticTraining._heal, heal
strategy = pt.strategy()
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(*torch.randn(2, 1, width).expand(2, 4096, width))
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
            log.write(f"{begun_s} {ended_s} {strategy.world_size} {strategy.data_place[1]} {transfer_s}\\n")
            if next(count) == num_steps:
                sys.exit()
"""
TORCHFT_SCRIPT = """
import itertools, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
import torchft
from torch import nn

folder, sleep_s, batch_size = Path(sys.argv[1]), float(sys.argv[2]), 4
name = os.environ["PACELINE_INCARNATION"]
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())

def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)), load_state_dict=load, state_dict=state,
    min_replica_size=1, replica_id=f"rank {name}", rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
)
model = torchft.DistributedDataParallel(manager, model)
steps = torchft.Optimizer(manager, optimizer)
inputs, targets = torch.randn(batch_size, 64), torch.randn(batch_size, 64)
with open(folder / f"{name} {os.getpid()}", "w", buffering=1) as log:
    while True:
        time.sleep(sleep_s)
        begun_s, before = time.monotonic(), manager.current_step()
        steps.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        steps.step()
        if manager.current_step() > before:  # the step is committed
            log.write(f"{begun_s} {time.monotonic()} {manager.num_participants()}\\n")
"""
ENDURANCE_SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt

folder, sleep_s, num_epochs, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
strategy = pt.strategy()
torch.manual_seed(0)
x = torch.randn(4096, 16)
y = torch.sin(x.sum(1, keepdim=True)) + 0.5 * torch.randn(4096, 1)
torch.manual_seed(seed)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
epoch, is_over = 0, False
marker = folder / f"{os.environ['PACELINE_INCARNATION']} {os.getpid()}"
while not is_over:
    for inputs, targets in loader:
        time.sleep(sleep_s)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if strategy.has_joined:
            marker.touch()
    epoch += 1
    if strategy.has_joined:  # also a rank that has joined after the last batch of the epoch
        is_over = bool(strategy.reduce(float(epoch == num_epochs or (folder / "stop").exists()), "max"))
if strategy.is_main:
    with torch.no_grad():
        loss = nn.functional.mse_loss(strategy.module(x), y).item()
    (folder / "result").write_text(f"{epoch} {loss}")
"""
RANKS = 2
ELASTIC = ("--min-ranks", "1")
GLOBAL_BATCH = 64
WIDE = 4082  # of a model whose parameters and AdamW's state have 400 MB
PATIENCE_S = 120.0
TORCHFT_TIMEOUTS_MS = (5000, 1000)  # the default time without a heartbeat, and a short one


class LostRankError(Exception):
    """The rank that no benchmark has killed ended too."""


def is_running(pid: int) -> bool:
    """Return whether a process runs, and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Training:
    """A training with two ranks. Each rank writes the times of its steps to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.main: subprocess.Popen[bytes]
        """The process that lives as long as the training."""

    def steps(self, rank: Path, column: int = 2) -> list[tuple[float, float, int]]:
        """Return start, end and number of ranks of each complete step of a rank."""
        lines = rank.read_text().split("\n")[:-1]
        return [(float(line.split()[0]), float(line.split()[1]), int(line.split()[column])) for line in lines]

    def ranks(self) -> list[Path]:
        """Return the files of all ranks so far, the oldest first."""
        return sorted((path for path in self.folder.glob("* *")), key=lambda path: int(path.name.split()[0]))

    def wait_size(self, rank: Path, size: int, after_s: float, column: int = 2) -> tuple[float, float]:
        """Return start and end of the rank's first step with this number of ranks that ends after a time.

        Column 3 has the number of ranks with the training's state.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self.main.poll() is None:
            if not is_running(int(rank.name.split()[1])):
                raise LostRankError
            for begun_s, ended_s, found in self.steps(rank, column):
                if ended_s > after_s and found == size:
                    return begun_s, ended_s
            time.sleep(0.05)
        raise SystemExit(f"no step with {size} ranks within {PATIENCE_S:g} s")

    def replace_killed(self) -> None:
        """Start a rank in place of the killed one, unless the training does it by itself."""

    def close(self) -> None:
        self.main.send_signal(signal.SIGTERM)
        self.main.wait()


class PacelineTraining(Training):
    """A run of the script, with a launcher that replaces killed ranks."""

    def __init__(
        self,
        folder: Path,
        sleep_s: float,
        num_steps: int,
        *options: str,
        batch_size: int = 4,
        width: int = 64,
        slowness: str = "",
    ) -> None:
        """Start the run. If `slowness` has a factor per rank, each rank sleeps `sleep_s` times it for each sample."""
        super().__init__(folder)
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "paceline", "run", "--strategy", "all-reduce", "--nproc-per-node", str(RANKS)]
        command += [*options, str(folder / "script.py"), str(folder), str(sleep_s), str(num_steps)]
        command += [str(batch_size), str(width), *slowness.split()]
        self.main = subprocess.Popen(command, stderr=subprocess.DEVNULL)


class TorchftTraining(Training):
    """Two replica groups of torchft with one rank each, and its lighthouse."""

    def __init__(self, folder: Path, sleep_s: float, heartbeat_ms: int) -> None:
        super().__init__(folder)
        (folder / "script.py").write_text(TORCHFT_SCRIPT)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", self._address]
        lighthouse += ["--min_replicas", "1", "--join_timeout_ms", "10000", "--heartbeat_timeout_ms", str(heartbeat_ms)]
        self.main = subprocess.Popen(lighthouse, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._command = [sys.executable, str(folder / "script.py"), str(folder), str(sleep_s)]
        self._ranks: list[subprocess.Popen[bytes]] = []
        for _ in range(RANKS):
            self.replace_killed()

    def replace_killed(self) -> None:
        variables = {
            "TORCHFT_LIGHTHOUSE": f"http://{self._address}",
            "PACELINE_INCARNATION": str(len(self._ranks)),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        self._ranks.append(
            subprocess.Popen(
                self._command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        super().close()


@dataclass
class Faults:
    """The results of several kills; times in seconds."""

    recoveries: list[float] = field(default_factory=list)
    """From the kill of one rank to the next committed step of the other rank."""
    pauses: list[float] = field(default_factory=list)
    """The longest step of the old rank when a new rank joins, minus its median step."""
    num_lost: int = 0
    """Number of kills after which the other rank ended too."""


def measure_faults(start: Callable[[Path], Training], kills: int) -> Faults:
    """Kill one of two ranks again and again. If the other rank ends too, start the training again."""
    faults = Faults()
    while len(faults.recoveries) + faults.num_lost < kills:
        with tempfile.TemporaryDirectory() as folder:
            training = start(Path(folder))
            try:
                _kill_ranks(training, faults, kills)
            except LostRankError:
                faults.num_lost += 1
            finally:
                training.close()
    return faults


def wait_ranks(training: Training) -> None:
    """Wait until all ranks have started."""
    deadline_s = time.monotonic() + PATIENCE_S
    while len(training.ranks()) < RANKS:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the ranks did not start within {PATIENCE_S:g} s")
        time.sleep(0.1)


def _kill_ranks(training: Training, faults: Faults, kills: int) -> None:
    wait_ranks(training)
    survivor = training.ranks()[0]
    since_s = 0.0
    while len(faults.recoveries) + faults.num_lost < kills:
        training.wait_size(survivor, RANKS, since_s)
        time.sleep(1.0)
        killed_s = time.monotonic()
        os.kill(int(training.ranks()[-1].name.split()[1]), signal.SIGKILL)
        _, recovered_s = training.wait_size(survivor, RANKS - 1, killed_s)
        faults.recoveries.append(recovered_s - killed_s)
        training.replace_killed()
        _, since_s = training.wait_size(survivor, RANKS, recovered_s)
        time.sleep(0.3)
        ends = [ended_s for _, ended_s, _ in training.steps(survivor)]
        gaps = {end: end - before for before, end in itertools.pairwise(ends)}
        typical_s = statistics.median(gaps.values())
        faults.pauses.append(max(gap for end, gap in gaps.items() if abs(end - since_s) < 0.1) - typical_s)


@dataclass
class Joins:
    """The steps of the old rank while new ranks receive the state; times in seconds, compared with the median step."""

    longest: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    """The longest of some steps before each join."""
    transfers: list[float] = field(default_factory=list)
    """The longest time for the transfer between two steps."""
    sums: list[float] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)


def measure_joins(kills: int) -> Joins:
    """Kill one of two ranks again and again, and measure the steps until its replacement has the state."""
    joins = Joins()
    with tempfile.TemporaryDirectory() as name:
        training = PacelineTraining(Path(name), 0.0, 1_000_000, *ELASTIC, width=WIDE)
        try:
            wait_ranks(training)
            survivor, since_s = training.ranks()[0], 0.0
            for _ in range(kills):
                training.wait_size(survivor, RANKS, since_s)
                _wait_steps(training, survivor, 20)
                killed_s = time.monotonic()
                os.kill(int(training.ranks()[-1].name.split()[1]), signal.SIGKILL)
                _, alone_s = training.wait_size(survivor, RANKS - 1, killed_s)
                joined_s, _ = training.wait_size(survivor, RANKS, alone_s)
                _, since_s = training.wait_size(survivor, RANKS, joined_s, column=3)
                _wait_steps(training, survivor, 2)
                _record_join(joins, survivor, joined_s, since_s)
        finally:
            training.close()
    return joins


def _wait_steps(training: Training, rank: Path, count: int) -> None:
    before = len(training.steps(rank))
    while len(training.steps(rank)) < before + count:
        time.sleep(0.1)


def _record_join(joins: Joins, survivor: Path, joined_s: float, healed_s: float) -> None:
    rows = [[float(value) for value in line.split()] for line in survivor.read_text().split("\n")[:-1]]
    steps = [(after[1] - before[1], after[4] - before[4], after) for before, after in itertools.pairwise(rows)]
    typical_s = statistics.median(length_s for length_s, _, row in steps if row[3] == RANKS)
    healing = [(length_s - typical_s, part_s) for length_s, part_s, row in steps if joined_s <= row[0] <= healed_s]
    lengths, transfers = zip(*healing, strict=True)
    usual = [length_s for length_s, _, row in steps if row[3] == RANKS and row[1] < joined_s]
    joins.usual.append(max(usual[-17:]) - typical_s)
    joins.longest.append(max(lengths))
    joins.transfers.append(max(transfers))
    joins.sums.append(sum(lengths))
    joins.num_steps.append(len(healing))


def measure_step(num_steps: int, *options: str) -> float:
    """Return the median time of forward, backward and step, in seconds."""
    with tempfile.TemporaryDirectory() as name:
        training = PacelineTraining(Path(name), 0.05, num_steps, *options)
        training.main.wait()
        steps = training.steps(training.ranks()[0])
        return statistics.median(ended_s - begun_s for begun_s, ended_s, _ in steps[len(steps) // 4 :])


def measure_unequal(num_steps: int, *options: str) -> list[float]:
    """Return the step times, in seconds, in the second half of a run with a rank that is three times slower."""
    options = (*ELASTIC, "--global-batch", str(GLOBAL_BATCH), *options)
    with tempfile.TemporaryDirectory() as name:
        training = PacelineTraining(Path(name), 0.001, num_steps, *options, batch_size=GLOBAL_BATCH, slowness="1 3")
        training.main.wait()
        ends = [ended_s for _, ended_s, _ in training.steps(training.ranks()[0])]
        return [after - before for before, after in itertools.pairwise(ends[len(ends) // 2 :])]


class LongTraining(NamedTuple):
    """The result of a training."""

    epochs: int
    loss: float
    """The loss on the training data."""
    kills: int
    launcher_mib: Sequence[float]
    """With kills: the memory of the launcher after a tenth of the time and at the end."""


def train_long(
    seed: int, num_epochs: int, sleep_s: float, every_s: float = 0.0, duration_s: float = 0.0
) -> LongTraining:
    """Train on three ranks with 192 samples in a step.

    With `every_s`, kill a random rank at this interval for `duration_s` seconds, and then end the training.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, kills = Path(name), 0
        sizes: list[float] = []
        (folder / "script.py").write_text(ENDURANCE_SCRIPT)
        options = ["--nproc-per-node", "3", "--min-ranks", "1", "--global-batch", "192"]
        command = [sys.executable, "-m", "paceline", "run", "--strategy", "all-reduce", *options]
        command += [str(folder / "script.py"), name, str(sleep_s), str(num_epochs), str(seed)]
        with (folder / "errors").open("w") as errors:
            launcher = subprocess.Popen(command, stderr=errors)
        process, begun_s = psutil.Process(launcher.pid), time.monotonic()
        try:
            while every_s and launcher.poll() is None and time.monotonic() < begun_s + duration_s:
                time.sleep(every_s)
                ranks = {child.pid for child in process.children(recursive=True)}  # the system reuses numbers
                joined = [pid for path in folder.glob("* *") if (pid := int(path.name.split()[1])) in ranks]
                if len(joined) > 1:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(random.choice(joined), signal.SIGKILL)
                        kills += 1
                if not sizes and time.monotonic() > begun_s + duration_s / 10:
                    sizes.append(process.memory_info().rss / 2**20)
            if every_s and launcher.poll() is None:
                sizes.append(process.memory_info().rss / 2**20)
                (folder / "stop").touch()
            if launcher.wait():
                last = "\n".join((folder / "errors").read_text().splitlines()[-20:])
                raise SystemExit(f"the training ended with status {launcher.returncode} after {kills} kills:\n{last}")
        finally:
            launcher.kill()
            launcher.wait()
        epochs, loss = (folder / "result").read_text().split()
        return LongTraining(int(epochs), float(loss), kills, sizes)


def show_endurance(options: argparse.Namespace) -> None:
    found = train_long(0, 0, 0.02, 5.0, 60.0 * options.minutes)
    print(f"loss after {found.epochs} epochs with {found.kills} kills in {options.minutes:g} min: {found.loss:.4f}")
    losses = [f"{train_long(seed, found.epochs, 0.0).loss:.4f}" for seed in range(3)]
    print(f"loss after {found.epochs} epochs without kills, three seeds: {', '.join(losses)}")
    first, last = found.launcher_mib
    print(f"memory of the launcher: {first:.1f} MiB after a tenth of the time, {last:.1f} MiB at the end")


def show(title: str, seconds: Sequence[float]) -> None:
    """Print median, smallest and largest value."""
    if not seconds:
        print(f"{title:<52} no value")
        return
    shown = [1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds))]
    print(f"{title:<52} {shown[0]:8.2f} ms  ({shown[1]:.2f} to {shown[2]:.2f})", flush=True)


def show_faults(options: argparse.Namespace) -> None:
    trainings: dict[str, Callable[[Path], Training]] = {
        "Paceline": lambda folder: PacelineTraining(folder, 0.02, 1_000_000, *ELASTIC)
    }
    for timeout_ms in TORCHFT_TIMEOUTS_MS if importlib.util.find_spec("torchft") else ():
        trainings[f"torchft, {timeout_ms / 1e3:g} s"] = partial(TorchftTraining, sleep_s=0.02, heartbeat_ms=timeout_ms)
    for name, start in trainings.items():
        faults = measure_faults(start, options.kills)
        show(f"killed rank to the next committed step, {name}", faults.recoveries)
        show(f"pause of the old rank at a join, {name}", faults.pauses)
        if faults.num_lost:
            print(f"  after {faults.num_lost} of {options.kills} kills the other rank of {name} ended too")


def show_join(options: argparse.Namespace) -> None:
    joins = measure_joins(options.kills)
    show("pause of the old rank at a join, state of 400 MB", joins.longest)
    show("the same for 17 steps before the join", joins.usual)
    show("longest transfer between two steps", joins.transfers)
    show("sum over all steps until the new rank has the state", joins.sums)
    print(f"number of these steps: {', '.join(map(str, joins.num_steps))}")


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


PARTS = {
    "faults": show_faults,
    "join": show_join,
    "cost": show_cost,
    "balance": show_balance,
    "endurance": show_endurance,
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"figures to measure: {', '.join(PARTS)}; default all")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of the training with kills")
    options = parser.parse_args()
    for name in options.parts or PARTS:
        PARTS[name](options)


if __name__ == "__main__":
    main()

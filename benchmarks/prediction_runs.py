"""Run small models under strategies, on this machine and between emulated hosts, for ``benchmarks/predictions.py``.

Each rank and each server is a fork of this process, which has imported everything already. An emulated host is a
network namespace (``benchmarks/hosts.py``). All emulated hosts share the cores of this machine, so their models do not
compute: a layer sleeps, and its gradients are zeros. The names of these models are those of models with such layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import torch
from hosts import NETWORK, network  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as pt
from paceline.cli import main as run_command
from paceline.environment import num_cores
from paceline.launch.child import prepare
from paceline.planning.predictions import StrategyCandidate
from paceline.planning.scripts import mean_profile
from paceline.strategies import STRATEGIES, StrategyFlags, choose_strategy
from paceline.strategies.pipeline import PipelineFlags
from paceline.strategies.profile import COPIES, ModelProfile, StepRecord, read_record

_Result = TypeVar("_Result")

BATCHES = 60
FOREIGN, REPEATS = 0.1, 3
TOKEN = "token of the hosts"
LIMIT_S = 120.0


class Transformer(nn.Module):
    """A small language model of 0.8 million parameters."""

    def __init__(self, width: int = 128, words: int = 500) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.words(words)))
        return logits.mean(1)


class Recurrent(nn.Module):
    """Two LSTM layers and a linear layer: 0.9 million parameters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.LSTM(64, width, 2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(inputs)[0][:, -1])
        return logits


class Clicks(nn.Module):
    """A model of clicks with 26 categorical features, whose rows are in a sparse table."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.rows = pt.Embedding(16)
        self.network = network

    def forward(self, keys: Tensor) -> Tensor:
        logits: Tensor = self.network(self.rows(keys).flatten(1))
        return logits


class Pause(torch.autograd.Function):
    """Sleep in forward and twice as long in backward. The gradients of the weights are zeros."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weights: Tensor, seconds: float) -> Tensor:
        ctx.weights, ctx.seconds = weights, seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], torch.zeros_like(ctx.weights), None


class PausedLayer(nn.Module):
    """A layer of `kilobytes` of parameters whose forward takes `ms` milliseconds."""

    def __init__(self, kilobytes: float, ms: float) -> None:
        super().__init__()
        self.weights, self.seconds = nn.Parameter(torch.zeros(round(kilobytes * 250))), ms / 1e3

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = Pause.apply(inputs, self.weights, self.seconds)
        return outputs


PAUSED: dict[str, list[tuple[float, float]]] = {
    "perceptron": [(250, 6)] * 8,
    "cnn": [(20, 15), (60, 15), (150, 10), (500, 6), (1000, 4), (200, 1)],
    "vgg": [(50, 20), (100, 15), (200, 10), (2000, 4), (400, 1)],
    "transformer": [(800, 1), *[(120, 5)] * 10],
    "small": [(10, 8)] * 6,
    "clicks": [(200, 30), (50, 15)],
}
"""The layers of the models that sleep: kilobytes, and milliseconds of the forward."""
COMPUTED = ("perceptron", "cnn", "residual", "transformer", "recurrent", "clicks")
"""The models that compute."""


def make_model(name: str) -> tuple[nn.Module, Tensor, int]:
    """Return a model that computes, its inputs and the batch size. It has 10 outputs or more."""
    if name == "perceptron":
        layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        return nn.Sequential(*layers), torch.randn(64 * BATCHES, 512), 64
    if name == "cnn":
        convolutions = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
        head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)]
        return nn.Sequential(*convolutions, *head), torch.randn(64 * BATCHES, 1, 28, 28), 64
    if name == "residual":
        blocks = [
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(6)
        ]
        return (
            nn.Sequential(nn.Conv2d(3, 32, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
            torch.randn(16 * BATCHES, 3, 18, 18),
            16,
        )
    if name == "transformer":
        return Transformer(), torch.randint(0, 500, (8 * BATCHES, 32)), 8
    if name == "recurrent":
        return Recurrent(), torch.randn(32 * BATCHES, 12, 64), 32
    network = nn.Sequential(nn.Linear(26 * 16, 256), nn.ReLU(), nn.Linear(256, 10))
    return Clicks(network), torch.randint(0, 1 << 40, (256 * BATCHES, 26)) % 5_003, 256


def make_paused_model(name: str) -> tuple[nn.Module, Tensor, int]:
    """Return a model that sleeps, its inputs and the batch size."""
    layers = nn.Sequential(*(PausedLayer(*layer) for layer in PAUSED[name]))
    if name == "clicks":
        return Clicks(layers), torch.randint(0, 1 << 40, (64 * BATCHES, 26)) % 5_003, 64
    return layers, torch.randn(64 * BATCHES, 10), 64


def train(name: str, *, is_paused: bool) -> None:
    """Train a model until the profiler ends the process."""
    torch.manual_seed(0)
    model, inputs, batch_size = (make_paused_model if is_paused else make_model)(name)
    data = TensorDataset(inputs, torch.randint(0, 10, (len(inputs),)))
    model, optimizer, loader = pt.strategy().prepare(
        model, torch.optim.Adam(model.parameters()), DataLoader(data, batch_size, shuffle=True)
    )
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def load_modules() -> None:
    """Import everything that the forks use."""
    for name in (*(spec.implementation.partition(":")[0] for spec in STRATEGIES.values()), "torch._dynamo"):
        importlib.import_module(name)
    importlib.import_module("paceline.torch.strategies.measuring.profiling")
    prepare()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A place for processes: a network namespace, or this machine."""

    address: str = "127.0.0.1"
    namespace: str | None = None


@contextmanager
def emulated_hosts(count: int, link: str) -> Iterator[list[Host]]:
    """Yield hosts that are connected by links of the speed `link`, such as ``100Mbit``."""
    with network(count, link) as names:
        yield [Host(address=f"{NETWORK}.{number + 1}", namespace=name) for number, name in enumerate(names)]


def link_processor_s(link: str, num_bytes: int = 1 << 25) -> float:
    """Return the processor time of this machine for each byte that an emulated host sends or receives through TCP."""

    def send() -> None:
        with socket.create_connection((hosts[1].address, port)) as connection:
            for _ in range(num_bytes >> 20):
                connection.sendall(buffer)

    def receive() -> None:
        with socket.create_server((hosts[1].address, port)) as server:
            (Path(name) / "listening").touch()
            connection, _ = server.accept()
            while connection.recv_into(buffer):
                pass

    port, buffer = 29500, bytearray(1 << 20)
    with emulated_hosts(2, link) as hosts, tempfile.TemporaryDirectory() as name, Forks(Path(name)) as forks:
        forks.start("receiver", hosts[1], {"OMP_NUM_THREADS": "1"}, receive)
        while not Path(name, "listening").exists():
            time.sleep(0.01)
        began_s = _busy_s()
        forks.start("sender", hosts[0], {"OMP_NUM_THREADS": "1"}, send)
        forks.wait(["sender", "receiver"])
        return (_busy_s() - began_s) / (2 * num_bytes)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "softirq", 0.0))


class Forks:
    """Processes on hosts. At the end of the context, all processes that still run are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, int] = {}

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._running.values():
            with contextlib.suppress(ProcessLookupError):  # it has not become the leader of its group yet
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, name: str, host: Host, variables: dict[str, str], run: Callable[[], None]) -> None:
        self.log(name).touch()
        pid = os.fork()
        if not pid:
            self._run(name, host, variables, run)
        self._running[name] = pid

    def _run(self, name: str, host: Host, variables: dict[str, str], run: Callable[[], None]) -> NoReturn:
        status = 1
        try:
            os.setsid()
            log = os.open(self.log(name), os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if host.namespace is not None:
                with Path("/run/netns", host.namespace).open() as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
            os.environ.update(variables)
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
            run()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self, names: Sequence[str]) -> None:
        """Wait until processes have ended. Raises SystemExit if one fails, or after two minutes."""
        deadline = time.monotonic() + LIMIT_S
        while waiting := [name for name in names if name in self._running]:
            for name in waiting:
                pid, status = os.waitpid(self._running[name], os.WNOHANG)
                if pid:
                    del self._running[name]
                if status or time.monotonic() > deadline:
                    logs = "\n".join(f"{log.name}: {log.read_text()}" for log in self.folder.glob("*.log"))
                    sys.exit(f"predictions.py: {name} has status {status}\n{logs}")
            time.sleep(0.01)


def undisturbed(run: Callable[[], _Result]) -> _Result:
    """Return the result of `run`. Repeat it up to twice if other programs use more than a tenth of the processors."""
    for _ in range(REPEATS):
        began_s, own_s = _used_s(), _own_s()
        start_s = time.monotonic()
        result = run()
        foreign_s = _used_s() - began_s - (_own_s() - own_s)
        if foreign_s < FOREIGN * num_cores() * (time.monotonic() - start_s):
            break
    return result


def _used_s() -> float:
    """Return the processor time of all programs with normal priority outside of the kernel, in seconds."""
    return float(psutil.cpu_times().user)


def _own_s() -> float:
    """Return the processor time of this process and of its ended children outside of the kernel, in seconds."""
    times = os.times()
    return times.user + times.children_user


def _variables(folder: Path, threads: int) -> dict[str, str]:
    return {"PACELINE_PROFILE": str(folder), "OMP_NUM_THREADS": str(threads)}


def profile(model: str, *, copies: int, threads: int, is_paused: bool = False) -> ModelProfile:
    """Return the mean profile of processes that run at the same time."""
    with tempfile.TemporaryDirectory() as name, Forks(Path(name)) as forks:
        folders = [Path(name, "copies", str(number)) for number in range(copies)]
        for number, folder in enumerate(folders):
            folder.mkdir(parents=True)
            (folder / COPIES).touch()
            variables = _variables(folder, threads) | {"PACELINE_STRATEGY": "one-device"}
            forks.start(f"copy {number}", Host(), variables, lambda: train(model, is_paused=is_paused))
        forks.wait([f"copy {number}" for number in range(copies)])
        return mean_profile([read_record(folder / "profile.json", ModelProfile) for folder in folders])


def record(
    model: str,
    candidate: StrategyCandidate,
    hosts: Sequence[Host],
    steps: int,
    *,
    threads: int,
    is_paused: bool = False,
) -> list[StepRecord]:
    """Run a model under a strategy with one rank on each item of `hosts`. Return the records of all ranks."""
    count = len(hosts)
    flags = StrategyFlags(pipeline=PipelineFlags(stages=count)) if candidate.strategy == "pipeline" else None
    choice = choose_strategy(
        candidate.strategy,
        processes=count,
        servers=candidate.servers or None,
        consistency=candidate.consistency,
        flags=flags,
    )
    with tempfile.TemporaryDirectory() as name, Forks(Path(name)) as forks:
        folder = forks.folder
        variables = _variables(folder, threads) | {"PACELINE_TOKEN": TOKEN, "PACELINE_PROFILE_STEPS": str(steps)}
        variables |= choice.variables()
        if candidate.servers:
            variables["PACELINE_SCHEDULER"] = _start_servers(forks, hosts, candidate.servers, str(choice.consistency))
        if count > 1:
            variables |= {"WORLD_SIZE": str(count), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        ranks = [f"rank {rank}" for rank in range(count)]
        is_local = hosts[0].namespace is None
        for rank, host in enumerate(hosts):
            own = {"LOCAL_RANK": str(rank if is_local else 0), "LOCAL_WORLD_SIZE": str(count if is_local else 1)}
            own = variables | own | {"RANK": str(rank)} if count > 1 else variables
            forks.start(ranks[rank], host, own, lambda: train(model, is_paused=is_paused))
        forks.wait(ranks)
        return [read_record(folder / f"rank{rank}.json", StepRecord) for rank in range(count)]


def _start_servers(forks: Forks, hosts: Sequence[Host], servers: int, consistency: str) -> str:
    """Start a scheduler on the first host, and servers on the first hosts. Return the scheduler's address."""
    token = forks.folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    def command(*words: str) -> Callable[[], None]:
        def run() -> None:
            sys.argv = ["paceline", *words, "--token-file", str(token)]
            run_command()

        return run

    one = {"OMP_NUM_THREADS": "1"}
    counts = ["--servers", str(servers), "--workers", str(len(hosts)), "--consistency", consistency]
    scheduler = ["scheduler", *counts, "--host", hosts[0].address, "--port", "7337"]
    forks.start("scheduler", hosts[0], one, command(*scheduler))
    while "listening" not in forks.log("scheduler").read_text():
        time.sleep(0.01)
    address = f"{hosts[0].address}:7337"
    for number in range(servers):
        words = ["server", "--scheduler", address, "--host", hosts[number].address]
        forks.start(f"server {number}", hosts[number], one, command(*words))
    return address

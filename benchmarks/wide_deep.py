"""Compare strategies and torch.distributed.rpc with a wide and deep model (Cheng et al., DLRS 2016) on a click log.

    python benchmarks/wide_deep.py --data /path/to/criteo/train.tsv.gz [--runs 3] [--batch-size 256] [--json]

All contenders train the same model: 26 categories as keys, 13 integers as standardized logarithms, embeddings of
dimension 16 and 1, a perceptron of 64 and 32, and Adagrad. There are 2 workers and 1 server, with one thread per
process. One pass trains on the first 80% of the rows. The AUC is measured on the remaining rows. The data are parsed in
advance. The contenders run in turns, and the results are medians. Examples/s are counted from the eleventh step of
every rank until all ranks have finished.

The peer follows PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework". A server
process has the embeddings, with rows numbered in advance and sparse gradients. Trainers call the server's forward.
Distributed autograd and DistributedOptimizer update the embeddings. DistributedDataParallel on Gloo trains the dense
part.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import itertools
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import paceline
import paceline.torch as pt
from paceline.data import open_dataset
from paceline.launch import prepare_kernels
from paceline.models.metrics import auc
from paceline.protocol import BoundedDelay, Consistency, Sequential

NUM_WORKERS = 2
NUM_INTEGERS, NUM_CATEGORIES = 13, 26
DIM, WIDTHS = 16, (64, 32)
LEARNING_RATE, INITIAL_STD = 0.02, 0.01
TRAIN_SHARE = 0.8
WARM_UP_STEPS = 10


# The data.


def prepare_data(path: Path, folder: Path) -> int:
    """Write the arrays of all contenders to `folder`. Return the number of training rows."""
    labels, keys = [], []
    with open_dataset([path], format="criteo") as dataset:
        for shard in itertools.count():
            for batch in dataset.read(0, shard, 1 << 16):
                labels.append(batch.labels.copy())
                keys.append(batch.keys.reshape(batch.num_examples, -1)[:, NUM_INTEGERS:].copy())
            num_shards = dataset.ended(0)
            if num_shards is not None and shard + 1 >= num_shards:
                break
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        fields = (line.split("\t", NUM_INTEGERS + 1)[1 : NUM_INTEGERS + 1] for line in file)
        integers = np.array([[float(field or 0) for field in row] for row in fields], np.float32)
    logarithms = np.log1p(np.maximum(integers, 0))
    num_trained = int(len(logarithms) * TRAIN_SHARE)
    trained = logarithms[:num_trained]
    np.save(folder / "integers.npy", (logarithms - trained.mean(0)) / trained.std(0))
    np.save(folder / "labels.npy", np.concatenate(labels))
    all_keys = np.concatenate(keys)
    np.save(folder / "keys.npy", all_keys.view(np.int64))
    numbers = np.unique(all_keys, return_inverse=True)[1].reshape(all_keys.shape)
    np.save(folder / "numbers.npy", numbers.astype(np.int64))
    return num_trained


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """A data set of whole batches: integers float32 [n, 13], keys int64 [n, 26], labels float32 [n]."""

    def __init__(self, folder: Path, keys: str, start: int, stop: int | None, size: int) -> None:
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("integers", keys, "labels")]
        self._tensors = [torch.from_numpy(array[start:stop].copy()) for array in arrays]
        self._size = size

    def __len__(self) -> int:
        return -(-len(self._tensors[0]) // self._size)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        x, keys, labels = (tensor[number * self._size : (number + 1) * self._size] for tensor in self._tensors)
        return x, keys, labels


# The model.


class Dense(nn.Module):
    """The model without the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        widths = (NUM_INTEGERS + NUM_CATEGORIES * DIM, *WIDTHS)
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
        self.mlp = nn.Sequential(*itertools.chain(*layers), nn.Linear(widths[-1], 1))
        self.linear = nn.Linear(NUM_INTEGERS, 1)

    def forward(self, x: Tensor, deep: Tensor, wide: Tensor) -> Tensor:
        logits: Tensor = self.mlp(torch.cat([x, deep.flatten(1)], 1)) + self.linear(x) + wide
        return logits.squeeze(1)


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = pt.Embedding(DIM, initializer=paceline.Normal(std=INITIAL_STD))
        self.wide = pt.EmbeddingBag(1, mode="sum", initializer=paceline.Zeros())
        self.dense = Dense()

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        logits: Tensor = self.dense(x, self.deep(keys), self.wide(keys))
        return logits


@dataclass(frozen=True)
class Task:
    """The settings of every process."""

    folder: Path
    num_trained: int
    batch_size: int
    port: int

    def batches(self, keys: str) -> Batches:
        return Batches(self.folder, keys, 0, self.num_trained, self.batch_size)

    def evaluation(self, keys: str) -> Batches:
        return Batches(self.folder, keys, self.num_trained, None, 4096)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def train(
    task: Task, batches: Iterator[Any], step: Callable[[Tensor, Tensor, Tensor], None], barrier: Callable[[], None]
) -> float:
    """Train one pass. Return this rank's examples/s between the barriers, without the first steps."""
    examples, start = 0, 0.0
    for number, (x, keys, labels) in enumerate(batches):
        if number == WARM_UP_STEPS:
            barrier()
            start = time.perf_counter()
        step(x, keys, labels)
        if number >= WARM_UP_STEPS:
            examples += len(labels)
    barrier()
    return examples / (time.perf_counter() - start)


def evaluate(batches: Batches, predict: Callable[[Tensor, Tensor], Tensor]) -> float:
    labels, scores = [], []
    with torch.no_grad():
        for number in range(len(batches)):
            x, keys, label = batches[number]
            labels.append(label.numpy())
            scores.append(predict(x, keys).numpy())
    return auc(np.concatenate(labels), np.concatenate(scores))


def report(task: Task, rank: int, examples_per_s: float, area: float | None) -> None:
    (task.folder / f"found{rank}.json").write_text(json.dumps({"examples_per_s": examples_per_s, "auc": area}))


# Paceline.


def run_strategy(rank: int, name: str, task: Task, scheduler: str, token: str, num_workers: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_workers), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task.port)}
    os.environ |= {"PACELINE_SCHEDULER": scheduler, "PACELINE_TOKEN": token}
    torch.manual_seed(0)
    with pt.strategy(name) as strategy:
        model: nn.Module = WideAndDeep()
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
        loader: Any = DataLoader(task.batches("keys"), batch_size=None)
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)

        def step(x: Tensor, keys: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model(x, keys), labels))
            optimizer.step()

        examples_per_s = train(task, iter(loader), step, strategy.barrier)
        area = evaluate(task.evaluation("keys"), model) if rank == 0 else None
        report(task, rank, examples_per_s, area)
        strategy.barrier()


def start_strategy(name: str, consistency: Consistency, task: Task) -> None:
    with paceline.local_cluster(servers=1, workers=NUM_WORKERS, consistency=consistency) as cluster:
        spawn(run_strategy, (name, task, cluster.scheduler, cluster.token, NUM_WORKERS), nprocs=NUM_WORKERS)


# The peer.


class RemoteRows(nn.Module):
    """The embeddings on the peer's server."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.deep = nn.Embedding(num_rows, DIM, sparse=True)
        self.wide = nn.EmbeddingBag(num_rows, 1, mode="sum", sparse=True)
        nn.init.normal_(self.deep.weight, std=INITIAL_STD)
        nn.init.zeros_(self.wide.weight)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return self.deep(numbers), self.wide(numbers)

    def parameter_rrefs(self) -> list[Any]:
        return [dist.rpc.RRef(parameter) for parameter in self.parameters()]


def run_rpc(rank: int, task: Task) -> None:
    dist_autograd: Any = importlib.import_module("torch.distributed.autograd")

    from torch.distributed import rpc

    warnings.filterwarnings("ignore", module="torch")  # deprecation warnings in torch's own code
    from torch.distributed.optim import DistributedOptimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{task.port}", num_worker_threads=8)
    name = "server" if rank == NUM_WORKERS else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=NUM_WORKERS + 1, rpc_backend_options=options)
    if rank < NUM_WORKERS:
        store = FileStore(str(task.folder / "store"), NUM_WORKERS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS)
        rows = None
        if rank == 0:
            num_rows = int(np.load(task.folder / "numbers.npy", mmap_mode="r").max()) + 1
            rows = rpc.remote("server", RemoteRows, (num_rows,))
        remote = share(rpc, rank, rows)
        dense = Dense()
        model = DistributedDataParallel(dense)
        parameters = remote.rpc_sync().parameter_rrefs()
        parameters += [rpc.RRef(parameter) for parameter in model.parameters()]
        optimizer = DistributedOptimizer(torch.optim.Adagrad, parameters, lr=LEARNING_RATE)

        def step(x: Tensor, numbers: Tensor, labels: Tensor) -> None:
            with dist_autograd.context() as context:
                deep, wide = remote.rpc_sync().forward(numbers)
                dist_autograd.backward(context, [loss_of(model(x, deep, wide), labels)])
                optimizer.step(context)

        data = task.batches("numbers")
        batches = (data[number] for number in range(rank, len(data), NUM_WORKERS))
        count = len(data) // NUM_WORKERS
        examples_per_s = train(task, itertools.islice(batches, count), step, dist.barrier)
        area = None
        if rank == 0:
            area = evaluate(task.evaluation("numbers"), lambda x, n: dense(x, *remote.rpc_sync().forward(n)))
        report(task, rank, examples_per_s, area)
        dist.barrier()
        dist.destroy_process_group()
    rpc.shutdown()


RECEIVED: list[Any] = []


def take_rows(rows: Any) -> None:
    RECEIVED.append(rows)


def share(rpc: Any, rank: int, rows: Any) -> Any:
    """Return the reference to the server's module. The first trainer creates it and sends it to the others."""
    if rank == 0:
        for other in range(1, NUM_WORKERS):
            rpc.rpc_sync(f"trainer{other}", take_rows, (rows,))
        dist.barrier()
        return rows
    dist.barrier()
    return RECEIVED[0]


def start_rpc(task: Task) -> None:
    (task.folder / "store").unlink(missing_ok=True)
    spawn(run_rpc, (task,), nprocs=NUM_WORKERS + 1)


# All contenders.


CONTENDERS: dict[str, Callable[[Task], None]] = {
    "hybrid bounded:4": lambda task: start_strategy("hybrid", BoundedDelay(tau=4), task),
    "hybrid sequential": lambda task: start_strategy("hybrid", Sequential(aggregate="mean"), task),
    "parameter-server sequential": lambda task: start_strategy("parameter-server", Sequential(aggregate="mean"), task),
    "torch.distributed.rpc": start_rpc,
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="click log in Criteo's format")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="rows per worker")
    parser.add_argument("--only", help="run only contenders whose name contains this text")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prepare_kernels()
    contenders = {name: start for name, start in CONTENDERS.items() if (arguments.only or "") in name}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(prefix="paceline-wide-deep-") as name:
        folder = Path(name)
        num_trained = prepare_data(arguments.data, folder)
        for _ in range(arguments.runs):
            for name, start in contenders.items():
                start(Task(folder, num_trained, arguments.batch_size, free_port()))
                ranks = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(NUM_WORKERS)]
                rate = sum(rank["examples_per_s"] for rank in ranks)
                found[name].append({"examples_per_s": rate, "auc": ranks[0]["auc"]})
    for name, runs in found.items():
        rates, areas = ([run[figure] for run in runs] for figure in ("examples_per_s", "auc"))
        line = {"contender": name, "examples_per_s": statistics.median(rates), "min": min(rates), "max": max(rates),
                "auc": statistics.median(areas), "batch_size": arguments.batch_size, "runs": len(runs)}  # fmt: skip
        if arguments.json:
            print(json.dumps(line))
        else:
            spread = f"({min(rates):,.0f} to {max(rates):,.0f})"
            print(f"{name:28} {line['examples_per_s']:10,.0f} examples/s {spread:22} AUC {line['auc']:.4f}")


if __name__ == "__main__":
    main()

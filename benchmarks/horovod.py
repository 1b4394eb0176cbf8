"""Compare `paceline.horovod` with a raw all-reduce and with DistributedDataParallel, in turns in the same processes.

    python -m benchmarks.horovod [--ranks 2] [--rounds 8] [--json]

`steady` reduces 160 tensors of 4 KB per step. `raw` copies them into one tensor, reduces it with Paceline's group and
copies them back. `named` requests each tensor, `grouped` all in one call. `step` is a training step of a perceptron of
25 million parameters, with `DistributedOptimizer` and with DistributedDataParallel on Paceline and on Gloo. `many` are
10,000 tensors of 64 bytes that each rank requests in another order, in the first and in a later step. The figures are
medians in milliseconds. Horovod itself does not build with current versions of PyTorch, so it is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.ddp_step import BACKENDS, NUM_ROWS, STEPS_PER_ROUND, WIDTHS, Trainee, make_model
from torch.multiprocessing.spawn import spawn

import paceline.horovod as hvd

NUM_TENSORS, NUM_ITEMS = 160, 1024
NUM_MANY = 10_000
STEADY_STEPS = 40


class HorovodTrainee(Trainee):
    """The model of :class:`Trainee` with a distributed optimizer."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01), named_parameters=self.model.named_parameters()
        )
        self.losses, self.seconds = [], []


def steady_kinds() -> dict[str, Callable[[], None]]:
    """Return the steps to compare."""
    tensors = [torch.ones(NUM_ITEMS) for _ in range(NUM_TENSORS)]
    names = [f"layers.{number}.weight" for number in range(NUM_TENSORS)]
    fused, group = torch.empty(NUM_TENSORS * NUM_ITEMS), dist.new_group(backend="paceline")

    def raw() -> None:
        torch.cat(tensors, out=fused)
        dist.all_reduce(fused, group=group)
        torch._foreach_copy_(tensors, fused.split(NUM_ITEMS))

    def named() -> None:
        handles = [hvd.allreduce_async_(tensor, name=name) for tensor, name in zip(tensors, names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)

    def grouped() -> None:
        hvd.grouped_allreduce_(tensors, name="group")

    return {"raw": raw, "named": named, "grouped": grouped}


def many(rank: int) -> None:
    tensors = [torch.ones(16) for _ in range(NUM_MANY)]
    order = list(range(NUM_MANY))
    random.Random(rank).shuffle(order)
    for handle in [hvd.allreduce_async_(tensors[number], name=f"many {number}", op=hvd.Sum) for number in order]:
        hvd.synchronize(handle)
    assert all(tensor[0] == hvd.size() for tensor in tensors)


def run_rank(rank: int, num_ranks: int, num_rounds: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    variables = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    hvd.init()
    found: dict[str, list[float]] = {}

    def measure(name: str, step: Callable[[], Any], num_steps: int) -> None:
        dist.barrier()
        for _ in range(num_steps):
            start = time.perf_counter()
            step()
            found.setdefault(name, []).append(1000 * (time.perf_counter() - start))

    kinds = steady_kinds()
    for round_number in range(num_rounds + 1):
        for name, step in kinds.items():
            measure(f"steady, {name}", step, STEADY_STEPS)
        if round_number == 0:
            found.clear()  # the first round is a warm-up
    measure("many, first", lambda: many(rank), 1)
    measure("many, later", lambda: many(rank), 2)
    trainees = {
        **{f"step, DDP on {backend}": Trainee(dist.new_group(backend=backend)) for backend in BACKENDS},
        "step, DistributedOptimizer": HorovodTrainee(),
    }
    for round_number in range(num_rounds + 1):
        inputs, targets = torch.randn(NUM_ROWS, WIDTHS[0]), torch.randn(NUM_ROWS, WIDTHS[-1])
        for name, trainee in trainees.items():
            dist.barrier()
            for _ in range(STEPS_PER_ROUND):
                trainee.step(inputs, targets)
            if round_number == 0:
                trainee.seconds.clear()
            found[name] = [1000 * seconds for seconds in trainee.seconds]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    hvd.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spawn(run_rank, (options.ranks, options.rounds, folder, port), nprocs=options.ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    medians = {name: round(statistics.median(times), 3) for name, times in found.items()}
    medians["steady, negotiation adds"] = round(medians["steady, named"] - medians["steady, raw"], 3)
    if options.json:
        print(json.dumps(medians))
        return
    for name, median in medians.items():
        print(f"{name:30} {median:10.3f} ms")


if __name__ == "__main__":
    main()

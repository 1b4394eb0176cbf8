"""Compare `paceline.horovod` with a raw all-reduce and with DistributedDataParallel, in turns in the same processes.

    python -m benchmarks.horovod [--parts steady step many] [--rounds 8] [--json]

`steady`, on 2 and on 4 ranks: reduce 160 tensors of 4 KB per step. `raw` copies them into one tensor, reduces it with
Paceline's backend of `torch.distributed`, and copies them back. `named` requests each tensor, and `grouped` requests
all tensors in one call. `requests` is the part of `named` in which the calls request the tensors. `negotiation` is
`named` minus `requests` minus `raw`.

`step`, on 2 ranks: a training step of a ResNet-18 on images of 32 x 32 pixels, and of a perceptron of 25 million
parameters, with `DistributedOptimizer`, with Paceline's strategy `AllReduce` (DDP), and with DDP on Gloo. The ratios
are medians of pairs of steps.

`many`, on 2 ranks: 10,000 tensors of 64 bytes, which each rank requests in a different order, in the first and in a
later step. It also measures how much the memory of rank 0 grows from step 1,000 to step 10,000 with 20 tensors.

Times are medians in milliseconds. Horovod itself does not build with current versions of PyTorch, so it is not
measured.
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
from benchmarks.ddp_step import NUM_ROWS, WIDTHS, make_model
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import paceline.horovod as hvd
from paceline.torch import AllReduce

NUM_TENSORS, NUM_ITEMS, STEADY_STEPS = 160, 1024, 40
NUM_MANY, NUM_LONG = 10_000, 10_000
STEPS_PER_ROUND = {"perceptron": 5, "ResNet-18": 2}
RANKS = {"steady": (2, 4), "step": (2,), "many": (2,)}
Times = dict[str, list[float]]


class Block(nn.Module):
    """A residual block of He et al. (CVPR 2016, section 4.1)."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
            nn.ReLU(),
            nn.Conv2d(num_outputs, num_outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1:
            self.skip = nn.Sequential(
                nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.layers(inputs) + self.skip(inputs))


def resnet() -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for next_width in (64, 128, 256, 512):
        layers += [Block(width, next_width, next_width // width), Block(next_width, next_width, 1)]
        width = next_width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "ResNet-18": (resnet, (4, 3, 32, 32), (4, 10)),
    "perceptron": (make_model, (NUM_ROWS, WIDTHS[0]), (NUM_ROWS, WIDTHS[-1])),
}
"""The model, and the shapes of its inputs and outputs."""


def steady(rank: int, num_rounds: int) -> Times:
    tensors = [torch.ones(NUM_ITEMS) for _ in range(NUM_TENSORS)]
    names = [f"layers.{number}.weight" for number in range(NUM_TENSORS)]
    fused = torch.empty(NUM_TENSORS * NUM_ITEMS)
    found: Times = {}

    def raw() -> None:
        torch.cat(tensors, out=fused)
        dist.all_reduce(fused)
        torch._foreach_copy_(tensors, fused.split(NUM_ITEMS))

    def named() -> None:
        start = time.perf_counter()
        handles = [hvd.allreduce_async_(tensor, name=name) for tensor, name in zip(tensors, names, strict=True)]
        found.setdefault("requests", []).append(1000 * (time.perf_counter() - start))
        for handle in handles:
            hvd.synchronize(handle)

    def grouped() -> None:
        hvd.grouped_allreduce_(tensors, name="group")

    for round_number in range(num_rounds + 1):
        for step in (raw, named, grouped):
            measure(found, step.__name__, step, STEADY_STEPS)
        if round_number == 0:
            found.clear()  # the first round is a warm-up
    return found


def measure(found: Times, name: str, step: Callable[[], Any], num_steps: int) -> None:
    dist.barrier()
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        found.setdefault(name, []).append(1000 * (time.perf_counter() - start))


def many(rank: int, num_rounds: int) -> Times:
    tensors = [torch.ones(16) for _ in range(NUM_MANY)]
    order = list(range(NUM_MANY))
    random.Random(rank).shuffle(order)

    def reduce() -> None:
        for tensor in tensors:
            tensor.fill_(1.0)
        for handle in [hvd.allreduce_async_(tensors[number], name=f"many {number}", op=hvd.Sum) for number in order]:
            hvd.synchronize(handle)
        assert all(tensor[0] == hvd.size() for tensor in tensors)

    found: Times = {}
    measure(found, "many, first step", reduce, 1)
    measure(found, "many, later step", reduce, max(1, num_rounds // 2))
    few = tensors[:20]
    for number in range(1, NUM_LONG + 1):
        for handle in [hvd.allreduce_async_(tensor, name=str(place)) for place, tensor in enumerate(few)]:
            hvd.synchronize(handle)
        if number == 1000:
            before_kb = resident_kb()
    found[f"growth of the memory over {NUM_LONG:,} steps, in MB"] = [(resident_kb() - before_kb) / 1024]
    return found


def resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def step(rank: int, num_rounds: int) -> Times:
    found: Times = {}
    gloo, strategy = dist.new_group(backend="gloo"), AllReduce()
    for title, (make, input_shape, output_shape) in MODELS.items():
        trained: dict[str, tuple[nn.Module, Any]] = {}
        for name in ("DDP strategy", "DDP on Gloo", "DistributedOptimizer"):
            model = make()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
            if name == "DDP strategy":
                model, optimizer = strategy.prepare(model, optimizer)
            elif name == "DDP on Gloo":
                model = DistributedDataParallel(model, process_group=gloo)
            else:
                optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            trained[name] = model, optimizer
        for round_number in range(2 * num_rounds + 1):
            inputs, targets = torch.randn(input_shape), torch.randn(output_shape)
            for name in sorted(trained, reverse=bool(round_number % 2)):
                model, optimizer = trained[name]

                def train(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                    optimizer.zero_grad()
                    torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))  # noqa: B023
                    optimizer.step()

                measure(found, f"{title}, {name}", train, STEPS_PER_ROUND[title])
                if round_number == 0:
                    del found[f"{title}, {name}"]
    strategy.close()
    return found


def run_rank(rank: int, part: str, num_ranks: int, num_rounds: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = f"file://{folder}/store {part} {num_ranks}"
    dist.init_process_group("paceline", init_method=store, rank=rank, world_size=num_ranks)
    hvd.init()
    found = {"steady": steady, "step": step, "many": many}[part](rank, num_rounds)
    if rank == 0:
        Path(folder, f"{part} {num_ranks}").write_text(json.dumps(found))
    hvd.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def summarize(part: str, num_ranks: int, found: Times) -> dict[str, float]:
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    if part == "steady":
        medians["negotiation"] = round(medians["named"] - medians["requests"] - medians["raw"], 3)
        return {f"{num_ranks} ranks, {name}": median for name, median in medians.items()}
    if part == "step":
        for title in MODELS:
            for reference in ("DDP strategy", "DDP on Gloo"):
                pairs = zip(found[f"{title}, DistributedOptimizer"], found[f"{title}, {reference}"], strict=True)
                ratio = statistics.median(one / other for one, other in pairs)
                medians[f"{title}, ratio to {reference}"] = round(ratio, 3)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            for num_ranks in RANKS[part]:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = probe.getsockname()[1]
                spawn(run_rank, (part, num_ranks, options.rounds, folder, port), nprocs=num_ranks)
                found.update(summarize(part, num_ranks, json.loads(Path(folder, f"{part} {num_ranks}").read_text())))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:50} {value:10.3f}")


if __name__ == "__main__":
    main()

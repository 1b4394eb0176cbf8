"""Compare strategies with PyTorch alone on one CUDA device: time of a step, peak memory, last loss.

    make gpu [GPU_PYTHON=python3]
    python benchmarks/gpu.py [--json FILE] [--docs FILE] [--only TEXT] [--rounds 1]

There are two models, both in float32 with SGD: a perceptron with 25 million parameters, and a model with an embedding
of 16 million. Each contender trains on the same batches. It has its own processes, so that its peak memory can be
measured. With two ranks, each rank has half of the batch. The time of a step is the median of 30 steps after 5 steps of
warm-up. The device is synchronized after each step. The table shows the median of the rounds. ``--device cpu`` runs a
small version of everything, to test this program.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.torch as pt
from paceline.launch import prepare_kernels

PATIENCE_S = 100.0
START, END = "<!-- figures of make gpu -->", "<!-- end of figures -->"
STRATEGIES: list[Any] = []
"""The strategies of this process, to close at the end."""
Prepare = Callable[[nn.Module, torch.optim.Optimizer, torch.device], tuple[Any, Any]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of models and batches."""

    widths: tuple[int, ...] = (1024, 4096, 4096, 1024)
    rows: int = 4096
    num_keys: int = 1_000_000
    dim: int = 16
    keys_per_row: int = 8
    warm_up: int = 5
    steps: int = 30


SMALL = Sizes(widths=(8, 16, 4), rows=8, num_keys=100, dim=4, keys_per_row=2, warm_up=1, steps=2)


@dataclass(frozen=True)
class Contender:
    """A way to train. `prepare` returns the model and the optimizer of one rank."""

    name: str
    prepare: Prepare
    peer: str = "PyTorch alone"
    num_ranks: int = 1
    has_servers: bool = False
    backend: str | None = None
    has_embedding: bool = False
    only_cuda: bool = False


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Any, Any]:
    return model, optimizer


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Any, Any]:
    return DistributedDataParallel(model), optimizer


def strategy(name: str, **options: Any) -> Prepare:
    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Any, Any]:
        chosen = {"devices": [device]} if name == "mirrored" else {"device": device}
        STRATEGIES.append(pt.strategy(name, **chosen, **options))
        return STRATEGIES[-1].prepare(model, optimizer)  # type: ignore[no-any-return]

    return prepare


CONTENDERS = (
    Contender("PyTorch alone", plain),
    Contender("one-device", strategy("one-device")),
    Contender("mirrored, one device", strategy("mirrored")),
    Contender("DDP, NCCL, 1 rank", ddp, backend="nccl", only_cuda=True),
    Contender("all-reduce, NCCL, 1 rank", strategy("all-reduce", backend="nccl"), "DDP, NCCL, 1 rank", only_cuda=True),
    Contender("all-reduce, paceline, 1 rank", strategy("all-reduce", backend="paceline"), "DDP, NCCL, 1 rank"),
    Contender("DDP, Gloo, 2 ranks", ddp, num_ranks=2, backend="gloo"),
    Contender("all-reduce, paceline, 2 ranks", strategy("all-reduce"), "DDP, Gloo, 2 ranks", num_ranks=2),
    Contender("parameter-server", strategy("parameter-server"), has_servers=True),
    Contender("parameter-server, no overlap", strategy("parameter-server", overlap=False), has_servers=True),
    Contender("parameter-server, 2 ranks", strategy("parameter-server"), "DDP, Gloo, 2 ranks", 2, has_servers=True),
    Contender("PyTorch alone, embedding", plain, has_embedding=True),
    Contender(
        "hybrid",
        strategy("hybrid"),
        "PyTorch alone, embedding",
        has_servers=True,
        backend="paceline",
        has_embedding=True,
    ),
)


class Perceptron(nn.Sequential):
    def __init__(self, widths: tuple[int, ...]) -> None:
        layers: list[nn.Module] = []
        for width, next_width in itertools.pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        super().__init__(*layers[:-1])


class Embedded(nn.Module):
    """An embedding and a perceptron. All rows start at 0.1, so both kinds of embedding have equal values."""

    def __init__(self, sizes: Sizes, *, is_on_servers: bool) -> None:
        super().__init__()
        self.dense = Perceptron((sizes.keys_per_row * sizes.dim, sizes.widths[1], sizes.widths[-1]))
        if is_on_servers:
            self.rows: nn.Module = pt.Embedding(sizes.dim, initializer=paceline.Constant(value=0.1))
        else:
            embedding = nn.Embedding(sizes.num_keys, sizes.dim, sparse=True)
            nn.init.constant_(embedding.weight, 0.1)
            self.rows = embedding

    def forward(self, keys: Tensor) -> Any:
        return self.dense(self.rows(keys).flatten(1))


def batches(sizes: Sizes, contender: Contender, rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rank's parts of the batches, which are the same for all contenders."""
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(sizes.warm_up + sizes.steps):
        if contender.has_embedding:
            shape = (sizes.rows, sizes.keys_per_row)
            inputs = torch.randint(sizes.num_keys, shape, device=device, generator=generator)
        else:
            inputs = torch.randn(sizes.rows, sizes.widths[0], device=device, generator=generator)
        targets = torch.randn(sizes.rows, sizes.widths[-1], device=device, generator=generator)
        yield inputs.chunk(contender.num_ranks)[rank], targets.chunk(contender.num_ranks)[rank]


def run_rank(rank: int, number: int, sizes: Sizes, device_name: str, folder: str) -> None:
    contender = CONTENDERS[number]
    device = torch.device(device_name)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (contender.num_ranks + 1)))
    if contender.num_ranks > 1 or contender.has_servers:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(contender.num_ranks), LOCAL_RANK=str(rank))
    if contender.num_ranks > 1 or contender.backend:
        store = f"file://{folder}/store"
        backend = contender.backend or "paceline"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=contender.num_ranks)
    torch.manual_seed(1)
    is_on_servers = contender.has_servers
    model: Any = Embedded(sizes, is_on_servers=is_on_servers) if contender.has_embedding else Perceptron(sizes.widths)
    model = model.to(device)
    model, optimizer = contender.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    loss = torch.zeros(())
    for inputs, targets in batches(sizes, contender, rank, device):
        synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    found = {"seconds": seconds[sizes.warm_up :], "loss": loss.item(), "peak_bytes": peak}
    Path(folder, f"found{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
    for prepared in STRATEGIES:
        prepared.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def run_contender(number: int, sizes: Sizes, device: str) -> dict[str, Any]:
    """Train once. Return the median time of a step, the ranks' mean loss, and the sum of their peak memory."""
    contender = CONTENDERS[number]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-gpu-"))
        if contender.has_servers:
            consistency = paceline.Sequential(aggregate="mean")
            cluster = paceline.local_cluster(servers=1, workers=contender.num_ranks, consistency=consistency)
            running = stack.enter_context(cluster)
            os.environ.update(PACELINE_SCHEDULER=running.scheduler, PACELINE_TOKEN=running.token)
        context: Any = spawn(run_rank, (number, sizes, device, folder), nprocs=contender.num_ranks, join=False)
        deadline = time.monotonic() + PATIENCE_S
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not done after {PATIENCE_S:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        ranks = [json.loads(Path(folder, f"found{rank}.json").read_text()) for rank in range(contender.num_ranks)]
    return {
        "step_s": statistics.median(ranks[0]["seconds"]),
        "loss": statistics.fmean(rank["loss"] for rank in ranks),
        "peak_bytes": sum(rank["peak_bytes"] for rank in ranks),
    }


def time_copies(sizes: Sizes, device: str) -> float:
    """Return the seconds to copy the perceptron's gradients to pinned host memory and its values back."""
    count = sum(parameter.numel() for parameter in Perceptron(sizes.widths).parameters())
    device_values, host_values = torch.zeros(count, device=device), torch.zeros(count, pin_memory=device == "cuda")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        host_values.copy_(device_values)
        device_values.copy_(host_values)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def table(report: dict[str, Any]) -> str:
    """Return the figures as lines of Markdown."""
    rows = {row["name"]: row for row in report["contenders"]}
    lines = [
        f"{report['device']}, torch {report['torch']}. Gradients to pinned host memory and values back, alone: "
        f"{report['copies_s'] * 1e3:.2f} ms.",
        "",
        "| contender | ms a step | beside | times as long | peak memory, MiB | last loss |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for name, row in rows.items():
        if row["error"]:
            lines.append(f"| {name} | failed |  |  |  |  |")
            continue
        peer = rows.get(row["peer"])
        has_peer = peer is not None and peer is not row and not peer["error"]
        comparison = f"{row['peer']} | {row['step_s'] / peer['step_s']:.2f}" if has_peer and peer is not None else " | "
        memory = row["peak_bytes"] / 2**20
        lines.append(f"| {name} | {row['step_s'] * 1e3:.2f} | {comparison} | {memory:,.0f} | {row['loss']:.5f} |")
    return "\n".join(lines)


def write_docs(path: Path, report: dict[str, Any]) -> None:
    """Replace the figures between the two markers of a page."""
    before, _, remainder = path.read_text().partition(START)
    _, _, after = remainder.partition(END)
    path.write_text(f"{before}{START}\n{table(report)}\n{END}{after}")


def measure(names: list[str], sizes: Sizes, device: str, num_rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    for _ in range(num_rounds):
        for number, contender in enumerate(CONTENDERS):
            if contender.name not in names or contender.name in errors:
                continue
            try:
                found[contender.name].append(run_contender(number, sizes, device))
                print(time.strftime("%X"), contender.name, found[contender.name][-1], file=sys.stderr, flush=True)
            except Exception:  # continue with the other contenders; the exit status reports the failure
                errors[contender.name] = traceback.format_exc()
                print(f"{contender.name} failed:\n{errors[contender.name]}", file=sys.stderr, flush=True)
    contenders = []
    for contender in CONTENDERS:
        if contender.name in names:
            runs = found[contender.name]
            error = errors.get(contender.name, "")
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]} if runs else {}
            contenders.append({"name": contender.name, "peer": contender.peer, "error": error, **medians})
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "sizes": asdict(sizes),
        "rounds": num_rounds,
        "copies_s": time_copies(sizes, device),
        "contenders": contenders,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="measure only contenders whose name contains this text")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--docs", type=Path, help="page whose figures are replaced")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device is available: nothing was measured.")
        return
    prepare_kernels()
    sizes = Sizes() if options.device == "cuda" else SMALL
    names = [contender.name for contender in CONTENDERS if options.only in contender.name]
    if options.device == "cpu":
        names = [contender.name for contender in CONTENDERS if contender.name in names and not contender.only_cuda]
    report = measure(names, sizes, options.device, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.docs:
        write_docs(options.docs, report)
    print(table(report))
    sys.exit(any(row["error"] for row in report["contenders"]))


if __name__ == "__main__":
    main()

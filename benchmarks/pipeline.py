"""Compare a step of ``--strategy pipeline`` with the same schedule of torch.distributed.pipelining over Gloo.

    paceline run --strategy pipeline --stages 2 benchmarks/pipeline.py [transformer] [mlp] [small]
    paceline run --strategy pipeline --stages 2 benchmarks/pipeline.py --losses
    paceline run --strategy pipeline --stages 2 benchmarks/pipeline.py --predictions

The first command trains the same models (1f1b, 8 microbatches) in the same processes in turns, with one thread each.
Rank 0 also trains the whole model alone. The command prints the median milliseconds of a step, and the efficiency. It
also prints two upper bounds of the efficiency:

- the bound for equal stages, free transfers and cores that do not share memory: 1 - (p - 1)/(m + p - 1);
- the bound of this machine: the first bound, computed with the speed of the stages when all processes compute at the
same time and send no messages.

``--losses`` compares 50 losses with the losses of one process. ``--predictions`` compares predicted and measured steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F  # noqa: N812

import paceline.torch as pt
from paceline.torch.strategies.pipeline.plan.timeline import bubble_bound

MICROBATCHES, WARM_UP, STEPS, LOSSES = 8, 3, 12, 50
SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv")


@dataclass(frozen=True)
class Workload:
    """A model of equal blocks, and a batch for it."""

    block: Callable[[], nn.Module]
    num_blocks: int
    batch: tuple[int, ...]

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(self.block() for _ in range(self.num_blocks)))

    def data(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows or self.batch[0], *self.batch[1:], generator=torch.Generator().manual_seed(3))
        return x, x.flip(0)


def transformer_block() -> nn.Module:
    return nn.TransformerEncoderLayer(320, 5, 1280, dropout=0.0, batch_first=True)


def perceptron_block(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh())


WORKLOADS = {
    "transformer": Workload(transformer_block, 8, (32, 64, 320)),  # 10 million parameters
    "mlp": Workload(perceptron_block(1772), 8, (256, 1772)),  # 25 million
    "small": Workload(perceptron_block(64), 8, (64, 64)),  # so small that the overhead is measured
}


def timed(run: Callable[[], object], group: dist.ProcessGroup) -> float:
    dist.barrier(group)
    began = time.perf_counter()
    run()
    dist.barrier(group)
    return time.perf_counter() - began


def median_seconds(runs: list[Callable[[], object]], group: dist.ProcessGroup) -> list[float]:
    """Return the median seconds of each function, measured in turns."""
    times = [[timed(run, group) for run in runs] for _ in range(WARM_UP + STEPS)][WARM_UP:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def trainer(prepared: tuple[nn.Module, torch.optim.Optimizer], x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    model, optimizer = prepared

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def compare(name: str, gloo: dist.ProcessGroup) -> None:
    work, rank, size = WORKLOADS[name], dist.get_rank(), dist.get_world_size()
    x, y = work.data()
    blocks_per_stage = work.num_blocks // size
    split = [str(number) for number in range(blocks_per_stage, work.num_blocks, blocks_per_stage)]
    strategy = pt.Pipeline(schedule="1f1b", microbatches=MICROBATCHES, split=split)
    model = work.model()
    pipeline_step = trainer(strategy.prepare(model, sgd(model)), x, y)

    own = work.model()[rank * blocks_per_stage : (rank + 1) * blocks_per_stage]
    stage = PipelineStage(own, rank, size, torch.device("cpu"), group=gloo)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = sgd(own)

    def over_gloo() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        optimizer.step()

    whole_model = work.model()
    single_step = trainer((whole_model, sgd(whole_model)), x, y)
    parts = list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))
    stage_alone = work.model()[rank * blocks_per_stage : (rank + 1) * blocks_per_stage]
    other = sgd(stage_alone)

    def compute_stage() -> None:
        other.zero_grad()
        for part, target in parts:
            F.mse_loss(stage_alone(part.requires_grad_()), target).backward()
        other.step()

    def only_rank_0(run: Callable[[], object]) -> Callable[[], object]:
        return run if rank == 0 else lambda: None

    runs: list[Callable[[], object]] = [
        pipeline_step,
        over_gloo,
        only_rank_0(single_step),
        only_rank_0(compute_stage),
        compute_stage,
    ]
    pipeline_s, gloo_s, single, quiet, stage_s = median_seconds(runs, gloo)
    bound = 1 - bubble_bound(size, MICROBATCHES)
    machine_bound = bound * single / size / stage_s
    efficiency = single / pipeline_s / size
    strategy.print(
        f"{name}, {size} stages: pipeline {pipeline_s * 1e3:.1f} ms, the same schedule over Gloo {gloo_s * 1e3:.1f} ms "
        f"({gloo_s / pipeline_s:.2f}x), one process {single * 1e3:.1f} ms; efficiency {efficiency:.3f}, bound "
        f"{bound:.3f} ({efficiency / bound:.2f} of it), bound of this machine {machine_bound:.3f} "
        f"({efficiency / machine_bound:.2f} of it): "
        f"{MICROBATCHES} microbatches of one stage take {quiet * 1e3:.1f} ms alone, {stage_s * 1e3:.1f} ms beside the "
        f"others; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    strategy.close()


def compare_losses(name: str) -> None:
    work = WORKLOADS[name]
    x, y = work.data(16)
    strategy = pt.Pipeline(schedule="1f1b", microbatches=MICROBATCHES)
    model, whole_model = work.model(), work.model()
    pipeline_step, single_step = (
        trainer(strategy.prepare(model, sgd(model)), x, y),
        trainer((whole_model, sgd(whole_model)), x, y),
    )
    found = [float(pipeline_step()) for _ in range(LOSSES)]
    if strategy.rank == 0:
        expected = [float(single_step()) for _ in range(LOSSES)]
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        print(f"{name}: {LOSSES} losses, {found[0]:.6f} to {found[-1]:.6f}, within {worst:.1e} of one process's")
    strategy.close()


def compare_predictions(name: str, gloo: dist.ProcessGroup) -> None:
    work = WORKLOADS[name]
    x, y = work.data()
    for schedule in SCHEDULES:
        for microbatches in (4, 8):
            strategy = pt.Pipeline(schedule=schedule, microbatches=microbatches)
            model = work.model()
            step = trainer(strategy.prepare(model, sgd(model)), x, y)
            times = [timed(step, gloo) for _ in range(WARM_UP + STEPS)][WARM_UP:]
            assert strategy.plan is not None
            predicted, measured = strategy.plan.timeline.step_s, statistics.median(times)
            strategy.print(
                f"{name}, {schedule}, {microbatches} microbatches, cuts {list(strategy.plan.cuts)}: predicted "
                f"{predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms, ratio {predicted / measured:.3f}"
            )
            strategy.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], default=["transformer", "mlp", "small"])
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--predictions", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    gloo = dist.new_group(backend="gloo")
    for name in options.workloads:
        if options.losses:
            compare_losses(name)
        elif options.predictions:
            compare_predictions(name, gloo)
        else:
            compare(name, gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

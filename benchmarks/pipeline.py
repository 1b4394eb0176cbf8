"""A step of ``--strategy pipeline`` beside the same schedule of torch.distributed.pipelining over Gloo.

    paceline run --strategy pipeline --stages 2 benchmarks/pipeline.py

Both train the same transformer (8 layers, 1f1b, 8 microbatches) in the same two processes, in turns, one thread each;
rank 0 trains it alone too. Printed: median milliseconds of a step, and the efficiency beside its bound
1 - (p - 1)/(m + p - 1).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F  # noqa: N812

import paceline.torch as pt
from paceline.torch.strategies.pipeline.plan.timeline import bubble_bound

MICROBATCHES, WARM_UP, STEPS, WIDTH, LAYERS = 8, 4, 20, 256, 8


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS))
    )


def median_ms(times: list[float]) -> float:
    return statistics.median(times[WARM_UP:]) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(16, 32, WIDTH, generator=torch.Generator().manual_seed(3))
    y = x.flip(0)
    strategy = pt.Pipeline(schedule="1f1b", microbatches=MICROBATCHES, split=["4"])
    model = make()
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    gloo = dist.new_group(backend="gloo")
    own = make()[:4] if strategy.rank == 0 else make()[4:]
    stage = PipelineStage(own, strategy.rank, 2, torch.device("cpu"), group=gloo)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    other = torch.optim.SGD(own.parameters(), lr=1e-3)
    whole = make()
    alone = torch.optim.SGD(whole.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    def step_over_gloo() -> None:
        other.zero_grad()
        if strategy.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        other.step()

    def step_alone() -> None:
        if strategy.rank == 0:
            alone.zero_grad()
            F.mse_loss(whole(x), y).backward()
            alone.step()

    runs: list[tuple[Callable[[], None], list[float]]] = [(step, []), (step_over_gloo, []), (step_alone, [])]
    for _ in range(WARM_UP + STEPS):
        for run, times in runs:
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            times.append(time.perf_counter() - began)
    ours, theirs, single = (median_ms(times) for _, times in runs)
    strategy.print(
        f"pipeline {ours:.1f} ms, the same schedule over Gloo {theirs:.1f} ms ({theirs / ours:.2f}x), one process "
        f"{single:.1f} ms; efficiency {single / ours / 2:.3f}, bound {1 - bubble_bound(2, MICROBATCHES):.3f}; load "
        f"average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    dist.destroy_process_group(gloo)
    strategy.close()


if __name__ == "__main__":
    main()

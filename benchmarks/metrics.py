"""Measure the cost of metrics in the training loop of two ranks: steps with and without a recorder, in turns.

    python -m benchmarks.metrics [--ranks 2] [--steps 2000] [--json]

Each rank trains two copies of a small model under DistributedDataParallel on Paceline's collectives. Half of the steps
are recorded as under ``paceline run --metrics``, with a report to the launcher every second. The program prints the
median step of both copies, and the median difference of neighboring steps in the processor time of the training
thread, which other programs change little. It also prints the processor time of the recorder's calls alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch  # noqa: F401  (registers the backend)
from paceline.environment import environment
from paceline.observe import recording
from paceline.observe.collector import Collector
from paceline.torch.strategies.step_phases import StepPhases

_WIDTH, _ROWS = 64, 16  # the step is short, so that the recorder's cost exceeds the noise
_CALLS = 20_000


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(3) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(model(batch).square().mean())
    optimizer.step()


def run_rank(rank: int, size: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("paceline", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    recorder = recording.start(environment())
    assert recorder is not None
    plain, recorded = make_model(), make_model()
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, recorded)}
    phases = StepPhases(recorder, lambda: True)
    phases.watch([optimizers[recorded]], None)
    batch = torch.randn(_ROWS, _WIDTH)
    seconds: dict[nn.Module, list[tuple[float, float]]] = {plain: [], recorded: []}
    for number in range(2 * steps):
        model = recorded if number % 4 in (1, 2) else plain  # each copy is the first one equally often
        recording.recorder = recorder if model is recorded else None
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        for item in phases.batches(iter([batch])) if model is recorded else [batch]:
            train(model, optimizers[model], item)
        seconds[model].append((time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s))
    recording.recorder = recorder
    begin_s = time.thread_time()  # other programs do not change it
    for _ in range(_CALLS):  # the calls of a step
        for _ in phases.batches(iter([batch])):
            for phase in ("backward", "communication", "other", "optimizer", "other"):
                recorder.enter(phase)
            recorder.arrive()
            recorder.observe("paceline_collective_seconds", 0.001, "all_reduce", "shared")
            recorder.add("paceline_collective_bytes_total", 1024, "all_reduce")
    calls_s = (time.thread_time() - begin_s) / _CALLS
    before, after = (values[steps // 10 :] for values in seconds.values())  # the first steps are slower
    result = {
        "plain_s": statistics.median(wall_s for wall_s, _ in before),
        "recorded_s": statistics.median(wall_s for wall_s, _ in after),
        "difference_s": statistics.median(b - a for (_, a), (_, b) in zip(before, after, strict=True)),
        "calls_s": calls_s,
    }
    Path(folder, f"result{rank}").write_text(json.dumps(result))
    dist.destroy_process_group()
    recording.stop()


def measure(size: int, steps: int) -> dict[str, Any]:
    """Return the figures of rank 0, in seconds."""
    with tempfile.TemporaryDirectory() as folder, Collector() as collector:
        collector.start()
        spawn(run_rank, (size, steps, folder), nprocs=size)
        found: dict[str, Any] = json.loads(Path(folder, "result0").read_text())
        assert len(collector.samples()["paceline_rank_last_seen_seconds"]) == size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = measure(options.ranks, options.steps)
    if options.json:
        print(json.dumps(found))
        return
    plain_s = found["plain_s"]
    print(f"step without metrics  {1e3 * plain_s:7.2f} ms")
    print(f"step with metrics     {1e3 * found['recorded_s']:7.2f} ms")
    difference_s = found["difference_s"]
    print(f"median difference     {1e6 * difference_s:+7.1f} us of processor time, {difference_s / 0.01:+.2%} of 10 ms")
    print(f"recorder's calls      {1e6 * found['calls_s']:7.1f} us, {found['calls_s'] / 0.01:.2%} of 10 ms")


if __name__ == "__main__":
    main()

"""Measure the effect of a slow worker under each consistency.

    python benchmarks/stragglers.py --data DIR [--consistency sequential bounded:4 eventual] [--json]

DIR has the four files of MNIST. Three workers train an MLP of 200,000 parameters with one server. In each step a worker
sleeps `--step-ms` after backward. This is much longer than it computes, so three workers do not compete for two cores.
A slow worker sleeps three times as long. There are two cases:

- *in turns*: each worker in turn is slow for two iterations, as if other users shared the machines;
- *always the last*: the same worker is always slow, like a slower machine.

Examples/s are those of all workers until the first worker has finished. The time to 97% is the wall time until the
model on the servers classifies 97% of the test images correctly. Rank 0 copies the model every ten steps, and the
program evaluates the copies afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKERS = 3
SLOWDOWN = 3.0
TURN = 2
TARGET = 0.97
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def is_slow(rank: int, step: int, slow_worker: str) -> bool:
    """Return whether a worker is slow in a step."""
    return rank == WORKERS - 1 if slow_worker == "last" else step // TURN % WORKERS == rank


def work(options: argparse.Namespace) -> None:
    """Run one worker. Rank 0 prints the result."""
    import torch
    from mnist import count_right, make_model, read_split  # type: ignore[import-not-found]  # examples/mnist.py
    from torch.nn import functional

    import paceline.torch as pt

    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = pt.strategy()
    images, labels = read_split(options.data, "train", None)
    model = make_model("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)
    model, optimizer = strategy.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(strategy.rank)
    copies: list[tuple[float, dict[str, torch.Tensor]]] = []
    strategy.barrier()
    began = time.perf_counter()
    for step in range(options.steps):
        chosen = torch.randint(len(images), (64,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        if strategy.is_main and step % 10 == 0:
            values = {name: value.clone() for name, value in model.state_dict().items()}
            copies.append((time.perf_counter() - began, values))
        time.sleep(options.step_ms / 1000 * (SLOWDOWN if is_slow(strategy.rank, step, options.slow_worker) else 1.0))
        optimizer.step()
    seconds = time.perf_counter() - began
    ends = strategy.reduce(seconds, "min")
    steps = strategy.reduce(options.steps * ends / seconds, "sum")
    if strategy.is_main:
        test_images, test_labels = read_split(options.data, "t10k", None)
        reached = None
        fresh = make_model("mlp")
        for when, values in copies:
            fresh.load_state_dict(values)
            if count_right(fresh, test_images, test_labels) >= TARGET * len(test_labels):
                reached = when
                break
        print(json.dumps({"examples_per_s": 64 * steps / ends, "time_to_target_s": reached}), flush=True)
    strategy.close()


def main() -> None:
    """Run each consistency, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of the four MNIST files")
    parser.add_argument("--consistency", nargs="+", default=["sequential", "bounded:4", "eventual"])
    parser.add_argument("--who", dest="slow_worker", nargs="+", choices=("turns", "last"), default=["turns", "last"])
    parser.add_argument("--steps", type=int, default=900, help="steps of each worker")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    if os.environ.get("PACELINE_ROLE") == "worker":
        options.slow_worker = options.slow_worker[0]
        work(options)
        return
    rows: list[dict[str, Any]] = []
    for slow_worker in options.slow_worker:
        for consistency in options.consistency:
            command = [
                *(sys.executable, "-m", "paceline", "run", "--strategy", "parameter-server", "--servers", "1"),
                *("--nproc-per-node", str(WORKERS), "--consistency", consistency, __file__),
                *("--data", str(options.data), "--who", slow_worker),
                *("--steps", str(options.steps), "--step-ms", str(options.step_ms)),
            ]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]),
            }
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(done.returncode)
            found = json.loads(done.stdout[done.stdout.index("{") :])
            rows.append({"slow": slow_worker, "consistency": consistency, **found})
            if options.json:
                print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(
            f"{WORKERS} workers, one slowed {SLOWDOWN:g} times; {options.steps} steps each, of {options.step_ms:g} ms"
        )
        print(f"{'slow':14}{'consistency':14}{'examples/s':>12}{'ratio':>8}{'time to 97%':>14}")
        for row in rows:
            first = next(other for other in rows if other["slow"] == row["slow"])
            reached = row["time_to_target_s"]
            print(
                f"{'in turns' if row['slow'] == 'turns' else 'always one':14}{row['consistency']:14}"
                f"{row['examples_per_s']:12,.0f}{row['examples_per_s'] / first['examples_per_s']:7.2f}x"
                f"{'not reached' if reached is None else f'{reached:.1f} s':>14}"
            )


if __name__ == "__main__":
    main()

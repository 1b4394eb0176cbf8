"""Solve the 2-D heat equation u_t = alpha (u_xx + u_yy) for a plate, on several ranks.

    python examples/heat.py --ranks 4 --size 256 --steps 500
    torchrun --nproc-per-node 4 examples/heat.py          (or any launcher that sets RANK)

The plate has size x size cells, with a hot spot and one hot edge. The ranks form a grid, and each rank owns a block of
the plate. Around the block is a ghost layer with copies of the neighbours' cells. An explicit step of the 5-point
stencil is

    u[i, j]  +=  c (u[i-1, j] + u[i+1, j] + u[i, j-1] + u[i, j+1] - 4 u[i, j]),    c = alpha dt / h^2

Before each step the ranks exchange their ghost layers. At the end rank 0 solves the whole plate alone. Both results
must be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray

from paceline import PacelineError, UsageError
from paceline.collectives import Grid, Group, init
from paceline.environment import environment

C = 0.2  # alpha dt / h^2; stable up to 1/4
SHADES = " .:-=+*#%@"
Plate = NDArray[np.float64]


def plate(size: int) -> Plate:
    """Return the initial plate and its constant border: hot above, cold on the other sides."""
    row, column = np.ogrid[-1 : size + 1, -1 : size + 1]
    u = np.where((row - 0.6 * size) ** 2 + (column - 0.35 * size) ** 2 < (0.15 * size) ** 2, 1.0, 0.0)
    u[[0, -1], :] = u[:, [0, -1]] = 0.0
    u[0, 1:-1] = 1.0
    return u


def step(u: Plate, new: Plate) -> None:
    """Write the next state of the cells into `new`, without its border."""
    cells = u[1:-1, 1:-1]
    change = -4.0 * cells
    for neighbours in (u[:-2, 1:-1], u[2:, 1:-1], u[1:-1, :-2], u[1:-1, 2:]):
        change += neighbours
    change *= C
    np.add(cells, change, out=new[1:-1, 1:-1])


def solve(u: Plate, steps: int, grid: Grid | None = None) -> Plate:
    """Return the cells of the plate, or of this rank's block, after `steps` steps. `u` includes the border."""
    new = u.copy()
    for _ in range(steps):
        if grid is not None:
            grid.exchange_halos(u)
        step(u, new)
        u, new = new, u
    return u[1:-1, 1:-1]


def gather(grid: Grid, block: Plate, size: int) -> Plate | None:
    """Return the whole plate on rank 0, and None on the other ranks."""
    full_plate = np.empty((size, size))
    parts = [full_plate[grid.local_slice(full_plate.shape, rank=rank)] for rank in range(grid.group.size)]
    sizes = [part.size for part in parts]
    gathered = grid.group.gather(block.ravel(), sizes=sizes)
    if gathered is None:
        return None
    for part, cells in zip(parts, np.split(gathered, np.cumsum(sizes)[:-1]), strict=True):
        part[...] = cells.reshape(part.shape)
    return full_plate


def run(group: Group, size: int, steps: int, as_json: bool) -> int:
    """Solve the equation on one rank. Rank 0 compares and prints the results. Return the exit status."""
    grid = Grid(group)
    rows, columns = grid.local_slice((size, size))
    u = plate(size)[rows.start : rows.stop + 2, columns.start : columns.stop + 2].copy()
    group.barrier()
    began = time.perf_counter()
    block = solve(u, steps, grid)
    group.barrier()
    seconds = time.perf_counter() - began
    full_plate = gather(grid, block, size)
    if full_plate is None:
        return 0
    began = time.perf_counter()
    alone = solve(plate(size), steps)
    seconds_alone = time.perf_counter() - began
    difference = float(np.abs(full_plate - alone).max())
    if as_json:
        report = {"ranks": group.size, "grid": grid.shape, "size": size, "steps": steps, "difference": difference}
        print(
            json.dumps(report | {"seconds": seconds, "seconds_alone": seconds_alone, "mean": float(full_plate.mean())})
        )
    else:
        for cells in full_plate[
            np.ix_(np.linspace(0, size - 1, 16).astype(int), np.linspace(0, size - 1, 48).astype(int))
        ]:
            print("  " + "".join(SHADES[int(cell * (len(SHADES) - 1) + 0.5)] for cell in cells))
        print(f"{size} x {size} cells, {steps} steps, mean temperature {full_plate.mean():.6f}")
        print(
            f"{group.size} ranks as {' x '.join(map(str, grid.shape))}: {seconds:.3f} s; alone: {seconds_alone:.3f} s"
        )
        print(f"greatest difference: {difference}")
    return 0 if difference <= 1e-12 else 1


def start_ranks(num_ranks: int) -> int:
    """Start this program once per rank, like a launcher. Return the first exit status that is not 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            variables = os.environ | address | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=variables))
        while any(process.poll() is None for process in ranks) and not any(process.returncode for process in ranks):
            time.sleep(0.02)
        return next((process.returncode for process in ranks if process.returncode), 0)
    finally:
        for process in ranks:
            process.terminate()  # on SIGTERM a rank leaves the group and cleans up
        deadline = time.monotonic() + 5.0
        for process in ranks:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> int:
    """Solve the equation. Return the exit status, which is 1 if the results differ."""
    parser = argparse.ArgumentParser(description="Solve the heat equation for a plate, on several ranks.")
    parser.add_argument(
        "--ranks", type=int, default=4, help="processes to start, unless a launcher has started this process"
    )
    parser.add_argument("--size", type=int, default=256, help="cells along each side of the plate")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that ranks leave the group
    try:
        return start_or_run(parser, options)
    except PacelineError as error:
        print(f"heat.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


def start_or_run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Start the ranks, or run one rank if a launcher started this process. Return the exit status."""
    launched = environment()
    num_ranks = options.ranks if launched.rank is None else launched.world_size or 1
    if not 1 <= num_ranks <= options.size or options.steps < 0:
        parser.error("expected at least one rank, at least as many cells along a side as ranks, and 0 or more steps")
    if launched.rank is None:
        return start_ranks(num_ranks)
    with init() as group:
        return run(group, options.size, options.steps, options.json)


if __name__ == "__main__":
    sys.exit(main())

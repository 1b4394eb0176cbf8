"""Heat in a plate, on several ranks: the 2-D heat equation u_t = alpha (u_xx + u_yy).

    python examples/heat.py --ranks 4 --size 256 --steps 500
    torchrun --nproc-per-node 4 examples/heat.py          (or any launcher that sets RANK)

The plate has size x size cells, a hot spot in it and one hot edge. Each rank of a grid owns a block of it, with one
ghost layer around that holds its neighbours' cells; an explicit step of the 5-point stencil is

    u[i, j]  +=  c (u[i-1, j] + u[i+1, j] + u[i, j-1] + u[i, j+1] - 4 u[i, j]),    c = alpha dt / h^2

and before each step the ghost layers are exchanged. Rank 0 then computes the same alone: not a bit may differ.
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
    """Return the plate at the start, with a layer around it that never changes: hot above, cold elsewhere."""
    row, column = np.ogrid[-1 : size + 1, -1 : size + 1]
    u = np.where((row - 0.6 * size) ** 2 + (column - 0.35 * size) ** 2 < (0.15 * size) ** 2, 1.0, 0.0)
    u[[0, -1], :] = u[:, [0, -1]] = 0.0
    u[0, 1:-1] = 1.0
    return u


def step(u: Plate, new: Plate) -> None:
    """Write the cells of the next time into `new`; its outermost layer is not touched."""
    cells = u[1:-1, 1:-1]
    change = -4.0 * cells
    for neighbours in (u[:-2, 1:-1], u[2:, 1:-1], u[1:-1, :-2], u[1:-1, 2:]):
        change += neighbours
    change *= C
    np.add(cells, change, out=new[1:-1, 1:-1])


def solve(u: Plate, steps: int, grid: Grid | None = None) -> Plate:
    """Return the cells after so many steps, of the whole plate or of this rank's block; `u` has the layer around."""
    new = u.copy()
    for _ in range(steps):
        if grid is not None:
            grid.exchange_halos(u)
        step(u, new)
        u, new = new, u
    return u[1:-1, 1:-1]


def gather(grid: Grid, block: Plate, size: int) -> Plate | None:
    """Return the plate of all blocks on rank 0, None elsewhere."""
    whole = np.empty((size, size))
    parts = [whole[grid.local_slice(whole.shape, rank=rank)] for rank in range(grid.group.size)]
    sizes = [part.size for part in parts]
    gathered = grid.group.gather(block.ravel(), sizes=sizes)
    if gathered is None:
        return None
    for part, cells in zip(parts, np.split(gathered, np.cumsum(sizes)[:-1]), strict=True):
        part[...] = cells.reshape(part.shape)
    return whole


def run(group: Group, size: int, steps: int, as_json: bool) -> int:
    """Solve it as one rank of the group; rank 0 compares and reports. Return the exit status."""
    grid = Grid(group)
    rows, columns = grid.local_slice((size, size))
    u = plate(size)[rows.start : rows.stop + 2, columns.start : columns.stop + 2].copy()
    group.barrier()
    began = time.perf_counter()
    block = solve(u, steps, grid)
    group.barrier()
    seconds = time.perf_counter() - began
    whole = gather(grid, block, size)
    if whole is None:
        return 0
    began = time.perf_counter()
    alone = solve(plate(size), steps)
    seconds_alone = time.perf_counter() - began
    difference = float(np.abs(whole - alone).max())
    if as_json:
        told = {"ranks": group.size, "grid": grid.shape, "size": size, "steps": steps, "difference": difference}
        print(json.dumps(told | {"seconds": seconds, "seconds_alone": seconds_alone, "mean": float(whole.mean())}))
    else:
        for cells in whole[np.ix_(np.linspace(0, size - 1, 16).astype(int), np.linspace(0, size - 1, 48).astype(int))]:
            print("  " + "".join(SHADES[int(cell * (len(SHADES) - 1) + 0.5)] for cell in cells))
        print(f"{size} x {size} cells, {steps} steps, mean temperature {whole.mean():.6f}")
        print(
            f"{group.size} ranks as {' x '.join(map(str, grid.shape))}: {seconds:.3f} s; alone: {seconds_alone:.3f} s"
        )
        print(f"greatest difference: {difference}")
    return 0 if difference <= 1e-12 else 1


def start_ranks(num_ranks: int) -> int:
    """Run this program once for every rank, as a launcher does; return the first exit status that is not 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            told = os.environ | place | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=told))
        while any(process.poll() is None for process in ranks) and not any(process.returncode for process in ranks):
            time.sleep(0.02)
        return next((process.returncode for process in ranks if process.returncode), 0)
    finally:
        for process in ranks:
            process.terminate()  # they leave the group, with nothing left behind
        deadline = time.monotonic() + 5.0
        for process in ranks:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> int:
    """Solve it; return the exit status, 1 if the results differ."""
    parser = argparse.ArgumentParser(description="Heat in a plate, on several ranks.")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start, unless a launcher has started this")
    parser.add_argument("--size", type=int, default=256, help="cells along each side of the plate")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups are left, and ranks end, too
    try:
        return start_or_run(parser, options)
    except PacelineError as error:
        print(f"heat.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


def start_or_run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Start the ranks, or be one of them if a launcher has started this; return the exit status."""
    launched = environment()
    num_ranks = options.ranks if launched.rank is None else launched.world_size or 1
    if not 1 <= num_ranks <= options.size or options.steps < 0:
        parser.error("expected at least one rank, no fewer cells along a side than ranks, and no negative steps")
    if launched.rank is None:
        return start_ranks(num_ranks)
    with init() as group:
        return run(group, options.size, options.steps, options.json)


if __name__ == "__main__":
    sys.exit(main())

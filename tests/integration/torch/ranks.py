"""One rank of the tests: carries out every check of a module, and writes what came of each.

    python ranks.py MODULE RANK SIZE FOLDER

A check is a function ``check_*(rank, size)`` that all ranks call, one after the other; ``last_*`` stand at the end, for
they break the group.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.torch  # noqa: F401


def main(module: str, rank: int, size: int, folder: Path) -> None:
    """Meet the others, and carry out the checks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "paceline", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    checks: dict[str, Callable[[int, int], None]] = vars(importlib.import_module(module))
    with (folder / f"rank {rank}").open("w") as report:
        for name in [name for name in checks if name.startswith(("check_", "last_"))]:
            said = ""
            try:
                checks[name](rank, size)
            except BaseException:
                said = traceback.format_exc()
            print(json.dumps([name, said]), file=report, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

"""The program of one rank: run every check of a module, and write the results.

    python strategy_ranks.py MODULE FOLDER

The environment sets the rank, as torchrun does, and the parent serves the store. A check is a function
``check_*(rank, size)`` with a training of its own; all ranks call the checks in the order of the module. ``CHECKS`` has
the prefixes of the checks to run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def main(module: str, folder: Path) -> None:
    """Run the checks."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checks: dict[str, Callable[[int, int], None]] = vars(importlib.import_module(module))
    with (folder / f"rank {rank}").open("w") as report:
        prefixes = tuple(os.environ["CHECKS"].split())
        for number, name in enumerate(name for name in list(checks) if name.startswith(prefixes)):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # a separate part of the store for this rank
            traceback_text = ""
            try:
                checks[name](rank, size)
                assert not dist.is_initialized(), "torch.distributed was left initialized"
            except BaseException:
                traceback_text = traceback.format_exc()
            print(json.dumps([name, traceback_text]), file=report, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

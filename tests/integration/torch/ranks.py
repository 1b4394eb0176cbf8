"""The ranks of the tests: each runs every check of a module, and writes the results.

    python ranks.py FOLDER MODULE:SIZE …

Importing torch and loading the kernels takes seconds, so one process does it, and then becomes all the ranks by
forking. A check is a function ``check_*(rank, size)`` that all ranks of its module call, one after the other;
``last_*`` stand at the end, for they break the group. A module may have a function ``start(rank, size)`` in place of
``init_process_group``. The variables of torchrun are set for it.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

import paceline.torch  # noqa: F401
from paceline.launch import load_kernels


def main(folder: Path, sizes: dict[str, int]) -> None:
    """Start the ranks of all modules and record their ends. In a rank, run the checks."""
    modules = {name: importlib.import_module(name) for name in sizes}
    load_kernels()
    processes: dict[str, list[int]] = {}
    for name, size in sizes.items():
        (folder / name).mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size))
        for rank in range(size):
            process = os.fork()
            if process == 0:
                work(modules[name], rank, size, folder / name)
                return
            processes.setdefault(name, []).append(process)
    for name, forked in processes.items():
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in forked]
        (folder / name / "codes").write_text(json.dumps(codes))


def work(module: ModuleType, rank: int, size: int, folder: Path) -> None:
    """Join the other ranks, and run the checks."""
    os.dup2(os.open(folder / f"errors {rank}", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    if hasattr(module, "start"):
        module.start(rank, size)
    else:
        dist.init_process_group(
            "paceline", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
    checks: dict[str, Callable[[int, int], None]] = vars(module)
    with (folder / f"rank {rank}").open("w") as report:
        for name in [name for name in checks if name.startswith(("check_", "last_"))]:
            traceback_text = ""
            try:
                checks[name](rank, size)
            except BaseException:
                traceback_text = traceback.format_exc()
            print(json.dumps([name, traceback_text]), file=report, flush=True)


if __name__ == "__main__":
    arguments = [argument.split(":") for argument in sys.argv[2:]]
    main(Path(sys.argv[1]), {module: int(size) for module, size in arguments})

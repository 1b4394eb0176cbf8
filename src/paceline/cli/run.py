"""``paceline run``."""

from __future__ import annotations

import typer

from paceline.launch.run.options import RunOptions

from .parameters import expand_flags

CONTEXT = {
    "allow_interspersed_args": False,  # arguments after the script belong to the script
    "token_normalize_func": lambda name: name.replace("_", "-") if name.startswith("-") or "_" in name else name,
}
"""Settings of Typer's context. As in torchrun, --nproc_per_node is the same as --nproc-per-node."""


@expand_flags
def run(options: RunOptions) -> None:
    """Run a PyTorch script under a strategy: on processes of this machine, or of several.

    Example: paceline run --strategy all-reduce --nproc-per-node 4 train.py --epochs 3

    Example: paceline run --strategy pipeline --stages 2 train.py

    Example: paceline run --strategy sharded --nproc-per-node 4 train.py

    Example: paceline run --strategy parameter-server --servers 2 --consistency bounded:4 --nproc-per-node 4 train.py
    """
    from paceline.launch import run_script

    raise typer.Exit(run_script(options))

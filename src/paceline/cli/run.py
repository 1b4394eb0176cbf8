"""``paceline run``."""

from __future__ import annotations

import typer

from paceline.launch.run.options import RunOptions

from .parameters import expand_flags

CONTEXT = {
    "allow_interspersed_args": False,  # what follows the script is the script's
    "token_normalize_func": lambda name: name.replace("_", "-") if name.startswith("-") or "_" in name else name,
}
"""torchrun takes --nproc_per_node as well as --nproc-per-node, and so does this."""


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

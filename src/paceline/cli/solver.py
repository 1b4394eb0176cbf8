"""Check the options of ``paceline train --solver``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import typer

from paceline.errors import UsageError
from paceline.output_files import check_output

from .train_flags import MINIBATCHES, TrainFlags

if TYPE_CHECKING:
    from paceline.models.proximal.rules import ProximalBlocks
    from paceline.models.proximal.solver import BlockPass


PROXIMAL_BLOCKS: Final = "proximal-blocks"

OF_BLOCKS: Final = ("max_delay", "block_ratio", "tolerance", "plot")
OF_MINIBATCHES: Final = {
    "batch_size": "it has no minibatches",
    "tune": "it has no rates to try",
    "lr": "the second derivative determines the length of steps",
    "beta": "it is FTRL's",
    "update": "its servers take proximal steps",
    "schedule": "it has no learning rate",
    "warmup": "it has no learning rate",
    "stale": "--max-delay bounds the age of its gradients",
    "validation": "it ends by --tolerance",
    "pull_filters": "give --filters",
    "patience": "it ends by --tolerance",
    "min_delta": "it ends by --tolerance",
    "min_count": "--l1 leaves out rare features",
    "count_cells": "it counts no features",
    "expire_after": "it reads the data once",
    "order": "it reads the data once",
    "interactions": "its columns are the columns of the files",
    "progressive": "it has no loss before learning",
    "snapshot_every": "it restarts from the beginning instead",
    "snapshot_dir": "it takes no snapshots",
    "snapshots": "it takes no snapshots",
    "auto_resume": "it takes no snapshots; after the loss of a worker it restarts from the beginning",
    "resume": "it takes no snapshots",
    "init_from": "it starts with weights of 0",
}
"""Options that the solver proximal-blocks does not support, and the reasons."""


def choose_blocks(context: typer.Context, flags: TrainFlags) -> ProximalBlocks | None:
    """Return the options of the block solver; None for the minibatch solver. Raises UsageError."""
    solver, model, consistency = flags.solver.solver, flags.model.model, flags.cluster.consistency
    given = [name for name in context.params if _is_given(context, name)]
    if solver == MINIBATCHES:
        of_blocks = [_option(name) for name in given if name in OF_BLOCKS]
        if of_blocks:
            raise UsageError(f"{', '.join(of_blocks)}: only for --solver {PROXIMAL_BLOCKS}. Pass --solver too")
        return None
    if solver != PROXIMAL_BLOCKS:
        raise UsageError(f"--solver {solver}: expected {MINIBATCHES} or {PROXIMAL_BLOCKS}")
    if model != "lr":
        raise UsageError(f"--solver {PROXIMAL_BLOCKS} needs --model lr, not {model}")
    for name in given:
        if name in OF_MINIBATCHES:
            raise UsageError(f"{_option(name)} does not apply to --solver {PROXIMAL_BLOCKS}: {OF_MINIBATCHES[name]}")
    if consistency not in (None, "sequential"):
        raise UsageError(
            f"--consistency {consistency}: --solver {PROXIMAL_BLOCKS} sums over all workers and needs sequential. "
            "Pass --max-delay for overlapping blocks"
        )
    from paceline.filters import parse_filters
    from paceline.models.proximal.rules import ProximalBlocks

    lossy = [str(name.name) for name in parse_filters(flags.filters.filters or "").filters if name.preserves != "exact"]
    if lossy:
        raise UsageError(
            f"--filters {', '.join(lossy)}: --solver {PROXIMAL_BLOCKS} needs exact values. Pass key-caching, "
            "key-numbers or compress"
        )
    if flags.solver.plot is not None:
        check_output("--plot", flags.solver.plot)
    settings: dict[str, Any] = {
        "l1": flags.update.l1,
        "l2": flags.update.l2,
        "max_delay": flags.solver.max_delay,
        "block_ratio": flags.solver.block_ratio,
        "tolerance": flags.solver.tolerance,
        "max_passes": flags.passes.epochs,
    }
    return ProximalBlocks(**{name: value for name, value in settings.items() if value is not None})


def write_plot(file: Path, passes: Sequence[BlockPass]) -> None:
    """Write a page that plots the objective and the active columns by pass."""
    from paceline.observe.plots import Plot, Series, page_bytes, write_page

    least = min(block_pass.objective for block_pass in passes)
    distances = {block_pass.number: (block_pass.objective - least) / max(abs(least), 1e-300) for block_pass in passes}
    logarithms = {number: math.log10(distance) for number, distance in distances.items() if distance > 0}
    active = {block_pass.number: block_pass.active for block_pass in passes}

    def plot(title: str, by_pass: Mapping[int, float], format: Literal["number", "percent"]) -> Plot:
        series = Series(name=title, x=[*by_pass], y=[*by_pass.values()], color=0)
        return Plot(title=title, x_label="pass", series=[series], format=format)

    plots = [plot("Active columns", active, "percent")]
    if logarithms:
        plots.insert(0, plot("Relative distance of the objective from its minimum (log10)", logarithms, "number"))
    write_page("--plot", file, page_bytes("paceline train", describe_end(passes), plots))


def describe_end(passes: Sequence[BlockPass]) -> str:
    last = passes[-1]
    how = {"converged": "converged after", "separable": "labels separated after", "passes": "ended after"}[last.ended]
    return (
        f"{how} {last.number} passes over {last.blocks} blocks: objective {last.objective:.8g}, {last.nonzero:,} of "
        f"{last.features:,} weights other than 0"
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

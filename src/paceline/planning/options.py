"""The options of ``paceline explain`` and ``paceline compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.command_options import argument, option


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """The script and its ranks."""

    script: str | None = argument("Script to run.", show_default=False)
    arguments: list[str] | None = argument("Arguments of the script, passed unchanged.", show_default=False)
    nproc_per_node: int | None = option("Processes (ranks) on each node; default 2, or 1 on a single core.", min=1)
    servers: int | None = option(
        "Parameter servers: on this machine, default 1; with --nodes on machines of their own, default one per node.",
        min=1,
    )
    json: bool = option("Print JSON, one object per line.", default=False)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ScriptOptions):
    """The options of ``paceline explain``, unchecked."""

    nodes: int = option("Number of nodes, each equal to this machine.", min=1, max=100_000, default=1)
    link: str | None = option(
        "Speed of each node's network link in each direction, such as 10Gbit; needed for --nodes 2 or more."
    )
    latency: str | None = option("Time until an empty message arrives at another node, such as 20us; default 50us.")
    measure: bool = option("Measure this machine again, instead of using the stored measurements.", default=False)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ScriptOptions):
    """The options of ``paceline compare``, unchecked."""

    strategies: str = option(
        "Strategies to run, separated by commas; for strategies with servers also the consistency, as in "
        "parameter-server:bounded:4.",
        default="all-reduce,parameter-server,parameter-server:bounded:4,sharded",
    )
    steps: int | None = option(
        "Measured steps under each strategy: default 60, or at most 10000 with --target-loss.", min=3, max=1_000_000
    )
    target_loss: float | None = option(
        "Run each strategy until the mean loss of a rank's last ten steps is at most this number."
    )
    report: Path | None = option("Write a self-contained HTML page with tables and plots.", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of ``paceline simulate``, unchecked."""

    model: str = option(
        "Known model: resnet50, resnet101, vgg16, bert-large, criteo-lr or dlrm; or the file of a profile, which "
        "PACELINE_PROFILE=DIR paceline run SCRIPT writes to DIR/profile.json.",
        default="resnet50",
    )
    nodes: str = option("Numbers of nodes, such as 8, 2,8,32 or 2..512 (powers of two).", default="2..128")
    nproc_per_node: int = option("Processes (ranks) on each node.", min=1, max=1024, default=1)
    link: str = option("Speed of each node's network link in each direction.", default="10Gbit")
    latency: str = option("Time until an empty message arrives at another node.", default="20us")
    servers: int | None = option("Separate parameter servers; default one per node.", min=1)
    variation: float = option(
        "Coefficient of variation of the ranks' step times: 0.1 for a deviation of 10%.", min=0.0, max=10.0, default=0.0
    )
    stragglers: float = option(
        "Share of the steps in which a rank is a straggler: 0.01 for one step of 100.", min=0.0, max=0.5, default=0.0
    )
    slowdown: float = option(
        "Time of a straggler's step, divided by the time of another step.", min=1.0, max=1000.0, default=2.0
    )
    mtbf: str | None = option("Mean time between two failures of a machine, such as 720h; default: no failures.")
    recovery: str = option("Time until the processes of a failed machine run again.", default="2m")
    snapshot_every: str = option(
        "Time between two snapshots, from which strategies that are not elastic continue after a failure.",
        default="10m",
    )
    report: Path | None = option("Write a self-contained HTML page with the scaling curves.", metavar="FILE")
    dashboard: str | None = option(
        "Serve this page until Ctrl-C; its address is printed. PORT or HOST:PORT, by default 0: a free port.",
        metavar="[PORT]",
    )
    json: bool = option("Print JSON, one object per line.", default=False)

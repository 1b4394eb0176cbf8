"""The options of ``paceline run`` for engines, which start processes on several machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from paceline.command_options import in_panel, option, words_of
from paceline.errors import UsageError

from .manifests import PodOptions


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """The options for a job of Slurm as the user gave them, unchecked."""

    panel: ClassVar = "Slurm"

    partition: str | None = option("Partition of the job; default: the cluster's default.")
    time: str | None = option("Time limit of the job, such as 30 (minutes), 12:00:00 or 2-00:00:00.")
    requeue: bool = option(
        "Send SIGTERM to the ranks two minutes before the time limit, and queue the job again when they have ended. "
        "The script saves and loads its checkpoint.",
        "--requeue",
        default=False,
    )
    sbatch: list[str] | None = option(
        "Another option of sbatch, such as gres=gpu:4. May be given several times.", metavar="OPTION"
    )


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The options for engines as the user gave them, unchecked."""

    panel: ClassVar = "Engines"

    hosts: str | None = option(
        "Start the ranks on these hosts over ssh, such as a:4,b:4 with four ranks each, or @FILE with such a list.",
        panel="Several machines",
    )
    ssh_option: list[str] | None = option(
        "--hosts: an option of ssh, such as Port=2222. May be given several times.",
        metavar="OPTION",
        panel="Several machines",
    )
    on: str | None = option("Submit the run as a job and follow it: slurm, kubernetes or ray.", metavar="ENGINE")
    dry_run: bool = option(
        "--on, --hosts: print the job's script, manifests or commands, and start nothing.", "--dry-run", default=False
    )
    queue_timeout: float | None = option(
        "--on: cancel the job if it has not started after this many seconds; default: wait.", min=0.0
    )
    slurm: SlurmFlags = SlurmFlags()
    pods: PodOptions = in_panel("Kubernetes", default=PodOptions())

    def check_only(self, engine: str | None) -> None:
        """Raise UsageError for options of other engines than `engine`; None means a run without an engine."""
        pods = replace(self.pods, gpus=None) if engine == "ray" else self.pods
        for name, flags in (("slurm", self.slurm), ("kubernetes", pods)):
            if name != engine and (words := words_of(flags)):
                raise UsageError(f"{words[0]} is for --on {name}. Pass --on {name} too, or leave {words[0]} out")
        if engine is None and (words := words_of(self)):
            raise UsageError(f"{words[0]} is for --on and --hosts. Leave {words[0]} out")

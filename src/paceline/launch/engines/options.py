"""The options of ``paceline run`` for engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.command_options import option


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The given options, unchecked."""

    panel: ClassVar = "Slurm"

    hosts: str | None = option(
        "Start the ranks on these hosts over ssh, such as a:4,b:4 with four ranks each, or @FILE with such a list.",
        panel="Several machines",
    )
    on: str | None = option("Submit the run as a job and follow it: slurm.", metavar="ENGINE")
    dry_run: bool = option(
        "--on, --hosts: print the job's script or the commands, and start nothing.", "--dry-run", default=False
    )
    partition: str | None = option("--on: partition of the job; default: the cluster's default.")
    time: str | None = option("--on: time limit of the job, such as 30 (minutes), 12:00:00 or 2-00:00:00.")
    requeue: bool = option(
        "--on: send SIGTERM to the ranks two minutes before the time limit, and queue the job again when they have "
        "ended. The script saves and loads its checkpoint.",
        "--requeue",
        default=False,
    )
    sbatch: list[str] | None = option(
        "--on: another option of sbatch, such as gres=gpu:4. May be given several times.", metavar="OPTION"
    )
    queue_timeout: float | None = option(
        "--on: cancel the job if it has not started after this many seconds; default: wait.", min=0.0
    )

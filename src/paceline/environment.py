"""What a process is told by its surroundings: environment variables, which no other module reads, and its cores.

Talks to nobody. The command line and the launchers call :func:`environment` and pass on what they need.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from paceline.errors import UsageError

# Who starts several ranks, by the variables it sets: rank, world size, local rank, local world size. The first
# launcher whose rank is set counts. mpirun under Slurm sets both: then its own are true, and Slurm's are not.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the process was told by its environment; a variable that is unset or empty is ``None``."""

    role: str | None = None
    """``PACELINE_ROLE``: what this process is: ``scheduler``, ``server`` or ``worker``."""
    scheduler: str | None = None
    """``PACELINE_SCHEDULER``: the scheduler's address, as ``tcp://host:port``."""
    token: str | None = None
    """``PACELINE_TOKEN``: the cluster's token."""
    tls_cert: Path | None = None
    """``PACELINE_TLS_CERT``: this process's certificate (PEM); with one of these three, TLS is on."""
    tls_key: Path | None = None
    """``PACELINE_TLS_KEY``: the key of the certificate."""
    tls_ca: Path | None = None
    """``PACELINE_TLS_CA``: the certificate that the others' are signed by."""
    runtime_dir: Path | None = None
    """``XDG_RUNTIME_DIR``: a folder of this user alone, on this machine."""
    rank: int | None = None
    """``RANK``, or what mpirun (``OMPI_COMM_WORLD_RANK``) or Slurm (``SLURM_PROCID``) set instead."""
    world_size: int | None = None
    """``WORLD_SIZE``, or of the same launcher as the rank."""
    local_rank: int | None = None
    """``LOCAL_RANK``, or of the same launcher as the rank."""
    local_world_size: int | None = None
    """``LOCAL_WORLD_SIZE``, or mpirun's; Slurm does not say."""
    master_addr: str | None = None
    """``MASTER_ADDR``: the host of rank 0."""
    master_port: int | None = None
    """``MASTER_PORT``: where rank 0 serves the rendezvous."""
    has_agent_store: bool = False
    """``TORCHELASTIC_USE_AGENT_STORE``: torchrun itself serves at ``MASTER_PORT``."""
    run_id: str | None = None
    """``TORCHELASTIC_RUN_ID`` and the number of restarts: tells programs apart."""
    job: str | None = None
    """What mpirun (``PMIX_NAMESPACE``) or Slurm (``SLURM_JOB_ID``, ``SLURM_STEP_ID``) tell all ranks of one program."""
    algorithm: str | None = None
    """``PACELINE_ALGORITHM``: the collective algorithm to take instead of the measured best."""
    strategy: str | None = None
    """``PACELINE_STRATEGY``: how a training loop is spread, as ``paceline run --strategy`` spells it."""
    replicas: int | None = None
    """``PACELINE_REPLICAS``: replicas of the model in one process."""
    filters: str | None = None
    """``PACELINE_FILTERS``: filters for what processes exchange, as ``paceline run --filters`` spells it."""
    pull_filters: str | None = None
    """``PACELINE_PULL_FILTERS``: filters for rows pulled from servers, as ``--pull-filters`` spells it; may be empty.
    """
    pipeline: str | None = None
    """``PACELINE_PIPELINE``: stages and schedule of the strategy ``pipeline``, as ``paceline run`` writes them."""
    sharding: str | None = None
    """``PACELINE_SHARDING``: units and shards of the strategy ``sharded``, as ``paceline run`` writes them."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if values["token"] is not None:
            values["token"] = "<hidden>"
        return f"Environment({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def available_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many bytes of memory this process may still take: of the machine's, and of its control groups'.

    `groups` is where control groups of version 2 are mounted, `own` the file that names this process's. What a group's
    files take in the page cache counts as free.
    """
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return free
    folder = groups / name.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(groups):
            break
        try:
            limit, used = ((group / f"memory.{what}").read_text().strip() for what in ("max", "current"))
            cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            if limit != "max":
                free = min(free, max(int(limit) - int(used) + int(cached.get("inactive_file", 0)), 0))
        except (OSError, ValueError):
            continue  # the root has no such files
    return free


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment; ``variables`` stands in for ``os.environ``."""
    found = os.environ if variables is None else variables
    runtime_dir = found.get("XDG_RUNTIME_DIR")
    launcher = next((names for names in _LAUNCHERS if found.get(names[0])), _LAUNCHERS[0])
    rank, world_size, local_rank, local_world_size = (_integer(found, name) for name in launcher)
    run_id = found.get("TORCHELASTIC_RUN_ID")
    job = "/".join(found[name] for name in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID") if found.get(name))
    return Environment(
        role=found.get("PACELINE_ROLE") or None,
        scheduler=found.get("PACELINE_SCHEDULER") or None,
        token=found.get("PACELINE_TOKEN") or None,
        tls_cert=_path(found, "PACELINE_TLS_CERT"),
        tls_key=_path(found, "PACELINE_TLS_KEY"),
        tls_ca=_path(found, "PACELINE_TLS_CA"),
        runtime_dir=Path(runtime_dir) if runtime_dir else None,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=found.get("MASTER_ADDR") or None,
        master_port=_integer(found, "MASTER_PORT"),
        has_agent_store=found.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"),
        run_id=f"{run_id}/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run_id else None,
        job=job or None,
        algorithm=found.get("PACELINE_ALGORITHM") or None,
        strategy=found.get("PACELINE_STRATEGY") or None,
        replicas=_integer(found, "PACELINE_REPLICAS"),
        filters=found.get("PACELINE_FILTERS") or None,
        pull_filters=found.get("PACELINE_PULL_FILTERS"),
        pipeline=found.get("PACELINE_PIPELINE") or None,
        sharding=found.get("PACELINE_SHARDING") or None,
    )


def usable_cores() -> Sequence[int]:
    """Return the numbers of the cores that this process may run on, as far as the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(usable_cores())


def _path(found: Mapping[str, str], name: str) -> Path | None:
    return Path(found[name]) if found.get(name) else None


def _integer(found: Mapping[str, str], name: str) -> int | None:
    text = found.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"the environment variable {name} is {text!r}, a whole number from 0 up was expected")
    return int(text)

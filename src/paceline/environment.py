"""Read environment variables and the number of cores; no other module does this.

The command line and the launchers call :func:`environment` and pass on the values. The only I/O is of local files.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from paceline.errors import AddressError, UsageError

# Launchers of several ranks: a variable that only this launcher sets, and its variables for the rank, the world size,
# the local rank and the local world size. The first launcher found is used. Under Slurm, mpirun's variables are correct
# and Slurm's are not.
_HOROVOD, _OPEN_MPI, _HYDRA, _SLURM = "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "SLURM_PROCID"
_LAUNCHERS = {
    "RANK": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _HOROVOD: (_HOROVOD, "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    _OPEN_MPI: (
        _OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _HYDRA: ("PMI_RANK", "PMI_SIZE", _HYDRA, "MPI_LOCALNRANKS"),
    _SLURM: (_SLURM, "SLURM_NTASKS", "SLURM_LOCALID", ""),
}  # fmt: skip
_ELASTIC_TIMEOUT_S = 600
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Values of environment variables; ``None`` or the default for an unset or empty variable."""

    role: str | None = None
    """``PACELINE_ROLE``: role of this process: ``scheduler``, ``server`` or ``worker``."""
    scheduler: str | None = None
    """``PACELINE_SCHEDULER``: the scheduler's address, as ``tcp://host:port``."""
    token: str | None = None
    """``PACELINE_TOKEN``: the cluster's token."""
    tls_cert: Path | None = None
    """``PACELINE_TLS_CERT``: this process's certificate (PEM); any of the three variables enables TLS."""
    tls_key: Path | None = None
    """``PACELINE_TLS_KEY``: the key of the certificate."""
    tls_ca: Path | None = None
    """``PACELINE_TLS_CA``: certificate of the authority that signed the other certificates."""
    runtime_dir: Path | None = None
    """``XDG_RUNTIME_DIR``: a private folder of this user on this machine."""
    rank: int | None = None
    """``RANK``, or the variable of horovodrun (``HOROVOD_RANK``), Open MPI (``OMPI_COMM_WORLD_RANK``), MPICH
    (``PMI_RANK``) or Slurm (``SLURM_PROCID``)."""
    world_size: int | None = None
    """``WORLD_SIZE``, or the variable of the launcher that set the rank."""
    local_rank: int | None = None
    """``LOCAL_RANK``, or the variable of the launcher that set the rank."""
    local_world_size: int | None = None
    """``LOCAL_WORLD_SIZE``, or mpirun's variable; Slurm has no such variable."""
    master_addr: str | None = None
    """``MASTER_ADDR``: the host of rank 0."""
    master_port: int | None = None
    """``MASTER_PORT``: port of the rendezvous on rank 0."""
    nnodes: int | None = None
    """``PET_NNODES``: number of machines. Kubeflow sets this and the other variables ``PET_``."""
    node_rank: int | None = None
    """``PET_NODE_RANK``: number of this machine."""
    nproc_per_node: int | None = None
    """``PET_NPROC_PER_NODE``: number of ranks on this machine; ``None`` for ``auto``, ``cpu`` and ``gpu``."""
    has_agent_store: bool = False
    """``TORCHELASTIC_USE_AGENT_STORE``: whether torchrun itself uses ``MASTER_PORT``."""
    run_id: str | None = None
    """``TORCHELASTIC_RUN_ID`` and the number of restarts, which distinguish programs at one address."""
    is_mpirun: bool = False
    """Whether mpirun of Open MPI, MPICH or Intel MPI has set the rank."""
    job: str | None = None
    """Identifier of the program, equal on all ranks, under Open MPI (``PMIX_NAMESPACE``), Slurm (``SLURM_JOB_ID``,
    ``SLURM_STEP_ID``), horovodrun (``HOROVOD_GLOO_RENDEZVOUS_ADDR`` and ``_PORT``), or MPICH on one machine (the
    process ID of the parent of all ranks)."""
    placement: str | None = None
    """``PACELINE_PLACEMENT``: the launcher's number and node as JSON, from ``--hosts``, ``--on ray``, Dask or Ray."""
    algorithm: str | None = None
    """``PACELINE_ALGORITHM``: collective algorithm in place of the tuner's choice."""
    strategy: str | None = None
    """``PACELINE_STRATEGY``: strategy of a training loop, in the format of ``paceline run --strategy``."""
    replicas: int | None = None
    """``PACELINE_REPLICAS``: replicas of the model in one process."""
    filters: str | None = None
    """``PACELINE_FILTERS``: filters for messages between processes, in the format of ``paceline run --filters``."""
    pull_filters: str | None = None
    """``PACELINE_PULL_FILTERS``: filters for pulled rows, in the format of ``--pull-filters``; may be empty."""
    job_dir: Path | None = None
    """``PACELINE_JOB_DIR``: folder of the stacks and operations of a job's processes, set by the launcher."""
    timeline_steps: str | None = None
    """``PACELINE_TIMELINE_STEPS``: the steps of a timeline, such as ``100:120``, set by the launcher."""
    timeline_operators: bool = False
    """``PACELINE_TIMELINE_OPERATORS``: whether ranks profile these steps, set by the launcher."""
    strategy_options: str | None = None
    """``PACELINE_STRATEGY_OPTIONS``: the options of the strategy, written by ``paceline run``."""
    snapshot_dir: Path | None = None
    """``PACELINE_SNAPSHOT_DIR``: directory of the snapshots of a training loop, from which it continues."""
    snapshot_every: str | None = None
    """``PACELINE_SNAPSHOT_EVERY``: time between two snapshots, such as ``5m``."""
    profile: Path | None = None
    """``PACELINE_PROFILE``: directory for the measured steps of a script, set by ``paceline explain``."""
    profile_steps: int | None = None
    """``PACELINE_PROFILE_STEPS``: number of steps to measure, set by ``paceline compare``."""
    incarnation: int | None = None
    """``PACELINE_INCARNATION``: unique number of this process in an elastic training, set by ``paceline run``."""
    horovod_fusion_threshold: int | None = None
    """``HOROVOD_FUSION_THRESHOLD``: bytes up to which ``paceline.horovod`` fuses all-reduces."""
    horovod_cache_capacity: int | None = None
    """``HOROVOD_CACHE_CAPACITY``: number of requests in the cache of ``paceline.horovod``."""
    horovod_timeout_s: int | None = None
    """``HOROVOD_GLOO_TIMEOUT_SECONDS``: timeout of each collective call of ``paceline.horovod``."""
    horovod_stall_warning_s: int | None = None
    """``HOROVOD_STALL_CHECK_TIME_SECONDS``: time after which ``paceline.horovod`` warns of missing ranks."""
    horovod_stall_failure_s: int = 0
    """``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``: time after which operations with missing ranks fail; 0: never."""
    is_horovod_stall_check_disabled: bool = False
    """``HOROVOD_STALL_CHECK_DISABLE``: whether operations wait for missing ranks without a warning or an end."""
    horovod_start_timeout_s: int | None = None
    """``HOROVOD_START_TIMEOUT``: time limit until all ranks of ``paceline.horovod`` are connected."""
    horovod_elastic_timeout_s: int = _ELASTIC_TIMEOUT_S
    """``HOROVOD_ELASTIC_TIMEOUT``: time limit until enough ranks of an elastic training are available."""
    has_horovod_group_fusion: bool = True
    """Not ``HOROVOD_DISABLE_GROUP_FUSION``: whether groups of tensors are fused with other tensors."""
    horovod_log_level: str | None = None
    """``HOROVOD_LOG_LEVEL``: the lowest level of messages of ``paceline.horovod``, in lower case."""
    horovod_timeline: str | None = None
    """``HOROVOD_TIMELINE``: file for the timeline of all ranks of ``paceline.horovod``. ``DYNAMIC`` does nothing."""
    has_horovod_timeline_rounds: bool = False
    """``HOROVOD_TIMELINE_MARK_CYCLES``: whether the timeline has the rounds of the negotiation."""
    is_horovod_elastic: bool = False
    """``HOROVOD_ELASTIC``: whether a distributed optimizer of Horovod's API averages gradients on a single rank too."""
    coordinator: str | None = None
    """``PACELINE_COORDINATOR``: address of ``paceline coordinator``, as ``host:port``."""
    metrics: Path | None = None
    """``PACELINE_METRICS``: the launcher's socket for the metrics of its processes, set by the launcher."""
    status_url: str | None = None
    """``KUBEFLOW_TRAINER_STATUS_URL``: address for the progress of a training in a Kubeflow TrainJob."""
    status_token: Path | None = None
    """``KUBEFLOW_TRAINER_STATUS_TOKEN``: file with the token for requests to this address."""
    status_ca: Path | None = None
    """``KUBEFLOW_TRAINER_STATUS_CA_CERT``: certificate of the authority that signed this address's certificate."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if values["token"] is not None:
            values["token"] = "<hidden>"
        return f"Environment({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def available_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of memory available to this process, limited by the machine and its control groups.

    `groups` is the mount point of control groups (version 2), `own` the file with the name of this process's group. The
    inactive page cache of a control group counts as free.
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
            continue  # the root group has no such files
    return free


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment; ``variables`` replaces ``os.environ``."""
    found = os.environ if variables is None else variables
    run_id, processes = found.get("TORCHELASTIC_RUN_ID"), found.get("PET_NPROC_PER_NODE")
    launcher, rank, world_size, local_rank, local_world_size = _read_ranks(found)
    job = "/".join(found[name] for name in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID") if found.get(name))
    if launcher == _HOROVOD:
        job = "/".join(found.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT")).strip("/")
    if launcher == _HYDRA and local_world_size == world_size:
        job = f"{job}/{_starter()}"
    return Environment(
        role=found.get("PACELINE_ROLE") or None,
        scheduler=found.get("PACELINE_SCHEDULER") or None,
        token=found.get("PACELINE_TOKEN") or None,
        tls_cert=_path(found, "PACELINE_TLS_CERT"),
        tls_key=_path(found, "PACELINE_TLS_KEY"),
        tls_ca=_path(found, "PACELINE_TLS_CA"),
        runtime_dir=_path(found, "XDG_RUNTIME_DIR"),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=found.get("MASTER_ADDR") or found.get("PET_MASTER_ADDR") or None,
        master_port=_integer(found, "MASTER_PORT" if found.get("MASTER_PORT") else "PET_MASTER_PORT", 1, 65535),
        nnodes=_integer(found, "PET_NNODES"),
        node_rank=_integer(found, "PET_NODE_RANK"),
        nproc_per_node=None if processes in ("auto", "cpu", "gpu") else _integer(found, "PET_NPROC_PER_NODE", 1),
        has_agent_store=found.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"),
        run_id=f"{run_id}/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run_id else None,
        is_mpirun=launcher in (_OPEN_MPI, _HYDRA),
        job=job or None,
        placement=found.get("PACELINE_PLACEMENT") or None,
        algorithm=found.get("PACELINE_ALGORITHM") or None,
        strategy=found.get("PACELINE_STRATEGY") or None,
        replicas=_integer(found, "PACELINE_REPLICAS"),
        filters=found.get("PACELINE_FILTERS") or None,
        pull_filters=found.get("PACELINE_PULL_FILTERS"),
        timeline_steps=found.get("PACELINE_TIMELINE_STEPS") or None,
        timeline_operators=_boolean(found, "PACELINE_TIMELINE_OPERATORS"),
        job_dir=_path(found, "PACELINE_JOB_DIR"),
        strategy_options=found.get("PACELINE_STRATEGY_OPTIONS") or None,
        snapshot_dir=_path(found, "PACELINE_SNAPSHOT_DIR"),
        snapshot_every=found.get("PACELINE_SNAPSHOT_EVERY") or None,
        profile=_path(found, "PACELINE_PROFILE"),
        profile_steps=_integer(found, "PACELINE_PROFILE_STEPS", 1),
        incarnation=_integer(found, "PACELINE_INCARNATION"),
        horovod_fusion_threshold=_integer(found, "HOROVOD_FUSION_THRESHOLD"),
        horovod_cache_capacity=_integer(found, "HOROVOD_CACHE_CAPACITY"),
        horovod_timeout_s=_integer(found, "HOROVOD_GLOO_TIMEOUT_SECONDS", 1),
        horovod_stall_warning_s=_integer(found, "HOROVOD_STALL_CHECK_TIME_SECONDS"),
        horovod_stall_failure_s=_integer(found, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0,
        is_horovod_stall_check_disabled=_boolean(found, "HOROVOD_STALL_CHECK_DISABLE"),
        horovod_start_timeout_s=_integer(found, "HOROVOD_START_TIMEOUT", 1),
        horovod_elastic_timeout_s=_integer(found, "HOROVOD_ELASTIC_TIMEOUT", 1) or _ELASTIC_TIMEOUT_S,
        has_horovod_group_fusion=not _boolean(found, "HOROVOD_DISABLE_GROUP_FUSION"),
        horovod_log_level=_log_level(found, "HOROVOD_LOG_LEVEL"),
        horovod_timeline=found.get("HOROVOD_TIMELINE") or None,
        has_horovod_timeline_rounds=_boolean(found, "HOROVOD_TIMELINE_MARK_CYCLES"),
        is_horovod_elastic=_boolean(found, "HOROVOD_ELASTIC"),
        coordinator=found.get("PACELINE_COORDINATOR") or None,
        metrics=_path(found, "PACELINE_METRICS"),
        status_url=found.get("KUBEFLOW_TRAINER_STATUS_URL") or None,
        status_token=_path(found, "KUBEFLOW_TRAINER_STATUS_TOKEN"),
        status_ca=_path(found, "KUBEFLOW_TRAINER_STATUS_CA_CERT"),
    )


@contextlib.contextmanager
def naming(variable: str | None) -> Iterator[None]:
    """Name the variable that has the invalid value, in the errors of the block. None: the value is an argument."""
    try:
        yield
    except (UsageError, AddressError) as error:
        raise UsageError(f"{variable}: {error}" if variable else str(error)) from None


def _read_ranks(found: Mapping[str, str]) -> tuple[str, int | None, int | None, int | None, int | None]:
    """Return the launcher and its four numbers. Raises UsageError, which names the variables, if they disagree."""
    launcher = next((launcher for launcher in _LAUNCHERS if found.get(launcher)), "RANK")
    names = _LAUNCHERS[launcher]
    rank, size, local_rank, local_size = (_integer(found, name) for name in names)
    if launcher == _SLURM and size is None:  # the script of a job without --ntasks is the only rank
        size = _integer(found, "SLURM_STEP_NUM_TASKS") or (1 if rank == 0 else None)
    # RANK alone is valid for a program that passes the world size to init().
    is_complete = launcher == "RANK" or (rank is not None and size is not None)
    num_nodes = _integer(found, "PET_NNODES", 1)
    for name, relation, limit, is_valid in (
        (names[0], "below", names[1], is_complete and (size is None or (rank or 0) < size)),
        (names[2], "below", names[3], local_size is None or (local_rank or 0) < local_size),
        (names[3], "up to", names[1], size is None or (local_size or 0) <= size),
        # More nodes than at the start may join an elastic training, so paceline run checks the limit.
        ("PET_NODE_RANK", "below", "PET_NNODES", not found.get("PET_NODE_RANK") or num_nodes is not None),
    ):
        if not is_valid:
            given = " and ".join(f"{variable} is {found.get(variable) or 'missing'}" for variable in (name, limit))
            raise UsageError(f"the launcher's variables disagree: {given}. Set {name} {relation} {limit} or unset both")
    return launcher, rank, size, local_rank, local_size


def _starter() -> int:
    """Return the process that started this session. MPICH gives every rank a session of its own.

    This process's own parent is not used, because it may be a shell that runs only this rank.
    """
    import psutil

    return int(psutil.Process(os.getsid(0)).ppid())


def usable_cores() -> Sequence[int]:
    """Return the numbers of the cores that this process may run on, if known, else of all cores."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(usable_cores())


def _path(found: Mapping[str, str], name: str) -> Path | None:
    return Path(found[name]) if found.get(name) else None


def _integer(found: Mapping[str, str], name: str, least: int = 0, most: float = math.inf) -> int | None:
    text = found.get(name)
    return parse_integer(name, text, least, most) if text else None


def _boolean(found: Mapping[str, str], name: str) -> bool:
    return bool(_integer(found, name, 0, 1))


def _log_level(found: Mapping[str, str], name: str) -> str | None:
    level = found.get(name, "").lower() or None
    if level is not None and level not in _LOG_LEVELS:
        raise UsageError(f"the environment variable {name} is {found[name]!r}, expected {', '.join(_LOG_LEVELS)}")
    return level


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float | None:
    """Return the seconds of a time such as ``30s``, ``5m`` or ``1h``; None for any other text."""
    found = _DURATION.fullmatch(text.strip())
    return (float(found[1]) * _SECONDS[found[2]] or None) if found is not None else None


Timeout: TypeAlias = timedelta | float
"""A duration as a timedelta or as a number of seconds."""


def timedelta_of(timeout: Timeout) -> timedelta:
    """Return a timeout as a timedelta. Raises UsageError for a negative number, and for values of other types."""
    found: timedelta | None = None
    try:
        found = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except OverflowError:
        found = timedelta.max if isinstance(timeout, float | int) and 0 < timeout < float("inf") else None
    except (TypeError, ValueError):
        pass
    if found is None or found < timedelta(0) or isinstance(timeout, bool):
        raise UsageError(f"timeout={timeout!r}: expected seconds, or a timedelta such as timedelta(minutes=1)")
    return found


def parse_integer(name: str, text: str, least: int = 0, most: float = math.inf) -> int:
    """Return the value of a variable. Raises UsageError unless it is a whole number from `least` to `most`."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        limits = f"{least} up" if most == math.inf else f"{least} to {most}"
        raise UsageError(f"the environment variable {name} is {text!r}, expected a whole number from {limits}")
    return int(text)

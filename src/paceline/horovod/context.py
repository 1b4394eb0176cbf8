"""Start and end Horovod on this rank. Return its rank numbers, and change process sets and the timeline."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

from paceline.collectives import DEFAULT_TIMEOUT, Group
from paceline.environment import Environment, environment
from paceline.errors import UsageError
from paceline.horovod.engine import HorovodEngine
from paceline.horovod.membership import elastic_group, meet
from paceline.horovod.process_sets import ProcessSet, global_process_set, register_global_set
from paceline.horovod.stalls import StallInspector
from paceline.horovod.traces import RankTraces, TimelineWriter
from paceline.protocol.negotiation.negotiator import Negotiator
from paceline.protocol.negotiation.requests import ADD_PROCESS_SET, REMOVE_PROCESS_SET, UNNAMED, Key, TensorRequest

_log = logging.getLogger(__name__)
_FUSION_THRESHOLD_BYTES: Final = 128 << 20
_CACHE_CAPACITY: Final = 1024
_STALL_WARNING_S: Final = 60


class Context:
    """The engine and the rank numbers of this rank, between :func:`init` and :func:`shutdown`."""

    def __init__(self, group: Group, engine: HorovodEngine, local_rank: int | None) -> None:
        """`local_rank` is the number that the launcher gave this rank on its machine; None if it is unknown."""
        self.group, self.engine = group, engine
        sizes, own_host = Counter(group.hosts), group.hosts[group.rank]
        self.local_size = sizes[own_host]
        place = group.hosts[: group.rank].count(own_host)
        self.local_rank = place if local_rank is None else local_rank
        hosts_with_place = [host for host, size in sizes.items() if size > place]
        self.cross_rank, self.cross_size = hosts_with_place.index(own_host), len(hosts_with_place)
        self.is_homogeneous = len(set(sizes.values())) == 1
        self.process_sets: list[ProcessSet] = []
        self.num_unnamed: dict[int, int] = {}
        """The number of unnamed requests, by process set."""
        self.requests: dict[tuple[Any, ...], dict[Key, TensorRequest]] = {}
        """The requests of the last call with each name."""
        self._naming = threading.Lock()

    def next_name(self, process_set: int) -> str:
        """Return the name of the next unnamed request in a process set."""
        with self._naming:
            index = self.num_unnamed.get(process_set, 0)
            self.num_unnamed[process_set] = index + 1
        return f"{UNNAMED}{index}"


_context: Context | None = None
_starting = threading.Lock()
"""Held by the thread that calls :func:`init`."""


def init(comm: Sequence[int] | None = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Connect this rank to the other ranks. All ranks must call this function. If Horovod is initialized, do nothing.

    If Horovod has ended because of an error, or because another rank has called :func:`shutdown`, start again.

    The ranks and the address come from the launcher: ``paceline run``, torchrun, horovodrun, mpirun or Slurm. Without
    a launcher, this process is the only rank. If only some ranks take part, `comm` is the list of their numbers. With
    ``paceline run --min-ranks``, the present ranks take part. A new process waits until the other ranks call this
    function again.

    `process_sets` are added at the start. ``"dynamic"`` has no effect, because process sets can always be added later.

    Raises UsageError for invalid arguments and variables, DeadlineError and RankLostError if ranks are missing.
    """
    with _starting:
        if _context is None or _context.engine.is_closed:
            shutdown()
            _start(comm, process_sets)


def _start(comm: Sequence[int] | None, process_sets: Iterable[ProcessSet] | str | None) -> None:
    global _context
    if comm is not None and not (isinstance(comm, Sequence) and all(isinstance(rank, int) for rank in comm)):
        raise UsageError(f"got comm={comm!r}, expected a list of ranks; communicators of MPI are not supported")
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise UsageError(f"got process_sets={process_sets!r}, expected a list of ProcessSet or 'dynamic'")
    variables = environment()
    _set_log_level(variables.horovod_log_level)
    timeout, start_timeout = (
        DEFAULT_TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
        for timeout_s in (variables.horovod_timeout_s, variables.horovod_start_timeout_s)
    )
    group = meet(comm, start_timeout, timeout)
    atexit.unregister(_shut_down_at_exit)
    atexit.register(_shut_down_at_exit)  # so that it runs before the functions that meet() has registered
    threshold, capacity = variables.horovod_fusion_threshold, variables.horovod_cache_capacity
    negotiator = Negotiator(
        group.rank,
        group.size,
        cache_capacity=_CACHE_CAPACITY if capacity is None else capacity,
        fusion_threshold_bytes=_FUSION_THRESHOLD_BYTES if threshold is None else threshold,
        fuses_groups=variables.has_horovod_group_fusion,
    )
    engine = HorovodEngine(group, negotiator, _stall_inspector(variables))
    _context = Context(group, engine, variables.local_rank if comm is None else None)
    register_global_set(group.size, group.rank)
    engine.start()
    _log.info("rank %d of %d has started", group.rank, group.size)
    if variables.horovod_timeline not in (None, "DYNAMIC"):
        start_timeline(variables.horovod_timeline, variables.has_horovod_timeline_rounds)
    for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


def _set_log_level(level: str | None) -> None:
    if level is None:
        return
    logger = logging.getLogger("paceline.horovod")
    logger.setLevel(getattr(logging, level.upper(), logging.DEBUG))
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def _stall_inspector(variables: Environment) -> StallInspector | None:
    if variables.is_horovod_stall_check_disabled:
        return None
    warning_s, failure_s = variables.horovod_stall_warning_s, variables.horovod_stall_failure_s
    warning_s = _STALL_WARNING_S if warning_s is None else warning_s
    if 0 < failure_s < warning_s:
        _log.warning(
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%d is ignored, because warnings start later, after %d s. Increase it, "
            "or decrease HOROVOD_STALL_CHECK_TIME_SECONDS",
            failure_s,
            warning_s,
        )
        failure_s = 0
    return StallInspector(warning_s, failure_s)


def shutdown() -> None:
    """End Horovod on all ranks. Pending operations fail with HorovodInternalError. :func:`init` may follow."""
    global _context
    context, _context = _context, None
    if context is None:
        return
    context.engine.close()
    for process_set in context.process_sets:
        process_set.register(None, None)
    register_global_set(0, None)


def _shut_down_at_exit() -> None:
    with contextlib.suppress(Exception):
        shutdown()


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Write the phases of all operations of all ranks into a file, as a Chrome trace, until :func:`stop_timeline`.

    The call on rank 0 starts the timeline of all ranks. Calls on other ranks do nothing. The clock of rank 0 gives all
    times. With `mark_cycles`, the file also has the start of each round of the negotiation. The file is valid JSON
    after each write. Rank 0 writes about once a second. Raises OSError if the file cannot be created.
    """
    context = current()
    if context.group.rank == 0:
        context.engine.set_timeline(None)
        context.engine.set_timeline(RankTraces(TimelineWriter(file_path)), has_rounds=mark_cycles)


def stop_timeline() -> None:
    """Write the last events of all ranks, and close the file of :func:`start_timeline`. On other ranks, do nothing."""
    context = current()
    if context.group.rank == 0:
        context.engine.set_timeline(None)


def current() -> Context:
    """Return the state of this rank. Raises UsageError before :func:`init`."""
    if _context is None:
        raise UsageError("Horovod has not been initialized; use hvd.init().")
    return _context


def is_initialized() -> bool:
    """Return whether Horovod runs on this rank: between :func:`init` and :func:`shutdown`."""
    return _context is not None


def can_change_size() -> bool:
    """Return whether the number of ranks may change. With ``HOROVOD_ELASTIC=1``, return True."""
    return elastic_group() is not None or environment().is_horovod_elastic


def size() -> int:
    """Return the number of ranks."""
    return current().group.size


def rank() -> int:
    """Return the number of this rank, from 0 to ``size() - 1``."""
    return current().group.rank


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return current().local_size


def local_rank() -> int:
    """Return the number of this rank among the ranks of this machine."""
    return current().local_rank


def cross_size() -> int:
    """Return the number of machines that have a rank with this rank's local number."""
    return current().cross_size


def cross_rank() -> int:
    """Return the number of this machine among the machines that have a rank with this rank's local number."""
    return current().cross_rank


def is_homogeneous() -> bool:
    """Return whether all machines have the same number of ranks."""
    return current().is_homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set, and return it. All ranks of the program must call this function with the same ranks.

    Raises UsageError if a process set with these ranks exists, or if a rank does not exist.
    """
    context = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not added.ranks or added.ranks[0] < 0 or added.ranks[-1] >= context.group.size:
        raise UsageError(f"got a process set of ranks {added.ranks}, expected ranks from 0 to {context.group.size - 1}")
    if context.engine.find_process_set(added.ranks) is not None:
        raise UsageError(f"a process set of ranks {added.ranks} exists already; use this set")
    context.engine.change_process_sets(ADD_PROCESS_SET, added.ranks)
    added.register(context.engine.find_process_set(added.ranks), context.group.rank)
    context.process_sets.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether it was added before. All ranks of the program must call this function.

    The process set of all ranks cannot be removed.
    """
    context = current()
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    context.engine.change_process_sets(REMOVE_PROCESS_SET, process_set.ranks)
    context.process_sets.remove(process_set)
    process_set.register(None, None)
    return True


def _constant(name: str, value: Any, doc: str) -> Any:
    def constant() -> Any:
        return value

    constant.__name__ = constant.__qualname__ = name
    constant.__doc__ = doc
    return constant


mpi_built = _constant("mpi_built", False, "Return False: Paceline does not use MPI.")
mpi_enabled = _constant("mpi_enabled", False, "Return False: Paceline does not use MPI.")
gloo_built = _constant("gloo_built", True, "Return True: Paceline's collectives work where Horovod uses Gloo.")
gloo_enabled = _constant("gloo_enabled", True, "Return True: Paceline's collectives work where Horovod uses Gloo.")
nccl_built = _constant("nccl_built", 0, "Return 0: CUDA tensors are reduced in the host's memory.")
ddl_built = _constant("ddl_built", False, "Return False: Paceline does not use IBM's DDL.")
ccl_built = _constant("ccl_built", False, "Return False: Paceline does not use oneCCL.")


def mpi_threads_supported() -> bool:
    """Raise UsageError, as Horovod does without MPI."""
    raise UsageError("mpi_threads_supported() needs MPI, which Paceline does not use; call mpi_enabled() first")


def cuda_built() -> bool:
    """Return whether PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch was built for ROCm."""
    return torch.version.hip is not None

"""Provide the libraries for ``bench collectives`` with one interface. Only requested libraries are imported."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import numpy as np
from typing_extensions import override

from paceline.bench.buffers import Buffers
from paceline.bench.plan import PACELINE
from paceline.collectives import Group

TIMEOUT: Final = timedelta(seconds=60)
_INSTALL_MPI: Final = "pip install mpi4py, and Open MPI itself (Debian: apt install openmpi-bin)"


class Library(ABC):
    """One library, connected on this rank."""

    name: str

    @abstractmethod
    def prepare(self, op: str, buffers: Buffers) -> Callable[[], object]:
        """Return a function that runs an operation on these buffers."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class PacelineLibrary(Library):
    """The collectives of Paceline."""

    name = PACELINE

    def __init__(self, group: Group) -> None:
        self._group = group

    @override
    def prepare(self, op: str, buffers: Buffers) -> Callable[[], object]:
        group, given, result = self._group, buffers.given, buffers.result
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce(given, out=given),
            "broadcast": lambda: group.broadcast(given, root=buffers.root),
            "all_gather": lambda: group.all_gather(given, out=result),
            "reduce_scatter": lambda: group.reduce_scatter(given, out=result),
            "all_to_all": lambda: group.all_to_all(given, out=result),
            "barrier": group.barrier,
        }
        return calls[op]

    @override
    def close(self) -> None:
        """Do nothing: the creator of the group closes it."""


class Gloo(Library):
    """PyTorch's Gloo, over its own sockets, with one compute thread per rank."""

    name = "gloo"

    def __init__(self, group: Group) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self._distributed = importlib.import_module("torch.distributed")
        rank, size = group.rank, group.size
        make_store = self._distributed.TCPStore
        # Rank 0 listens on any free port and sends the port to the other ranks, through Paceline's group.
        store = make_store("127.0.0.1", 0, size, True, TIMEOUT, wait_for_workers=False) if rank == 0 else None
        port = int(group.broadcast(np.array([store.port if store is not None else 0], np.int64))[0])
        store = store or make_store("127.0.0.1", port, size, False, TIMEOUT)
        self._distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)

    @override
    def prepare(self, op: str, buffers: Buffers) -> Callable[[], object]:
        distributed = self._distributed
        given, result = self._torch.from_numpy(buffers.given), self._torch.from_numpy(buffers.result)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: distributed.all_reduce(given),
            "broadcast": lambda: distributed.broadcast(given, buffers.root),
            "all_gather": lambda: distributed.all_gather_into_tensor(result, given),
            "reduce_scatter": lambda: distributed.reduce_scatter_tensor(result, given),
            "all_to_all": lambda: distributed.all_to_all_single(result, given),
            "barrier": distributed.barrier,
        }
        return calls[op]

    @override
    def close(self) -> None:
        self._distributed.destroy_process_group()


class MPI(Library):
    """MPI, from the mpirun that started these ranks."""

    name = "mpi"

    def __init__(self, group: Group) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        if (self._world.rank, self._world.size) != (group.rank, group.size):
            raise RuntimeError("mpi4py was built for another MPI than mpirun; install both from the same MPI")

    @override
    def prepare(self, op: str, buffers: Buffers) -> Callable[[], object]:
        world, given, result, in_place = self._world, buffers.given, buffers.result, self._mpi.IN_PLACE
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: world.Allreduce(in_place, given),
            "broadcast": lambda: world.Bcast(given, buffers.root),
            "all_gather": lambda: world.Allgather(given, result),
            "reduce_scatter": lambda: world.Reduce_scatter_block(given, result),
            "all_to_all": lambda: world.Alltoall(given, result),
            "barrier": world.Barrier,
        }
        return calls[op]

    @override
    def close(self) -> None:
        """Do nothing: mpi4py closes MPI at Python's exit."""


MAKERS: Final[dict[str, Callable[[Group], Library]]] = {PACELINE: PacelineLibrary, "gloo": Gloo, "mpi": MPI}


def find_absent() -> dict[str, str]:
    """Return the missing peers, with instructions for their installation."""
    absent = {}
    if importlib.util.find_spec("torch") is None:
        absent["gloo"] = "not installed: pip install torch"
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        absent["mpi"] = f"not installed: {_INSTALL_MPI}"
    else:
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
        if "Open MPI" not in version.stdout:
            absent["mpi"] = f"mpirun on this machine is not Open MPI's: {_INSTALL_MPI}"
    return absent

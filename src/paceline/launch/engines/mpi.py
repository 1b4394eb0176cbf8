"""mpirun of Open MPI, MPICH and Intel MPI: the place of a launcher among those that it has started."""

from __future__ import annotations

from paceline.environment import Environment
from paceline.errors import UsageError
from paceline.transport.addresses import LOOPBACK

from .placement import Placement


def read_mpi_placement(variables: Environment) -> Placement | None:
    """Return the place of this process in a run of mpirun; None outside of it.

    Raises UsageError for several machines without ``MASTER_ADDR``, because mpirun sets no address.
    """
    rank, size = variables.rank, variables.world_size
    if not variables.is_mpirun or rank is None or size is None:
        return None
    host = LOOPBACK if variables.local_world_size == size else variables.master_addr
    if host is None:
        raise UsageError(
            f"launcher {rank} of {size}: mpirun has started launchers on several machines. Set MASTER_ADDR to the host "
            "of launcher 0, on every machine (mpirun -x MASTER_ADDR or -genv MASTER_ADDR ...)"
        )
    return Placement(
        launcher=rank,
        num_launchers=size,
        local_launcher=variables.local_rank or 0,
        num_local_launchers=variables.local_world_size or 1,
        address=host,
        job=variables.job or "",
    )

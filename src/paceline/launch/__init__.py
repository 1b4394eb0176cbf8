"""Who starts the processes: local clusters, and single roles by hand."""

from .kernels import prepare_kernels
from .local import LocalCluster, local_cluster
from .roles import Joining, run_scheduler, run_server, watch_parent

__all__ = [
    "Joining",
    "LocalCluster",
    "local_cluster",
    "prepare_kernels",
    "run_scheduler",
    "run_server",
    "watch_parent",
]

"""Who starts the processes: local clusters, and single roles by hand."""

from paceline.launch.run.run import RunOptions, run_script

from .connecting import connect
from .kernels import load_kernels, prepare_kernels
from .local import LocalCluster, local_cluster
from .roles import Joining, run_scheduler, run_server
from .supervisor import watch_parent

__all__ = [
    "Joining",
    "LocalCluster",
    "RunOptions",
    "connect",
    "load_kernels",
    "local_cluster",
    "prepare_kernels",
    "run_scheduler",
    "run_script",
    "run_server",
    "watch_parent",
]

"""A Dask task that runs one node of a run, until the ranks have ended or the task is cancelled."""

from __future__ import annotations

from distributed import get_worker
from distributed.worker import WORKER_ANY_RUNNING

from paceline.launch.engines.placement import Placement
from paceline.launch.functions.node import FunctionCall, run_node

_running: set[str] = set()
"""Keys of the tasks that run in this process."""


def run_dask_task(call: FunctionCall, placement: Placement) -> tuple[int, dict[int, bytes]]:
    """Run the ranks of a node as a Dask task; return as :func:`~paceline.launch.functions.node.run_node` does."""
    worker = get_worker()
    key = str(worker.get_current_task())
    task = worker.state.tasks[key]

    def is_needed() -> bool:
        # Dask cannot end a running function. It marks the task if the client cancels it or has disconnected.
        return task.state == "executing" and worker.status in WORKER_ANY_RUNNING

    _running.add(key)
    try:
        return run_node(call, placement, worker.state.nthreads, is_needed)
    finally:
        _running.discard(key)


def running_tasks() -> list[str]:
    """Return the keys of the tasks that run in this process."""
    return list(_running)

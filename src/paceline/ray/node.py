"""The part of a run on a Ray node: an actor that runs a node, until its end or until the caller stops it."""

from __future__ import annotations

import threading

import ray

from paceline.launch.functions.node import NodeRequest, run_node
from paceline.version import __version__


class RayNode:
    """The actor. It needs two threads: one for :meth:`run`, and one for :meth:`stop`."""

    def __init__(self) -> None:
        self._is_stopped = threading.Event()

    def describe(self) -> tuple[str, str, str]:
        """Return the address of the node, its identifier, and the version of Paceline."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), __version__

    def run(self, request: NodeRequest, num_cores: int) -> tuple[int, dict[int, bytes]]:
        """Run the ranks of a node; return as :func:`~paceline.launch.functions.node.run_node` does."""
        return run_node(request, num_cores, lambda: not self._is_stopped.is_set())

    def stop(self) -> None:
        """End the ranks."""
        self._is_stopped.set()

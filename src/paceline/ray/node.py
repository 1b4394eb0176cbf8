"""The part of a run on a Ray node: an actor that runs a node, until its end or until the caller stops it."""

from __future__ import annotations

from paceline.launch.engines.ray_nodes import NodeActor
from paceline.launch.functions.node import NodeRequest, run_node


class FunctionActor(NodeActor):
    """The actor of a node that calls a function on its ranks. It needs two threads."""

    def run(self, request: NodeRequest, num_cores: int) -> tuple[int, dict[int, bytes]]:
        """Run the ranks of a node; return as :func:`~paceline.launch.functions.node.run_node` does."""
        return run_node(request, num_cores, lambda: not self._is_stopped.is_set())

"""Run a function on the nodes of a Ray cluster, with one actor per node."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeVar

from typing_extensions import override

from paceline.closing import Closing
from paceline.environment import Timeout, timedelta_of
from paceline.errors import UsageError
from paceline.launch.engines.placement import Placement
from paceline.launch.engines.ray_nodes import (
    NodeActor,
    RayNodes,
    connect,
    find_places,
    load_values,
    receive,
    wait_all,
)
from paceline.launch.functions.call import END_S, RankResults, make_call
from paceline.launch.functions.node import FunctionCall, run_node

_T = TypeVar("_T")

_POLL_S: Final = 0.2


def run(
    function: Callable[..., _T],
    *arguments: Any,
    num_nodes: int = 1,
    nproc_per_node: int = 1,
    strategy: str | None = None,
    servers: int | None = None,
    cpus_per_rank: float = 1,
    gpus_per_rank: float = 0,
    timeout: Timeout = timedelta(minutes=1),
) -> list[_T]:
    """Call ``function(*arguments)`` on every rank of a run; return the values of all ranks, by rank.

    Calls ``ray.init()`` if Ray is not initialized. An argument that is an ObjectRef is replaced by its value. In the
    function, ``paceline.torch.strategy()`` and ``paceline.collectives.init()`` work as under ``paceline run``.

    - `num_nodes`, `nproc_per_node`: number of nodes, and of ranks on each node. The ranks are new processes. Ray
      chooses different nodes if they have room, and otherwise fewer nodes.
    - `strategy`, `servers`: the options of ``paceline run``.
    - `cpus_per_rank`, `gpus_per_rank`: resources that Ray reserves for each rank until the call returns.
    - `timeout`: time limit (a timedelta, or seconds) until these resources are free and all nodes have started.

    If a rank raises, the call raises the same exception. The cause of this exception is a PeerError with the rank, the
    node and the traceback. Raises PeerError if a rank or a node dies, and UsageError for wrong arguments or missing
    resources. All processes of the run end with the call, and with the calling program.
    """
    cpus, gpus = cpus_per_rank * nproc_per_node, gpus_per_rank * nproc_per_node
    if not 0 < cpus < math.inf or not 0 <= gpus < math.inf or (gpus > 1 and gpus % 1):
        raise UsageError(
            f"got {cpus_per_rank:g} CPUs per rank and {gpus:g} GPUs per node, expected more than 0 CPUs, and whole "
            "GPUs or a part of one GPU"
        )
    call = make_call(
        function,
        load_values(arguments),
        num_nodes=num_nodes,
        nproc_per_node=nproc_per_node,
        strategy=strategy,
        servers=servers,
    )
    limit_s = timedelta_of(timeout).total_seconds()
    connect()
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    with _RayRun(call, num_nodes, resources) as started:
        return started.run(limit_s)


class FunctionActor(NodeActor):
    """The actor that runs the ranks of a node, until the function ends or :meth:`stop`. It needs two threads."""

    def run(self, call: FunctionCall, placement: Placement, num_cores: int) -> tuple[int, dict[int, bytes]]:
        """Run the ranks of a node; return as :func:`~paceline.launch.functions.node.run_node` does."""
        return run_node(call, placement, num_cores, lambda: not self._is_stopped.is_set())


class _RayRun(Closing):
    """The placement group and the actors of a run. :meth:`close` removes them."""

    def __init__(self, call: FunctionCall, num_nodes: int, resources: Mapping[str, float]) -> None:
        """`resources` are the resources of each node."""
        self._call, self._num_nodes, self._resources = call, num_nodes, resources
        self._nodes: RayNodes | None = None
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}
        """The numbers of the nodes that have not ended, by the references to their results."""

    def run(self, timeout_s: float) -> list[Any]:
        """Run all nodes; return the values of all ranks.

        Raises the error of the rank that failed first, and UsageError if a node has not started after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self._nodes = nodes = RayNodes.request([self._resources] * self._num_nodes)
        if not nodes.wait_reserved(timeout_s):
            raise UsageError(
                f"Ray cannot reserve the resources within {timeout_s:g} s: {nodes.describe_shortage()}. Start more Ray "
                "nodes, or request less"
            )
        for number in range(self._num_nodes):
            self._actors.append(nodes.start(FunctionActor, number, self._resources, num_threads=2))
        places = find_places(self._actors, deadline - time.monotonic())
        results = RankResults([place.name for place in places], self._call.num_ranks)
        addresses = [place.address for place in places]
        for number, actor in enumerate(self._actors):
            placement = Placement.on_nodes(addresses, number, self._call.job)
            self._pending[actor.run.remote(self._call, placement, int(self._resources["CPU"]))] = number
        while self._pending:
            for number, value, problem in receive(self._pending, _POLL_S):
                if problem is not None:
                    results.add_loss(number, problem)
                else:
                    results.add_end(number, *value)
            results.raise_cause()
        return results.load_values()

    @override
    def close(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is None or not nodes.is_connected:
            return
        try:
            for actor in self._actors:
                actor.stop.remote()
            wait_all([*self._pending], END_S)
        finally:
            nodes.close()

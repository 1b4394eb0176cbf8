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
from paceline.launch.engines.engine import report
from paceline.launch.engines.node_processes import LAST_S
from paceline.launch.engines.placement import Placement
from paceline.launch.engines.ray_nodes import (
    MOST_REQUESTS,
    RETRY_S,
    NodeActor,
    NodePlace,
    RayNodes,
    connect,
    find_places,
    load_values,
    receive,
    wait_all,
)
from paceline.launch.functions.call import END_S, RankResults, make_call
from paceline.launch.functions.node import FunctionCall, run_node
from paceline.launch.supervisor import describe_status

_T = TypeVar("_T")

_POLL_S: Final = 0.2


def run(
    function: Callable[..., _T],
    *arguments: Any,
    num_nodes: int = 1,
    nproc_per_node: int = 1,
    strategy: str | None = None,
    servers: int | None = None,
    min_ranks: int | None = None,
    max_ranks: int | None = None,
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
    - `min_ranks`: continue without failed ranks and lost nodes, except the first node, while at least this many ranks
      live. Their replacements start when Ray has resources. The call returns the values of the ranks that have ended.
    - `max_ranks`: with `min_ranks`, further nodes join when Ray has resources, until there are this many ranks.
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
        min_ranks=min_ranks,
        max_ranks=max_ranks,
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
        self._num_more = call.num_more
        self._actors: dict[int, Any] = {}
        self._addresses: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._results: RankResults
        self._pending: dict[Any, tuple[int, Callable[[int, Any], None]]] = {}
        """For each reference to a result: the number of the node, and the function that receives the result."""
        self._attempts_s: dict[int, float] = {}
        """The times at which to start lost nodes again."""
        self._ends_s = math.inf
        """The time at which an elastic run ends, after the end of its first node."""

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
            self._actors[number] = nodes.start(FunctionActor, number, self._resources, num_threads=2)
        places = find_places([*self._actors.values()], deadline - time.monotonic())
        self._addresses = {number: place.address for number, place in enumerate(places)}
        self._names |= {number: place.name for number, place in enumerate(places)}
        self._results = RankResults(self._names, self._call.num_ranks)
        for number, place in enumerate(places):
            self._call_function(number, place)
        for _ in range(MOST_REQUESTS):
            self._request_more(nodes)
        while self._running() and time.monotonic() < self._ends_s:
            for (number, take_value), value, problem in receive(self._pending, _POLL_S):
                if problem is None:
                    take_value(number, value)
                elif self._call.is_elastic and number:
                    self._drop_node(number, problem)
                else:
                    self._results.add_loss(number, problem)
            self._results.raise_cause()
            for number, attempt_s in [*self._attempts_s.items()]:
                if time.monotonic() >= attempt_s:
                    del self._attempts_s[number]
                    self._start(number)
        return self._results.load_values()

    def _request_more(self, nodes: RayNodes) -> None:
        """Request the resources of a further node, unless all nodes are requested."""
        if self._num_more:
            self._num_more -= 1
            number, ready = nodes.request_more(self._resources)
            self._pending[ready] = (number, self._add)

    def _add(self, number: int, _: Any) -> None:
        assert self._nodes is not None
        self._start(number)
        self._request_more(self._nodes)

    def _start(self, number: int) -> None:
        """Start the actor of a node that joins or returns."""
        assert self._nodes is not None
        self._actors[number] = self._nodes.start(FunctionActor, number, self._resources, num_threads=2)
        self._pending[self._actors[number].find_place.remote()] = (number, self._call_function)

    def _call_function(self, number: int, place: NodePlace) -> None:
        if place.problem is not None:  # of a node that joins, because the first nodes were checked
            report(f"{place.problem}. The other nodes continue")
            return
        self._names[number], self._addresses[number] = place.name, place.address
        placement = Placement.on_nodes(
            [self._addresses.get(other, "") for other in range(max(self._num_nodes, number + 1))],
            number,
            self._call.job,
            num_launchers=self._num_nodes,
            can_grow=self._call.num_more > 0,
        )
        reference = self._actors[number].run.remote(self._call, placement, int(self._resources["CPU"]))
        self._pending[reference] = (number, self._end)

    def _drop_node(self, number: int, problem: str) -> None:
        """Continue without a lost node, and start its ranks again later."""
        if number not in self._actors:
            return  # Ray has removed the request for a further node
        assert self._nodes is not None
        self._nodes.kill(self._actors[number])
        self._attempts_s[number] = time.monotonic() + RETRY_S
        name = self._names.get(number, f"node {number}")
        report(
            f"the {name} has failed: {problem}; the other nodes continue. The next attempt to start its ranks is in "
            f"{RETRY_S:g} s"
        )

    def _end(self, number: int, end: tuple[int, dict[int, bytes]]) -> None:
        status, reports = end
        if self._call.is_elastic and not status:
            self._results.add_values(reports)
            self._ends_s = self._ends_s if number else time.monotonic() + LAST_S
        elif self._call.is_elastic and number:
            report(f"the ranks on the {self._names[number]} {describe_status(status)}; the other nodes continue")
        else:
            self._results.add_end(number, status, reports)

    def _running(self) -> list[Any]:
        """Return the references to the results of the nodes that have not ended."""
        return [reference for reference, (_, take_value) in self._pending.items() if take_value == self._end]

    @override
    def close(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is None or not nodes.is_connected:
            return
        try:
            for actor in self._actors.values():
                actor.stop.remote()
            wait_all(self._running(), END_S)
        finally:
            nodes.close()

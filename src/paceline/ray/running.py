"""Run a function on the nodes of a Ray cluster: one actor per node, each in a bundle of a placement group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import PeerError, UsageError, printable
from paceline.version import __version__

try:
    import ray
    from ray.exceptions import RayError
    from ray.util import placement_group, remove_placement_group
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("paceline.ray needs Ray, which is not installed: pip install 'paceline[ray]'") from error

from paceline.launch.functions.call import END_S, FunctionCall, RankResults
from paceline.ray.node import RayNode

_T = TypeVar("_T")

_POLL_S: Final = 0.2
_SHOWN_CHARS: Final = 200


def run(
    function: Callable[..., _T],
    *arguments: Any,
    num_nodes: int = 1,
    nproc_per_node: int = 1,
    strategy: str | None = None,
    servers: int | None = None,
    cpus_per_rank: float = 1,
    gpus_per_rank: float = 0,
    timeout: timedelta = timedelta(minutes=1),
) -> list[_T]:
    """Call ``function(*arguments)`` on every rank of a run; return the values of all ranks, by rank.

    Calls ``ray.init()`` if Ray is not initialized. An argument that is an ObjectRef is replaced by its value. In the
    function, ``paceline.torch.strategy()`` and ``paceline.collectives.init()`` work as under ``paceline run``.

    - `num_nodes`, `nproc_per_node`: number of nodes, and of ranks on each node. The ranks are new processes. Ray
      chooses different nodes if they have room, and otherwise fewer nodes.
    - `strategy`, `servers`: the options of ``paceline run``.
    - `cpus_per_rank`, `gpus_per_rank`: resources that Ray reserves for each rank until the call returns.
    - `timeout`: time limit until these resources are free and all nodes have started.

    If a rank raises, the call raises the same exception. The cause of this exception is a PeerError with the rank, the
    node and the traceback. Raises PeerError if a rank or a node dies, and UsageError for wrong arguments or missing
    resources. All processes of the run end with the call, and with the calling program.
    """
    cpus, gpus = cpus_per_rank * nproc_per_node, gpus_per_rank * nproc_per_node
    if cpus_per_rank <= 0 or gpus < 0 or (gpus > 1 and gpus % 1):
        raise UsageError(
            f"got {cpus_per_rank:g} CPUs per rank and {gpus:g} GPUs per node, expected more than 0 CPUs, and whole "
            "GPUs or a part of one GPU"
        )
    call = FunctionCall.make(
        function,
        [ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument for argument in arguments],
        num_nodes=num_nodes,
        nproc_per_node=nproc_per_node,
        strategy=strategy,
        servers=servers,
    )
    if not ray.is_initialized():
        ray.init()
    with _RayRun(call, num_nodes, {"CPU": cpus} | ({"GPU": gpus} if gpus else {})) as started:
        return started.run(timeout.total_seconds())


class _RayRun(Closing):
    """The placement group and the actors of a run. :meth:`close` removes them."""

    def __init__(self, call: FunctionCall, num_nodes: int, resources: Mapping[str, float]) -> None:
        """`resources` are the resources of each node."""
        self._call, self._num_nodes, self._resources = call, num_nodes, resources
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}
        """The nodes whose end is unknown, by the reference to their result."""

    def run(self, timeout_s: float) -> list[Any]:
        """Run all nodes; return the values of all ranks.

        Raises the error of the rank that failed first, and UsageError if a node has not started after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self._group = placement_group([dict(self._resources)] * self._num_nodes, strategy="SPREAD")
        if not _wait_all([self._group.ready()], deadline):
            raise UsageError(
                f"Ray cannot reserve the resources within {timeout_s:g} s: "
                f"{_describe_shortage(self._num_nodes, self._resources)}. Start more Ray nodes, or request less"
            )
        nodes = self._start_actors(deadline)
        results = RankResults([f"Ray node {address} ({node[:8]})" for address, node in nodes], self._call.num_ranks)
        for number, request in enumerate(self._call.requests([address for address, _ in nodes])):
            self._pending[self._actors[number].run.remote(request, int(self._resources["CPU"]))] = number
        while self._pending:
            for ended in ray.wait([*self._pending], timeout=_POLL_S)[0]:
                number = self._pending.pop(ended)
                try:
                    status, reports = ray.get(ended)
                except RayError as error:
                    results.add_loss(number, _reason_of(error))
                else:
                    results.add_end(number, status, reports)
            results.raise_cause()
        return results.load_values()

    @override
    def close(self) -> None:
        group, self._group = self._group, None
        if group is None or not ray.is_initialized():
            return
        try:
            for actor in self._actors:
                actor.stop.remote()
            _wait_all([*self._pending], time.monotonic() + END_S)
        finally:
            remove_placement_group(group)  # kills the actors

    def _start_actors(self, deadline: float) -> list[tuple[str, str]]:
        """Start one actor in each bundle; return the addresses and identifiers of the nodes."""
        cpus, gpus = self._resources["CPU"], self._resources.get("GPU", 0)
        actor = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=2)(RayNode)
        for number in range(self._num_nodes):
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            self._actors.append(actor.options(scheduling_strategy=bundle).remote())
        references = [actor.describe.remote() for actor in self._actors]
        if not _wait_all(references, deadline):
            raise UsageError("Ray has reserved the resources but not started its actors in time. Pass a longer timeout")
        try:
            nodes = ray.get(references)
        except RayError as error:
            raise PeerError(
                f"a Ray actor cannot start: {_reason_of(error)}. All nodes need Paceline {__version__}"
            ) from error
        for address, node, version in nodes:
            if version != __version__:
                raise UsageError(
                    f"the Ray node {address} ({node}) has Paceline {version}, expected {__version__}. Install it there"
                )
        return [(address, node) for address, node, _ in nodes]


def _wait_all(references: Sequence[Any], deadline: float) -> bool:
    """Wait until all results exist; return whether they do."""
    missing = ray.wait(references, num_returns=len(references), timeout=max(deadline - time.monotonic(), 0.0))[1]
    return not missing


def _describe_shortage(num_nodes: int, resources: Mapping[str, float]) -> str:
    existing, free = ray.cluster_resources(), ray.available_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return "; ".join(
        f"{num_nodes} x {amount:g} {name} requested, {existing.get(name, 0):g} existing, {free.get(name, 0):g} free, "
        f"{max(node.get(name, 0) for node in nodes):g} on the largest node"
        for name, amount in resources.items()
    )


def _reason_of(error: RayError) -> str:
    """Return the last line of an error of Ray, which has the cause; earlier lines have tracebacks and identifiers."""
    return printable(str(error).strip().split("\n")[-1], _SHOWN_CHARS)

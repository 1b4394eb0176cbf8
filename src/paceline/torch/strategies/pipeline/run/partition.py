"""A traced model with its cuts: the nodes and parameters of each stage, and the routes of values between stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from paceline.errors import UsageError
from paceline.torch.capture.graph import tensors_of
from paceline.torch.strategies.pipeline.run.layers import LayerGraph, ModelLayer


@dataclass(frozen=True, slots=True)
class ValueRoute:
    """A value that one stage computes and later stages use."""

    value: str
    source: int
    users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueRoutes:
    """All values that stages send to other stages, and the rank of each stage. A rank receives each value once.

    For each value, a rank returns one gradient, which is the sum over its stages that use the value. Source:
    TensorFlow's graph partition (``core/graph/graph_partition.cc``).
    """

    routes: tuple[ValueRoute, ...]
    places: tuple[int, ...]

    def inputs_of(self, stage: int) -> list[ValueRoute]:
        return [route for route in self.routes if stage in route.users]

    def outputs_of(self, stage: int) -> list[ValueRoute]:
        return [route for route in self.routes if route.source == stage]

    def destinations(self, route: ValueRoute) -> list[int]:
        """Return the ranks that use a value, except the rank that computes it."""
        own = self.places[route.source]
        return sorted({self.places[user] for user in route.users} - {own})

    def first_user_on(self, route: ValueRoute, rank: int) -> int | None:
        """Return the first stage on a rank that uses a value. Among these stages, it runs backward last."""
        return min((user for user in route.users if self.places[user] == rank), default=None)

    def last_user_on(self, route: ValueRoute, rank: int) -> int | None:
        """Return the last stage on a rank that uses a value. Among these stages, it runs forward last."""
        return max((user for user in route.users if self.places[user] == rank), default=None)


def route_values(made_by: Mapping[str, int], used_by: Iterable[tuple[str, int]], places: Sequence[int]) -> ValueRoutes:
    """Return the routes, given the stage that computes each value, and a pair (value, stage) for each use."""
    users: dict[str, set[int]] = {}
    for value, stage in used_by:
        if stage != made_by[value]:
            users.setdefault(value, set()).add(stage)
    routes = (ValueRoute(value, made_by[value], tuple(sorted(stages))) for value, stages in users.items())
    return ValueRoutes(tuple(routes), tuple(places))


def shared_parameters(used_by: Mapping[str, Iterable[int]], places: Sequence[int]) -> dict[str, list[int]]:
    """Return the parameters that several ranks use, with these ranks. Their gradients must be summed over the ranks."""
    all_ranks = {name: sorted({places[stage] for stage in stages}) for name, stages in used_by.items()}
    return {name: ranks for name, ranks in all_ranks.items() if len(ranks) > 1}


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of one traced forward."""

    graph: LayerGraph
    stages: tuple[tuple[ModelLayer, ...], ...]
    preludes: tuple[tuple[fx.Node, ...], ...]
    """For each stage, the nodes of other stages that it computes itself, because they depend only on the arguments."""
    routes: ValueRoutes
    parameters: dict[str, list[int]]
    """The stages that use each parameter, by its name."""
    buffers: dict[str, list[int]]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def modules_of(self, stage: int) -> str:
        names = list(dict.fromkeys(layer.name for layer in self.stages[stage]))
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def cut(
    graph: LayerGraph, cuts: Sequence[int], places: Sequence[int], module: nn.Module, *, repeats: bool = True
) -> Partition:
    """Cut a graph before the layers numbered `cuts`.

    With `repeats`, each stage computes the values that depend only on the arguments, instead of receiving them.
    """
    bounds = [0, *cuts, len(graph.layers)]
    stages = tuple(tuple(graph.layers[a:b]) for a, b in itertools.pairwise(bounds))
    made_by = {node: s for s, layers in enumerate(stages) for layer in layers for node in layer.nodes}
    used: list[tuple[fx.Node, int]] = []
    for number, layers in enumerate(stages):
        used += [(arg, number) for layer in layers for node in layer.nodes for arg in node.all_input_nodes]
    used += [(node, len(stages) - 1) for node in graph.captured.output.graph_nodes]
    crossing = [(node, stage) for node, stage in used if node in made_by and made_by[node] != stage]
    free = graph.free if repeats else frozenset()
    preludes = tuple(
        _with_inputs({node for node, user in crossing if user == stage and node in free}, made_by, stage)
        for stage in range(len(stages))
    )
    routes = route_values(
        {node.name: stage for node, stage in made_by.items()},
        [(node.name, stage) for node, stage in crossing if node not in free],
        places,
    )
    nodes = [
        [*prelude, *(node for layer in layers for node in layer.nodes)]
        for prelude, layers in zip(preludes, stages, strict=True)
    ]
    return Partition(graph, stages, preludes, routes, *_find_users(module, graph.captured.root, nodes))


def _with_inputs(wanted: set[fx.Node], made_by: Mapping[fx.Node, int], stage: int) -> tuple[fx.Node, ...]:
    """Return the nodes `wanted`, and all nodes of other stages that they need, in the graph's order."""
    for node in reversed(list(made_by)):
        if node in wanted:
            wanted |= {arg for arg in node.all_input_nodes if arg in made_by and made_by[arg] != stage}
    return tuple(node for node in made_by if node in wanted)


def cuts_by_name(graph: LayerGraph, names: Sequence[str], module: nn.Module) -> list[int]:
    """Return the numbers of the layers at which modules of these names begin. Raises UsageError."""
    cuts = [graph.begin_of(name, module) for name in names]
    for name, number in zip(names, cuts, strict=True):
        if number == 0:
            raise UsageError(f"--split {name}: this module is the first one and begins stage 0. Leave it out")
    for (first, a), (second, b) in itertools.pairwise(zip(names, cuts, strict=True)):
        if b <= a:
            raise UsageError(
                f"--split {','.join(names)}: {second} does not come after {first} in the model's forward. Pass the "
                "names in the order of the calls"
            )
    return cuts


def same_cuts(reference: Partition, graph: LayerGraph) -> list[int]:
    """Return the cuts of another trace of the model, before the same layers as in `reference`. Raises UsageError."""
    firsts = [stage[0] for stage in reference.stages[1:]]
    cuts = [graph.number_of(*reference.graph.place_of(layer)) for layer in firsts]
    if None in cuts or sorted(set(cuts)) != cuts:  # type: ignore[type-var]
        names = ", ".join(layer.name for layer in firsts)
        raise UsageError(
            f"the model calls different layers than in its first call, so stages cannot begin at {names}. Let the "
            "model call the same layers in training, in evaluation and with all arguments"
        )
    return [number for number in cuts if number is not None]


def crossing_values(graph: LayerGraph, cut_at: int) -> list[fx.Node]:
    before = {node for layer in graph.layers[:cut_at] for node in layer.nodes}
    later = [node for layer in graph.layers[cut_at:] for node in layer.nodes]
    used = {arg for node in later for arg in node.all_input_nodes} | set(graph.captured.output.graph_nodes)
    return [node for node in before - graph.free if node in used]


def _find_users(
    module: nn.Module, root: nn.Module, nodes: Sequence[Sequence[fx.Node]]
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    parameters: dict[str, set[int]] = {name: set() for name, _ in module.named_parameters()}
    buffers: dict[str, set[int]] = {name: set() for name, _ in module.named_buffers()}
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    for number, stage_nodes in enumerate(nodes):
        for node in stage_nodes:
            read = [arg for arg in node.all_input_nodes if arg.op == "get_attr"]
            for tensor in (tensor for holder in (node, *read) for tensor in tensors_of(holder, root)):
                name = names.get(id(tensor), "")
                for users in (parameters, buffers):
                    if name in users:
                        users[name].add(number)
    # A tensor that no stage uses belongs to stage 0, so that one process keeps its values.
    return tuple(  # type: ignore[return-value]
        {name: sorted(stages) or [0] for name, stages in users.items()} for users in (parameters, buffers)
    )

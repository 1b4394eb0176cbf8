"""What layers take: each is run forward and backward by itself on a microbatch, on one rank, and messages are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from paceline.torch.strategies.pipeline.graph import LayerGraph, ModelLayer, key_of
from paceline.torch.strategies.pipeline.partition import attribute, crossing_values
from paceline.torch.strategies.pipeline.splitting import LayerCost

_REPEATS = 3
_SMALL, _LARGE = 1 << 8, 1 << 18  # elements of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCost:
    """What a message between two ranks takes."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Return the time of a message of this size."""
        return self.latency_s + self.seconds_per_byte * num_bytes


def measure_layers(
    module: nn.Module, graph: LayerGraph, arguments: Mapping[str, Any]
) -> tuple[list[LayerCost], list[int]]:
    """Return what each layer takes for one microbatch, and by cut the bytes of the values that cross it.

    Values, buffers, gradients and the random state are afterwards what they were before.
    """
    values: dict[str, Any] = {f"argument {name}": value for name, value in arguments.items()}
    layers: list[LayerCost] = []
    sizes: dict[str, int] = {}
    counted: set[int] = set()
    with _undone(module):
        for layer in graph.layers:
            forward_s = backward_s = float("inf")
            for _ in range(_REPEATS):
                made, took, backward = _run_layer(module, layer, values)
                forward_s, backward_s = min(forward_s, took), min(backward_s, backward)
            values.update(made)
            sizes.update({name: _num_bytes(value) for name, value in made.items()})
            new = {id(each): each for each in _parameters(module, layer) if id(each) not in counted}
            counted.update(new)
            layers.append(
                LayerCost(
                    name=layer.name,
                    forward_s=forward_s,
                    backward_s=backward_s,
                    parameter_bytes=sum(each.numel() * each.element_size() for each in new.values()),
                    activation_bytes=sum(_num_bytes(value) for value in made.values()),
                )
            )
    crossing = [
        sum(sizes[node.name] for node in crossing_values(graph, number)) if number else 0
        for number in range(len(graph.layers))
    ]
    return layers, crossing


def measure_link(group: Any, rank: int) -> MessageCost:
    """Return what messages take between the first two ranks of a group; both call it."""
    found = [min(_round_trips(group, rank, size)) / 2 for size in (_SMALL, _LARGE)]
    per_byte = max(found[1] - found[0], 0.0) / ((_LARGE - _SMALL) * 4)
    return MessageCost(latency_s=found[0], seconds_per_byte=per_byte)


def _round_trips(group: Any, rank: int, size: int) -> Iterator[float]:
    buffer = torch.zeros(size)
    for _ in range(2 * _REPEATS):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(buffer, group=group, group_dst=1 - rank)
            else:
                dist.recv(buffer, group=group, group_src=1 - rank)
        yield time.perf_counter() - began


def _run_layer(module: nn.Module, layer: ModelLayer, values: Mapping[str, Any]) -> tuple[dict[str, Any], float, float]:
    """Run a layer on copies of its inputs; return what it makes, and the seconds of forward and backward."""
    inner = {node.name for node in layer.nodes}
    outer = {key_of(arg) for node in layer.nodes for arg in node.all_input_nodes if arg.op != "get_attr"} - inner
    leaves: list[Tensor] = []
    local: dict[str, Any] = {}
    for name in outer:
        local[name] = _copied(values[name], leaves)
    leaves += [each for each in _parameters(module, layer) if each.requires_grad]

    def value_of(arg: fx.Node) -> Any:
        return attribute(module, str(arg.target)) if arg.op == "get_attr" else local[key_of(arg)]

    began = time.perf_counter()
    with torch.enable_grad():
        for node in layer.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
            local[node.name] = _call_of(node, module)(*args, **kwargs)
    forward_s = time.perf_counter() - began
    made = {name: local[name] for name in inner}
    used_inside = {arg.name for node in layer.nodes for arg in node.all_input_nodes}
    ends = [
        tensor
        for name, value in made.items()
        if name not in used_inside or len(layer.nodes) == 1
        for tensor in take_apart_tensors(value)
        if tensor.requires_grad
    ]
    began = time.perf_counter()
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
    return {name: _detached(value) for name, value in made.items()}, forward_s, time.perf_counter() - began


def _call_of(node: fx.Node, module: nn.Module) -> Callable[..., Any]:
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    if node.op == "call_method":
        return lambda owner, *args, **kwargs: getattr(owner, str(node.target))(*args, **kwargs)
    function: Any = node.target
    return function  # type: ignore[no-any-return]


def take_apart_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _parameters(module: nn.Module, layer: ModelLayer) -> list[Tensor]:
    found: list[Tensor] = []
    for node in layer.nodes:
        if node.op == "call_module":
            found += module.get_submodule(str(node.target)).parameters()
        got = [attribute(module, str(arg.target)) for arg in node.all_input_nodes if arg.op == "get_attr"]
        found += [each for each in got if isinstance(each, nn.Parameter)]
    return list({id(each): each for each in found}.values())


def _copied(value: Any, leaves: list[Tensor]) -> Any:
    """Return a copy of a value in a graph of its own; its leaves are added to `leaves`."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        own = leaf.detach().requires_grad_()
        leaves.append(own)
        with torch.enable_grad():
            return own.clone()

    return torch.utils._pytree.tree_map(copy, value)


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _num_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in take_apart_tensors(value))


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Put buffers and the random state back in the end."""
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

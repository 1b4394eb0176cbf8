"""What layers take: each goes forward and backward by itself on a microbatch, on all ranks at once; messages are timed.

Ranks share memory and caches, and a stage's weights are out of the cache when its next microbatch comes. So all ranks
measure at the same time, and what lies in the cache is driven out between calls. A layer is run as a stage of its own,
by the code that runs stages.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.torch.strategies.pipeline.graph import LayerGraph
from paceline.torch.strategies.pipeline.partition import attribute, crossing_values, cut
from paceline.torch.strategies.pipeline.plan.splitting import LayerCost
from paceline.torch.strategies.pipeline.stage import Saved, Stage
from paceline.torch.strategies.pipeline.values import put_together, take_apart

_REPEATS: Final = 5
_LONG_S: Final = 0.5
_SMALL, _LARGE = 1 << 8, 1 << 18  # elements of float32
_MAX_COLD_BYTES: Final = 32 << 20

Filling = Callable[[Sequence[str]], AbstractContextManager[None]]
"""From names of parameters and buffers to a context in which they have memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCost:
    """What a message between two ranks takes."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Return the time of a message of this size."""
        return self.latency_s + self.seconds_per_byte * num_bytes


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """One call of a layer."""

    made: dict[str, Any]
    forward_s: float
    backward_s: float
    weights_s: float


def measure_layers(
    module: nn.Module,
    graph: LayerGraph,
    arguments: Mapping[str, Any],
    *,
    splits: bool = False,
    filled: Filling = lambda names: nullcontext(),
) -> tuple[list[LayerCost], list[int]]:
    """Return what each layer takes for one microbatch, and by cut the bytes of the values that cross it.

    `splits`: whether to find what of a backward can be put off. Values, buffers, gradients and the random state are
    afterwards what they were before.
    """
    count = len(graph.layers)
    partition = cut(graph, range(1, count), [0] * count, module, repeats=False)
    values: dict[str, Any] = {}
    layers: list[LayerCost] = []
    counted: set[int] = set()
    cold = torch.zeros(_cold_bytes(module) // 4)
    with _undone(module):
        for number, layer in enumerate(graph.layers):
            names = [
                name
                for found in (partition.parameters, partition.buffers)
                for name, stages in found.items()
                if number in stages
            ]
            with filled(names):
                stage = Stage(module, partition, number, 0)
                inputs = {route.value: values[route.value] for route in partition.routes.inputs_of(number)}
                tensors = [attribute(module, name) for name in names]
                weights = [each for each in tensors if isinstance(each, nn.Parameter)]
                kept = _saved_bytes(stage, inputs, arguments, weights)
                plain = list(_runs(stage, inputs, arguments, cold, splits=False))
                halves = list(_runs(stage, inputs, arguments, cold, splits=True)) if splits else []
                for each in weights:
                    each.grad = None
            values.update(plain[-1].made)
            new = {id(each): each for each in weights if id(each) not in counted}
            counted.update(new)
            layers.append(
                LayerCost(
                    name=layer.name,
                    forward_s=statistics.median(run.forward_s for run in plain),
                    backward_s=statistics.median(run.backward_s for run in plain),
                    weights_s=statistics.median(run.weights_s for run in halves) if halves else 0.0,
                    parameter_bytes=sum(each.numel() * each.element_size() for each in new.values()),
                    activation_bytes=kept,
                )
            )
    return layers, [_crossing_bytes(graph, number, values) if number else 0 for number in range(count)]


def mean_costs(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[LayerCost]:
    """Return what layers take, of what each rank has measured, as ``asdict`` of :class:`LayerCost` tells it."""
    found = []
    for same in zip(*by_rank, strict=True):
        means = {
            name: statistics.fmean(each[name] for each in same) for name in ("forward_s", "backward_s", "weights_s")
        }
        found.append(LayerCost(**{**same[0], **means}))
    return found


def costs_as_told(costs: Sequence[LayerCost]) -> list[dict[str, Any]]:
    """Return costs as msgpack can hold them."""
    return [asdict(each) for each in costs]


def measure_link(group: Any, rank: int) -> MessageCost:
    """Return what messages take between the first two ranks of a group; both call it."""
    found = [statistics.median(_round_trips(group, rank, size)) / 2 for size in (_SMALL, _LARGE)]
    per_byte = max(found[1] - found[0], 0.0) / ((_LARGE - _SMALL) * 4)
    return MessageCost(latency_s=found[0], seconds_per_byte=per_byte)


def _round_trips(group: Any, rank: int, size: int) -> Iterator[float]:
    buffer = torch.zeros(size)
    for number in range(1 + 2 * _REPEATS):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(buffer, group=group, group_dst=1 - rank)
            else:
                dist.recv(buffer, group=group, group_src=1 - rank)
        if number:
            yield time.perf_counter() - began


def _runs(
    stage: Stage, inputs: Mapping[str, Any], arguments: Mapping[str, Any], cold: Tensor, *, splits: bool
) -> Iterator[_LayerRun]:
    """Yield calls of a layer: the first aside, some, and fewer of one that takes long."""
    end = time.perf_counter() + _LONG_S
    for number in range(1 + _REPEATS):
        found = _run(stage, inputs, arguments, cold, splits=splits)
        if number:
            yield found
        if number > 1 and time.perf_counter() > end:
            return


def _run(
    stage: Stage, inputs: Mapping[str, Any], arguments: Mapping[str, Any], cold: Tensor, *, splits: bool
) -> _LayerRun:
    """Run a layer forward and backward as a pipeline would, which adds to gradients."""
    with torch.enable_grad():
        inputs = {name: _leaf(value) for name, value in inputs.items()}
        cold.add_(1.0)
        began = time.perf_counter()
        products = stage.products(puts_off=splits)
        made, output = stage.forward(inputs, arguments, 0, 0, products)
        forward_s = time.perf_counter() - began
        ends = [each for each in (*tensors_in(made), *tensors_in(output)) if each.requires_grad]
        grads = [torch.ones_like(end) for end in ends]
        cold.add_(1.0)
        began = time.perf_counter()
        saved = Saved(ends, products)
        stage.backward(saved, grads)
        middle = time.perf_counter()
        stage.backward_weights(saved)
        ended = time.perf_counter()
    detached = {name: _map_tensors(Tensor.detach, value) for name, value in made.items()}
    for name, value in detached.items():
        for new, old in zip(tensors_in(value), tensors_in(made[name]), strict=True):
            new.requires_grad_(old.requires_grad)
    return _LayerRun(detached, forward_s, ended - began, ended - middle)


def _saved_bytes(
    stage: Stage, inputs: Mapping[str, Any], arguments: Mapping[str, Any], weights: Sequence[Tensor]
) -> int:
    """Return the bytes that a layer keeps for backward, its weights aside."""
    own = {each.untyped_storage().data_ptr() for each in weights}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        made, _ = stage.forward({name: _leaf(value) for name, value in inputs.items()}, arguments, 0, 0)
    for tensor in tensors_in(made):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _cold_bytes(module: nn.Module) -> int:
    """Return what there is to be gone through for a model's weights to leave the caches."""
    size = sum(each.numel() * each.element_size() for each in module.parameters())
    return min(max(2 * size, 64), _MAX_COLD_BYTES)


def _crossing_bytes(graph: LayerGraph, number: int, values: Mapping[str, Any]) -> int:
    found = [each for node in crossing_values(graph, number) for each in tensors_in(values.get(node.name))]
    return sum(math.prod(each.shape) * each.element_size() for each in found)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    description, tensors = take_apart(value, "a value")
    return put_together(description, [function(tensor) for tensor in tensors])


def _leaf(value: Any) -> Any:
    """Return a value whose tensors are leaves that need a gradient where its own do."""
    return _map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Put buffers, gradients and the random state back in the end."""
    kept = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    grads = [(each, each.grad) for each in module.parameters()]
    state = torch.get_rng_state()
    for each, _ in grads:
        each.grad = None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for each, grad in grads:
            each.grad = grad
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

"""What layers take: each goes forward and backward by itself on a microbatch, and is updated, on all ranks at once.

Ranks share memory and caches, and a stage's weights are out of the cache when its next microbatch comes. So all ranks
measure at the same time, and what lies in the cache is driven out between calls. A layer is run as a stage of its own,
by the code that runs stages.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from paceline.torch.capture.graph import attribute
from paceline.torch.capture.trial_calls import undone
from paceline.torch.strategies.pipeline.plan.splitting import LayerCost
from paceline.torch.strategies.pipeline.run.layers import LayerGraph
from paceline.torch.strategies.pipeline.run.partition import crossing_values, cut
from paceline.torch.strategies.pipeline.run.stage import Saved, Stage
from paceline.torch.strategies.pipeline.run.values import put_together, take_apart

_REPEATS: Final = 8
_FIRST_OF: Final = 3
"""Every which call of a layer finds no gradients."""
_UPDATES: Final = 3
_LONG_S: Final = 0.5
_MAX_COLD_BYTES: Final = 32 << 20

Filling = Callable[[Sequence[str]], AbstractContextManager[None]]
"""From names of parameters and buffers to a context in which they have memory."""


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """One call of a layer."""

    made: dict[str, Any]
    forward_s: float
    backward_s: float
    weights_s: float
    wall_s: float
    """Forward and backward, waits for a core included; the others are processor time."""
    is_first: bool
    """Whether there were no gradients to add to."""


def measure_layers(
    module: nn.Module,
    graph: LayerGraph,
    arguments: Mapping[str, Any],
    *,
    optimizer: Optimizer | None = None,
    splits: bool = False,
    filled: Filling = lambda names: nullcontext(),
) -> tuple[list[LayerCost], list[int]]:
    """Return what each layer takes for one microbatch, and by cut the bytes of the values that cross it.

    `optimizer`: what updates the parameters. `splits`: whether to find what of a backward can be put off. Values,
    buffers, gradients and the random state are afterwards what they were before.
    """
    count = len(graph.layers)
    partition = cut(graph, range(1, count), [0] * count, module, repeats=False)
    values: dict[str, Any] = {}
    layers: list[LayerCost] = []
    all_runs: list[Sequence[_LayerRun]] = []
    counted: set[int] = set()
    cold = torch.zeros(_cold_bytes(module) // 4)
    with undone(module):
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
                runs = list(_runs(stage, inputs, arguments, cold, weights))
                halves = list(_runs(stage, inputs, arguments, cold, weights, splits=True)) if splits else []
                new = {id(each): each for each in weights if id(each) not in counted}
                update_s = _update_s(optimizer, list(new.values()), cold)
                for each in weights:
                    each.grad = None
            values.update(runs[-1].made)
            counted.update(new)
            layers.append(
                replace(
                    _cost_of(layer.name, runs, halves),
                    update_s=update_s,
                    parameter_bytes=sum(each.numel() * each.element_size() for each in new.values()),
                    activation_bytes=kept,
                )
            )
            all_runs.append(runs)
    return _stretched(layers, all_runs), [
        _crossing_bytes(graph, number, values) if number else 0 for number in range(count)
    ]


def mean_costs(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[LayerCost]:
    """Return what layers take, of what each rank has measured, as ``asdict`` of :class:`LayerCost` tells it."""
    found = []
    for same in zip(*by_rank, strict=True):
        means = {name: statistics.fmean(each[name] for each in same) for name in same[0] if name.endswith("_s")}
        found.append(LayerCost(**{**same[0], **means}))
    return found


def costs_as_told(costs: Sequence[LayerCost]) -> list[dict[str, Any]]:
    """Return costs as msgpack can hold them."""
    return [asdict(each) for each in costs]


def _runs(
    stage: Stage,
    inputs: Mapping[str, Any],
    arguments: Mapping[str, Any],
    cold: Tensor,
    weights: Sequence[nn.Parameter],
    *,
    splits: bool = False,
) -> Iterator[_LayerRun]:
    """Yield calls of a layer, some without gradients before: the first aside, and fewer of one that takes long."""
    end = time.perf_counter() + _LONG_S
    for number in range(1 + _REPEATS):
        is_first = number % _FIRST_OF == 0
        if is_first:
            for each in weights:
                each.grad = None
        found = _run(stage, inputs, arguments, cold, splits=splits, is_first=is_first)
        if number:
            yield found
        if number >= _FIRST_OF and time.perf_counter() > end:
            return


def _run(
    stage: Stage,
    inputs: Mapping[str, Any],
    arguments: Mapping[str, Any],
    cold: Tensor,
    *,
    splits: bool,
    is_first: bool,
) -> _LayerRun:
    """Run a layer forward and backward as a pipeline would, which adds to gradients."""
    with torch.enable_grad():
        inputs = {name: _leaf(value) for name, value in inputs.items()}
        cold.add_(1.0)
        wall, began = time.perf_counter(), time.thread_time()
        products = stage.products(defers=splits)
        made, output = stage.forward(inputs, arguments, 0, 0, products)
        forward_s, wall_s = time.thread_time() - began, time.perf_counter() - wall
        ends = [each for each in (*tensors_in(made), *tensors_in(output)) if each.requires_grad]
        grads = [torch.ones_like(end) for end in ends]
        cold.add_(1.0)
        wall, began = time.perf_counter(), time.thread_time()
        saved = Saved(ends, products)
        stage.backward(saved, grads)
        middle = time.thread_time()
        stage.backward_weights(saved)
        ended = time.thread_time()
        wall_s += time.perf_counter() - wall
    detached = {name: _map_tensors(Tensor.detach, value) for name, value in made.items()}
    for name, value in detached.items():
        for new, old in zip(tensors_in(value), tensors_in(made[name]), strict=True):
            new.requires_grad_(old.requires_grad)
    return _LayerRun(detached, forward_s, ended - began, ended - middle, wall_s, is_first)


def _cost_of(name: str, runs: Sequence[_LayerRun], halves: Sequence[_LayerRun]) -> LayerCost:
    """Return the times of a layer, of its calls with whole backwards and with halves."""
    later, first = _median_of([run for run in runs if not run.is_first]), [run for run in runs if run.is_first]
    halved = _median_of([run for run in halves if not run.is_first])
    return replace(
        later,
        name=name,
        weights_s=halved.weights_s,
        halving_s=halved.seconds - later.seconds if halves else 0.0,
        first_s=_median_of(first).backward_s - later.backward_s if first else 0.0,
    )


def _median_of(runs: Sequence[_LayerRun]) -> LayerCost:
    names = ("forward_s", "backward_s", "weights_s")
    return LayerCost(
        name="", **{name: statistics.median([getattr(run, name) for run in runs] or [0.0]) for name in names}
    )


def _stretched(layers: Sequence[LayerCost], runs: Sequence[Sequence[_LayerRun]]) -> list[LayerCost]:
    """Return costs that add up to what all calls took by the clock.

    Layers compare by processor time, so that a split does not depend on what else the machine did meanwhile; a step
    waits that out.
    """
    usual = sum(layer.seconds for layer in layers)
    took = sum(statistics.fmean(run.wall_s for run in each if not run.is_first) for each in runs)
    stretch = took / usual if usual else 1.0
    times = [name for name in asdict(layers[0]) if name.endswith("_s")]
    return [replace(layer, **{name: getattr(layer, name) * stretch for name in times}) for layer in layers]


def _update_s(optimizer: Optimizer | None, weights: Sequence[nn.Parameter], cold: Tensor) -> float:
    """Return what an optimizer takes to update copies of parameters by the gradients that they have."""
    if optimizer is None:
        return 0.0
    own = {id(each) for each in weights if each.grad is not None}
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [_copy_with_grad(each) for each in group["params"] if id(each) in own]}
        for group in optimizer.param_groups
    ]
    took = []
    for _ in range(1 + _UPDATES if own else 0):
        cold.add_(1.0)
        began = time.thread_time()
        try:
            twin.step()
        except Exception:  # one that wants a closure, or has more than torch's base class to copy
            return 0.0
        took.append(time.thread_time() - began)
    return statistics.median(took[1:] or [0.0])


def _copy_with_grad(weight: nn.Parameter) -> nn.Parameter:
    copied = nn.Parameter(weight.detach().clone())
    copied.grad = weight.grad
    return copied


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

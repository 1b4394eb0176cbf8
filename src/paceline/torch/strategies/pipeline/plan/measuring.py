"""Measure the costs of layers, of messages between ranks, and of exchanges between all ranks.

Each layer is measured alone. All ranks measure at the same time, because in a pipeline they also share memory and
caches. The cache is flushed between calls, because in a pipeline the weights of a stage are no longer in the cache when
the next microbatch arrives.
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
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from paceline.torch.capture.graph import attribute, undone
from paceline.torch.strategies.pipeline.plan.splitting import LayerCost, MessageCost
from paceline.torch.strategies.pipeline.run.layers import LayerGraph
from paceline.torch.strategies.pipeline.run.partition import crossing_values, cut
from paceline.torch.strategies.pipeline.run.stage import Saved, Stage
from paceline.torch.strategies.pipeline.run.values import put_together, take_apart

_REPEATS: Final = 8
_FIRST_OF: Final = 3
"""Every third call of a layer starts without gradients, like the first microbatch of a step."""
_UPDATES: Final = 3
_LONG_S: Final = 0.5
_MAX_COLD_BYTES: Final = 32 << 20
_ROUND_TRIPS: Final = 10
_AGREEMENTS: Final = 3
_SMALL, _LARGE = 1 << 8, 1 << 18  # sizes of messages, in elements of float32

Filling = Callable[[Sequence[str]], AbstractContextManager[None]]
"""A function that returns a context in which the named parameters and buffers have memory and values."""


@dataclass(frozen=True, slots=True)
class _LayerRun:
    made: dict[str, Any]
    forward_s: float
    backward_s: float
    weights_s: float
    wall_s: float
    """Wall time of forward and backward, which includes waits for a core. All other times are processor time.
    """
    is_first: bool
    """Whether the parameters had no gradients before the call."""


def measure_layers(
    module: nn.Module,
    graph: LayerGraph,
    arguments: Mapping[str, Any],
    *,
    optimizer: Optimizer | None = None,
    splits: bool = False,
    filled: Filling = lambda names: nullcontext(),
) -> tuple[list[LayerCost], list[int]]:
    """Return the cost of each layer for one microbatch, and the bytes that cross each cut.

    With `splits`, also measure the part of a backward that can be deferred. At the end, restore the model's state.
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
                for users in (partition.parameters, partition.buffers)
                for name, stages in users.items()
                if number in stages
            ]
            with filled(names):
                stage = Stage(module, partition, number, 0)
                inputs = {route.value: values[route.value] for route in partition.routes.inputs_of(number)}
                tensors = [attribute(module, name) for name in names]
                weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
                saved_bytes = _saved_bytes(stage, inputs, arguments, weights)
                runs = list(_runs(stage, inputs, arguments, cold, weights))
                halves = list(_runs(stage, inputs, arguments, cold, weights, splits=True)) if splits else []
                new = {id(weight): weight for weight in weights if id(weight) not in counted}
                update_s = _update_s(optimizer, list(new.values()), cold)
                for weight in weights:
                    weight.grad = None
            values.update(runs[-1].made)
            counted.update(new)
            layers.append(
                replace(
                    _cost_of(layer.name, runs, halves),
                    update_s=update_s,
                    parameter_bytes=sum(weight.numel() * weight.element_size() for weight in new.values()),
                    activation_bytes=saved_bytes,
                )
            )
            all_runs.append(runs)
    return _stretched(layers, all_runs), [
        _crossing_bytes(graph, number, values) if number else 0 for number in range(count)
    ]


def mean_costs(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[LayerCost]:
    """Return the layers' costs, averaged over the ranks. A rank's costs are dictionaries with LayerCost's fields."""
    means = []
    for same in zip(*by_rank, strict=True):
        times = {name: statistics.fmean(cost[name] for cost in same) for name in same[0] if name.endswith("_s")}
        means.append(LayerCost(**{**same[0], **times}))
    return means


def _runs(
    stage: Stage,
    inputs: Mapping[str, Any],
    arguments: Mapping[str, Any],
    cold: Tensor,
    weights: Sequence[nn.Parameter],
    *,
    splits: bool = False,
) -> Iterator[_LayerRun]:
    """Warm up a layer, then yield measured calls. Some begin without gradients. Slow layers get fewer calls."""
    end = time.perf_counter() + _LONG_S
    for number in range(1 + _REPEATS):
        is_first = number % _FIRST_OF == 0
        if is_first:
            for weight in weights:
                weight.grad = None
        run = _run(stage, inputs, arguments, cold, splits=splits, is_first=is_first)
        if number:
            yield run
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
    with torch.enable_grad():
        inputs = {name: _leaf(value) for name, value in inputs.items()}
        cold.add_(1.0)
        wall, began = time.perf_counter(), time.thread_time()
        products = stage.products(defers=splits)
        made, output = stage.forward(inputs, arguments, 0, 0, products)
        forward_s, wall_s = time.thread_time() - began, time.perf_counter() - wall
        ends = [tensor for tensor in (*tensors_in(made), *tensors_in(output)) if tensor.requires_grad]
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
    """Multiply the layers' costs by one factor, so that their sum is the wall time of all calls.

    Other work of the machine makes a step longer, but does not change the processor time of a layer.
    """
    processor_s = sum(layer.seconds for layer in layers)
    wall_s = sum(statistics.fmean(run.wall_s for run in layer_runs if not run.is_first) for layer_runs in runs)
    stretch = wall_s / processor_s if processor_s else 1.0
    times = [name for name in asdict(layers[0]) if name.endswith("_s")]
    return [replace(layer, **{name: getattr(layer, name) * stretch for name in times}) for layer in layers]


def _update_s(optimizer: Optimizer | None, weights: Sequence[nn.Parameter], cold: Tensor) -> float:
    """Return the time of an optimizer's update, measured on copies of the parameters that have gradients."""
    if optimizer is None:
        return 0.0
    updated = {id(weight) for weight in weights if weight.grad is not None}
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [_copy_with_grad(weight) for weight in group["params"] if id(weight) in updated]}
        for group in optimizer.param_groups
    ]
    times = []
    for _ in range(1 + _UPDATES if updated else 0):
        cold.add_(1.0)
        began = time.thread_time()
        try:
            twin.step()
        except Exception:  # the optimizer needs a closure, or keeps state outside of `state`
            return 0.0
        times.append(time.thread_time() - began)
    return statistics.median(times[1:] or [0.0])


def _copy_with_grad(weight: nn.Parameter) -> nn.Parameter:
    copied = nn.Parameter(weight.detach().clone())
    copied.grad = weight.grad
    return copied


def _saved_bytes(
    stage: Stage, inputs: Mapping[str, Any], arguments: Mapping[str, Any], weights: Sequence[Tensor]
) -> int:
    own = {weight.untyped_storage().data_ptr() for weight in weights}
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
    """Return how many bytes must be written to remove the model's weights from the caches."""
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    return min(max(2 * size, 64), _MAX_COLD_BYTES)


def _crossing_bytes(graph: LayerGraph, number: int, values: Mapping[str, Any]) -> int:
    tensors = [tensor for node in crossing_values(graph, number) for tensor in tensors_in(values.get(node.name))]
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    description, tensors = take_apart(value, "a value")
    return put_together(description, [function(tensor) for tensor in tensors])


def _leaf(value: Any) -> Any:
    """Return a copy of a value, with tensors that are leaves of autograd. They need gradients as the originals do."""
    return _map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def measure_link(group: Any, rank: int) -> MessageCost:
    """Return the times of messages between the first two ranks of a group. Only these two ranks call this function."""
    small, large = (_trip(group, rank, size) for size in (_SMALL, _LARGE))
    (latency_s, per_byte), (sending_s, sending_per_byte) = (
        (of_small, max(of_large - of_small, 0.0) / ((_LARGE - _SMALL) * 4))
        for of_small, of_large in zip(small, large, strict=True)
    )
    return MessageCost(
        latency_s=latency_s,
        seconds_per_byte=per_byte,
        sending_s=sending_s,
        sending_s_per_byte=sending_per_byte,
    )


def measure_agreement(group: Any) -> float:
    times = []
    for _ in range(1 + _ROUND_TRIPS):
        began = time.perf_counter()
        group.group.all_gather_objects(["measures", "", None, [0, 0.0, {}]])
        times.append(time.perf_counter() - began)
    return _AGREEMENTS * statistics.median(times[1:])


def _trip(group: Any, rank: int, size: int) -> tuple[float, float]:
    trips, sends = zip(*_round_trips(group, rank, size), strict=True)
    return statistics.median(trips) / 2, statistics.median(sends)


def _round_trips(group: Any, rank: int, size: int) -> Iterator[tuple[float, float]]:
    outgoing, incoming = torch.zeros(size), torch.zeros(size)
    for number in range(1 + _ROUND_TRIPS):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                sending = time.perf_counter()
                work = dist.isend(outgoing, group=group, group_dst=1 - rank)
                sent = time.perf_counter()
                assert work is not None
                work.wait()
            else:
                dist.recv(incoming, group=group, group_src=1 - rank)
        if number:
            yield time.perf_counter() - began, sent - sending

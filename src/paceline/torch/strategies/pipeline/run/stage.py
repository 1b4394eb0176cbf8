"""Run the forward or backward of one stage for one microbatch, without communication."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.torch.capture.graph import attribute, changes_in_place, may_draw
from paceline.torch.strategies.pipeline.run.layers import key_of
from paceline.torch.strategies.pipeline.run.partition import Partition
from paceline.torch.strategies.pipeline.run.values import put_together, take_apart
from paceline.torch.strategies.pipeline.run.weights import WeightProducts, is_large


class LayerError(Exception):
    """Raised if a layer's forward failed. The message is the layer's name, and the cause is the layer's exception."""


@dataclass(slots=True)
class Saved:
    """The data that a stage keeps from a microbatch's forward for the microbatch's backward."""

    outputs: list[Tensor]
    """The outputs that need a gradient."""
    products: WeightProducts | None


class Stage:
    """Runs the layers of one stage. Random numbers depend on (seed, step, layer, microbatch), not on the rank."""

    def __init__(self, module: nn.Module, partition: Partition, number: int, seed: int) -> None:
        self.number = number
        self._root = root = partition.graph.captured.root
        self._seed = seed
        self._is_last = number == partition.num_stages - 1
        self._output = partition.graph.captured.output
        self._nodes = [
            *(("an operation on the arguments", node) for node in partition.preludes[number]),
            *((layer.name, node) for layer in partition.stages[number] for node in layer.nodes),
        ]
        self._inputs = [route.value for route in partition.routes.inputs_of(number)]
        self._returned = {route.value for route in partition.routes.outputs_of(number)}
        if self._is_last:
            self._returned |= {node.name for node in self._output.graph_nodes}
        self._calls = {node: _callable(node, root) for _, node in self._nodes}
        self._random = {node for _, node in self._nodes if may_draw(node, root)}
        self._clones = any(_may_change_inputs(node, root) for _, node in self._nodes)
        self._last_use = self._find_last_uses()
        weights = [attribute(module, name) for name, stages in partition.parameters.items() if number in stages]
        self._has_large_weights = any(weight.dim() == 2 and is_large(weight) for weight in weights)

    def products(self, *, defers: bool) -> WeightProducts | None:
        """Return an object that computes weight gradients, later if `defers`; None: let autograd compute them."""
        if not torch.is_grad_enabled() or not (defers or self._has_large_weights):
            return None
        return WeightProducts(defers=defers)

    def forward(
        self,
        inputs: Mapping[str, Any],
        arguments: Mapping[str, Any],
        step: int,
        microbatch: int,
        products: WeightProducts | None = None,
    ) -> tuple[dict[str, Any], Any]:
        """Return the values for other stages by name, and the model's output in the last stage. Raises LayerError."""
        with nullcontext() if products is None else products:
            return self._forward(inputs, arguments, step, microbatch)

    def _forward(
        self, inputs: Mapping[str, Any], arguments: Mapping[str, Any], step: int, microbatch: int
    ) -> tuple[dict[str, Any], Any]:
        values: dict[str, Any] = {f"argument {name}": value for name, value in arguments.items()}
        for name in self._inputs:
            values[name] = _cloned(inputs[name]) if self._clones else inputs[name]
        for layer, node in self._nodes:
            try:
                call = functools.partial(self._run, node, values)
                values[node.name] = self._seeded(call, node, step, microbatch) if node in self._random else call()
            except Exception as error:
                raise LayerError(layer) from error
            for name in self._last_use.get(node, ()):
                values.pop(name, None)
        output = self._output.fill(lambda node: self._value_of(node, values)) if self._is_last else None
        return {name: values[name] for name in self._returned if name in values}, output

    def backward(self, saved: Saved, grads: Sequence[Tensor | None]) -> None:
        """Add gradients to the parameters and the inputs, given the gradients `grads` of ``saved.outputs``."""
        pairs = [(o, g) for o, g in zip(saved.outputs, grads, strict=True) if g is not None]
        saved.outputs = []
        if not pairs:
            return
        with nullcontext() if saved.products is None else saved.products.active():
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

    def backward_weights(self, saved: Saved) -> None:
        """Add the products that :meth:`backward` deferred to the gradients of weights."""
        if saved.products is not None:
            saved.products.finish()

    def _run(self, node: fx.Node, values: Mapping[str, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: self._value_of(arg, values))
        return self._calls[node](*args, **kwargs)

    def _value_of(self, node: fx.Node, values: Mapping[str, Any]) -> Any:
        return attribute(self._root, str(node.target)) if node.op == "get_attr" else values[key_of(node)]

    def _seeded(self, call: Any, node: fx.Node, step: int, microbatch: int) -> Any:
        # torch.manual_seed would also seed every other device, which takes 25 ms of a step of 140 ms.
        generator = torch.default_generator
        state = generator.get_state()
        try:
            generator.manual_seed(zlib.crc32(f"{self._seed} {step} {node.name} {microbatch}".encode()))
            return call()
        finally:
            generator.set_state(state)

    def _find_last_uses(self) -> dict[fx.Node, list[str]]:
        last: dict[str, fx.Node] = {}
        for _, node in self._nodes:
            last[node.name] = node
            for arg in node.all_input_nodes:
                last[key_of(arg)] = node
        lasting = set(self._returned)
        if self._is_last:
            lasting |= {key_of(node) for node in self._output.graph_nodes}
        names: dict[fx.Node, list[str]] = {}
        for name, node in last.items():
            if name not in lasting:
                names.setdefault(node, []).append(name)
        return names


def _callable(node: fx.Node, module: nn.Module) -> Any:
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    if node.op == "call_method":
        return lambda owner, *args, **kwargs: getattr(owner, str(node.target))(*args, **kwargs)
    return node.target


def _may_change_inputs(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a node, or a module inside its module, changes values in place."""
    within = module.get_submodule(str(node.target)).modules() if node.op == "call_module" else ()
    return changes_in_place(node, module) or any(getattr(inner, "inplace", False) is True for inner in within)


def _cloned(value: Any) -> Any:
    description, tensors = take_apart(value, "a value")
    return put_together(description, [tensor.clone() for tensor in tensors])

"""One stage at work on one microbatch: its nodes forward, its gradients backward. Talks to nobody."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from paceline.torch.graph_rules import changes_in_place, draws
from paceline.torch.strategies.pipeline.graph import key_of
from paceline.torch.strategies.pipeline.partition import Partition, attribute, nodes_in
from paceline.torch.strategies.pipeline.values import put_together, take_apart


class LayerError(Exception):
    """A layer's forward has raised; its name is the message, what it raised the cause."""


class Saved:
    """What a stage keeps of a microbatch between forward and backward."""

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.inputs = inputs
        """Those that need a gradient."""
        self.outputs = outputs
        self.grads: list[Tensor | None] = []
        self.groups: list[dict[str, Any]] | None = None
        """Between the two halves of a split backward."""


class Stage:
    """The layers of one stage. Dropout and the like draw from (seed, step, layer, microbatch), wherever they run."""

    def __init__(self, module: nn.Module, partition: Partition, number: int, seed: int) -> None:
        self.number = number
        self._module = module
        self._seed = seed
        self._is_last = number == partition.num_stages - 1
        self._output = partition.graph.output
        self._nodes = [(layer.name, node) for layer in partition.stages[number] for node in layer.nodes]
        self._inputs = [route.value for route in partition.routes.inputs_of(number)]
        self._kept = {route.value for route in partition.routes.outputs_of(number)}
        if self._is_last:
            self._kept |= {node.name for node in nodes_in(self._output)}
        self._calls = {node: _callable(node, module) for _, node in self._nodes}
        self._random = {node for _, node in self._nodes if _may_draw(node, module)}
        self._clones = any(_may_change_inputs(node, module) for _, node in self._nodes)
        self._last_use = self._find_last_uses()
        own = [name for name, stages in partition.parameters.items() if number in stages]
        self._weights = [attribute(module, name) for name in own]

    def forward(
        self, inputs: Mapping[str, Any], arguments: Mapping[str, Any], step: int, microbatch: int
    ) -> tuple[dict[str, Any], Any]:
        """Compute; return the values that other stages use, by name, and, of the last stage, the model's output.

        `inputs` are the values of earlier stages, `arguments` those of the model. Raises LayerError.
        """
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
        output = fx.node.map_arg(self._output, lambda node: values[key_of(node)]) if self._is_last else None
        return {name: values[name] for name in self._kept if name in values}, output

    def backward(self, saved: Saved, grads: Sequence[Tensor | None]) -> None:
        """Add to the gradients of the parameters and the inputs. `grads` are those of ``saved.outputs``."""
        pairs = [(o, g) for o, g in zip(saved.outputs, grads, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

    def backward_inputs(self, saved: Saved, grads: Sequence[Tensor | None]) -> None:
        """Add to the gradients of the inputs only; :meth:`backward_weights` does the rest."""
        pairs = [(o, g) for o, g in zip(saved.outputs, grads, strict=True) if g is not None]
        saved.grads = list(grads)
        weights = [each for each in self._weights if each.requires_grad]
        if not saved.inputs or not pairs or any(o.is_leaf for o, _ in pairs):
            return  # nothing to hand back, or an input that is an output: all of it is done at once, with the weights
        aliases = [output.view_as(output) for output, _ in pairs]
        # Torch detaches them in place, and something may have saved them.
        outputs = [output.clone() for output, _ in pairs]
        given = [grad for _, grad in pairs]
        _, groups = stage_backward_input(outputs, given, saved.inputs, iter(weights))
        covered = {node for group in groups for node in group["params"]}
        rest = [each for each in weights if _accumulator(each) not in covered]
        if rest:  # they reach the outputs by ways that no input is on, which torch leaves out
            found = torch.autograd.grad(aliases, rest, given, allow_unused=True, retain_graph=True)
            for weight, grad in zip(rest, found, strict=True):
                if grad is not None:
                    weight.grad = grad if weight.grad is None else weight.grad + grad
        saved.groups = groups

    def backward_weights(self, saved: Saved) -> None:
        """Add to the gradients of the parameters, after :meth:`backward_inputs`."""
        if saved.groups is None:
            self.backward(saved, saved.grads)
        else:
            stage_backward_weight(iter([each for each in self._weights if each.requires_grad]), saved.groups)

    def hands_back_at_once(self, saved: Saved) -> bool:
        """Whether the first half of a split backward has left the inputs' gradients."""
        return saved.groups is not None

    def _run(self, node: fx.Node, values: Mapping[str, Any]) -> Any:
        def value_of(arg: fx.Node) -> Any:
            return attribute(self._module, str(arg.target)) if arg.op == "get_attr" else values[key_of(arg)]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        return self._calls[node](*args, **kwargs)

    def _seeded(self, call: Any, node: fx.Node, step: int, microbatch: int) -> Any:
        state = torch.get_rng_state()
        try:
            torch.manual_seed(zlib.crc32(f"{self._seed} {step} {node.name} {microbatch}".encode()))
            return call()
        finally:
            torch.set_rng_state(state)

    def _find_last_uses(self) -> dict[fx.Node, list[str]]:
        last: dict[str, fx.Node] = {}
        for _, node in self._nodes:
            last[node.name] = node
            for arg in node.all_input_nodes:
                last[key_of(arg)] = node
        found: dict[fx.Node, list[str]] = {}
        for name, node in last.items():
            if name not in self._kept:
                found.setdefault(node, []).append(name)
        if self._is_last:
            used = {key_of(node) for node in nodes_in(self._output)}
            found = {node: [name for name in names if name not in used] for node, names in found.items()}
        return found


def _callable(node: fx.Node, module: nn.Module) -> Any:
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    if node.op == "call_method":
        return lambda owner, *args, **kwargs: getattr(owner, str(node.target))(*args, **kwargs)
    return node.target


def _may_draw(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node draws random numbers, or is a module that nobody can look into."""
    is_own = node.op == "call_module" and not module.get_submodule(str(node.target)).__module__.startswith("torch.nn")
    return is_own or draws(node, module)


def _may_change_inputs(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node changes values in place, or a module within the one that it calls does."""
    within = module.get_submodule(str(node.target)).modules() if node.op == "call_module" else ()
    return changes_in_place(node, module) or any(getattr(inner, "inplace", False) is True for inner in within)


def _cloned(value: Any) -> Any:
    description, tensors = take_apart(value, "a value")
    return put_together(description, [tensor.clone() for tensor in tensors])


def _accumulator(weight: Tensor) -> Any:
    function = weight.view_as(weight).grad_fn
    assert function is not None
    return function.next_functions[0][0]

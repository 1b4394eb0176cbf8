"""Run one rank's part of a step: its actions in order, and the messages with values and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from paceline.torch.strategies.pipeline.run.actions import Action, ActionError
from paceline.torch.strategies.pipeline.run.messages import Messages
from paceline.torch.strategies.pipeline.run.partition import Partition, ValueRoute
from paceline.torch.strategies.pipeline.run.stage import Saved, Stage
from paceline.torch.strategies.pipeline.run.values import put_together, take_apart
from paceline.torch.strategies.pipeline.run.weights import WeightProducts

_AHEAD = 2
"""The receives of this many following actions are started in advance."""

LossOf = Callable[[int, Any], Tensor]
"""A function that returns a microbatch's part of the loss, given its number and the model's output for it."""


class PipelineStep:
    """Runs one rank's part of a step. :meth:`run` may be called several times, each time with some of the actions."""

    def __init__(
        self,
        partition: Partition,
        stages: Mapping[int, Stage],
        rank: int,
        messages: Messages,
        arguments: Sequence[Mapping[str, Any]],
        number: int,
        split: Set[tuple[int, int]] = frozenset(),
    ) -> None:
        """`arguments` has the model's arguments by microbatch, `split` each (stage, microbatch) with split backward."""
        self._partition, self._routes = partition, partition.routes
        self._stages = stages
        self._rank = rank
        self._messages = messages
        self.arguments = arguments
        self._number = number
        self._split = split
        self._route_number = {route.value: number for number, route in enumerate(self._routes.routes)}
        self._inputs: dict[tuple[str, int], Any] = {}
        """Values from earlier stages, by (name, microbatch). They are leaves of this rank's autograd graph."""
        self._sent_tensors: dict[tuple[str, int], Any] = {}
        """Tensors, with autograd graphs, that this rank's stages computed for other stages, by (name, microbatch)."""
        self._saved: dict[tuple[int, int], Saved] = {}
        self.outputs: dict[int, Any] = {}
        """The model's output by microbatch, on the rank of the last stage."""
        self.losses: dict[int, Tensor] = {}
        self.busy_s: dict[str, float] = {}
        """Seconds of computing by kind and stage: ``F3`` is the forward of stage 3, ``B3`` its backward."""

    def run(
        self,
        actions: Sequence[Action],
        loss_of: LossOf | None = None,
        output_grads: Mapping[int, Sequence[Tensor | None]] | None = None,
    ) -> Self:
        """Run the actions in order. The last stage's backward starts from `loss_of`, or from `output_grads`.

        Raises ActionError if this rank fails, and the process group's errors if other ranks fail.
        """
        for number, action in enumerate(actions):
            for following in actions[number : number + _AHEAD + 1]:
                self._post_receives(following)
            if action.kind == "F":
                self._forward(action, loss_of)
            else:
                self._backward(action, output_grads)
            self._messages.wait_sends(wait=False)
        self._messages.wait_sends(wait=True)
        return self

    @property
    def has_outputs(self) -> bool:
        return self._partition.num_stages - 1 in self._stages

    def _forward(self, action: Action, loss_of: LossOf | None) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        inputs = {}
        for route in self._routes.inputs_of(action.stage):
            key = (route.value, microbatch)
            if key not in self._inputs:
                source = self._routes.places[route.source]
                self._inputs[key] = self._messages.receive_value(self._number_of(route), microbatch, source)
            inputs[route.value] = self._inputs[key]
        began = time.perf_counter()
        loss: Tensor | None = None
        products = stage.products(defers=(action.stage, microbatch) in self._split)
        is_last = action.stage == self._partition.num_stages - 1
        try:
            made, output = stage.forward(inputs, self.arguments[microbatch], self._number, microbatch, products)
            if is_last and loss_of is not None:
                loss = loss_of(microbatch, output)
        except Exception as error:
            raise ActionError(action) from error
        self._count(action, began)
        for route in self._routes.outputs_of(action.stage):
            self._send_value(route, microbatch, made[route.value])
        if is_last:
            self.outputs[microbatch] = output if loss is None else _detached(output)
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        self._save(action, output, loss, products)
        if not torch.is_grad_enabled():
            for route in self._routes.inputs_of(action.stage):
                if action.stage == self._routes.last_user_on(route, self._rank):
                    self._inputs.pop((route.value, microbatch), None)

    def _send_value(self, route: ValueRoute, microbatch: int, value: Any) -> None:
        label = f"the value {route.value!r} of stage {route.source}"
        description, tensors = take_apart(value, label)
        for rank in self._routes.destinations(route):
            self._messages.send_value(value, label, self._number_of(route), microbatch, rank)
        if torch.is_grad_enabled():
            self._sent_tensors[route.value, microbatch] = [tensor for tensor in tensors if tensor.requires_grad]
        if self._rank in (self._routes.places[user] for user in route.users):
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            self._inputs[route.value, microbatch] = put_together(description, leaves)

    def _save(self, action: Action, output: Any, loss: Tensor | None, products: WeightProducts | None) -> None:
        if not torch.is_grad_enabled():
            return
        outputs = [
            tensor
            for route in self._routes.outputs_of(action.stage)
            for tensor in self._sent_tensors[route.value, action.microbatch]
        ]
        if loss is not None:
            outputs.append(loss)
        elif action.stage == self._partition.num_stages - 1:
            outputs += [tensor for tensor in _tensors(output) if tensor.requires_grad]
        self._saved[action.stage, action.microbatch] = Saved(outputs, products)

    def _backward(self, action: Action, output_grads: Mapping[int, Sequence[Tensor | None]] | None) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        saved = self._saved[key]
        grads: list[Tensor | None] = []
        if action.kind != "W":
            for route in self._routes.outputs_of(action.stage):
                grads += self._grads_of(route, action.microbatch)
            if action.stage == self._partition.num_stages - 1:
                grads += self._last_grads(action.microbatch, output_grads)
        began = time.perf_counter()
        try:
            if action.kind == "W":
                stage.backward_weights(saved)
            else:
                stage.backward(saved, grads)
        except Exception as error:
            raise ActionError(action) from error
        self._count(action, began)
        if action.kind != "W":
            self._return_grads(action)
        if action.kind != "I":
            del self._saved[key]

    def _grads_of(self, route: ValueRoute, microbatch: int) -> list[Tensor | None]:
        tensors = self._sent_tensors.pop((route.value, microbatch))
        grads: list[Tensor | None] = [None] * len(tensors)
        if not tensors:
            return grads
        if self._rank in (self._routes.places[user] for user in route.users):
            leaves = [leaf for leaf in _tensors(self._inputs.pop((route.value, microbatch))) if leaf.requires_grad]
            grads = [leaf.grad for leaf in leaves]
        for rank in self._routes.destinations(route):
            received = self._messages.receive_grads(tensors, self._number_of(route), microbatch, rank)
            grads = [new if grad is None else grad + new for grad, new in zip(grads, received, strict=True)]
        return grads

    def _last_grads(
        self, microbatch: int, output_grads: Mapping[int, Sequence[Tensor | None]] | None
    ) -> list[Tensor | None]:
        if output_grads is None:
            return [torch.ones_like(self.losses[microbatch])]
        needs = [tensor.requires_grad for tensor in _tensors(self.outputs[microbatch])]
        return [grad for grad, needed in zip(output_grads[microbatch], needs, strict=True) if needed]

    def _return_grads(self, action: Action) -> None:
        """After the last backward on this rank that uses received values, send their gradients to their sources."""
        for route in self._routes.inputs_of(action.stage):
            if action.stage != self._routes.first_user_on(route, self._rank):
                continue
            source = self._routes.places[route.source]
            if source == self._rank:
                continue  # this rank produced the value, so _grads_of reads the gradients from the leaves
            leaves = [
                leaf for leaf in _tensors(self._inputs.pop((route.value, action.microbatch))) if leaf.requires_grad
            ]
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            self._messages.send_grads(grads, self._number_of(route), action.microbatch, source)

    def _post_receives(self, action: Action) -> None:
        """Post the receives for an action, if the shapes of its values are known."""
        microbatch = action.microbatch
        if action.kind == "F":
            for route in self._routes.inputs_of(action.stage):
                source = self._routes.places[route.source]
                if source != self._rank and (route.value, microbatch) not in self._inputs:
                    self._messages.post_value(self._number_of(route), microbatch, source)
        elif action.kind != "W":
            for route in self._routes.outputs_of(action.stage):
                tensors = self._sent_tensors.get((route.value, microbatch), [])
                for rank in self._routes.destinations(route) if tensors else ():
                    self._messages.post_grads(tensors, self._number_of(route), microbatch, rank)

    def _number_of(self, route: ValueRoute) -> int:
        return self._route_number[route.value]

    def _count(self, action: Action, began: float) -> None:
        key = f"{'F' if action.kind == 'F' else 'B'}{action.stage}"
        self.busy_s[key] = self.busy_s.get(key, 0.0) + time.perf_counter() - began


def _tensors(value: Any) -> list[Tensor]:
    return take_apart(value, "the model's output")[1]


def _detached(value: Any) -> Any:
    description, tensors = take_apart(value, "the model's output")
    return put_together(description, [tensor.detach() for tensor in tensors])

"""Run a call of a pipelined model as soon as the training loop needs the call's values or gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from paceline.errors import UsageError
from paceline.torch.strategies.pipeline.loop.batches import row_bounds
from paceline.torch.strategies.pipeline.loop.losses import PartialLoss
from paceline.torch.strategies.pipeline.loop.output_rows import NumberWeights, OutputRows
from paceline.torch.strategies.pipeline.plan.orders import Orders, backward_part, forward_part
from paceline.torch.strategies.pipeline.run.engine import LossOf, PipelineStep
from paceline.torch.strategies.pipeline.run.values import take_apart


class StepRunner(Protocol):
    """Runs the steps of a pipelined model on one rank."""

    module: nn.Module

    def run(
        self,
        step: PipelineStep,
        orders: Orders,
        doing: str,
        *,
        loss_of: LossOf | None = None,
        output_grads: Mapping[int, Sequence[Tensor | None]] | None = None,
    ) -> None:
        """Run this rank's actions of `orders` in `step`. `doing` describes the program's position in error messages."""

    def share_output(
        self, step: PipelineStep, rows: int, output_rows: OutputRows, known: Any, weights: NumberWeights
    ) -> tuple[Any, list[Tensor]]:
        """Return the output of the whole batch on every rank."""

    def share_losses(self, losses: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the last stage's losses on every rank."""


class ModelCall:
    """One call of the model. It runs when the loop needs the output's values or the gradients of a loss."""

    def __init__(
        self,
        runner: StepRunner,
        step: PipelineStep,
        orders: Orders,
        rows: int,
        output_rows: OutputRows,
        output: Any,
        *,
        grads: bool,
    ) -> None:
        """`output` describes the output of the whole batch; None if the description is not known yet."""
        self.rows = rows
        self._output_rows = output_rows
        self._runner = runner
        self._step = step
        self._orders = orders
        self.output = output
        self._grads = grads
        self._joined: list[Tensor] | None = None
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, Sequence[float]] = {}
        self._is_done = False
        self._number_of_parts = len(step.arguments)

    @property
    def is_forward_done(self) -> bool:
        return self._joined is not None and not self._is_done

    def values(self) -> Sequence[Tensor]:
        """Run the forwards of all microbatches, unless they have run, and return the output's tensors on every rank."""
        if self._joined is None:
            if not self._is_done:
                with torch.set_grad_enabled(self._grads):
                    self._runner.run(self._step, forward_part(self._orders), "calls the model")
            self.output, tensors = self._runner.share_output(
                self._step, self.rows, self._output_rows, self.output, self.number_weights
            )
            if self._grads and not self._is_done:
                anchor = torch.zeros((), requires_grad=True)
                # Put the parameters into the graph, so that torch.autograd.grad() reaches _Joined, which raises
                # UsageError.
                parameters = [own for own in self._runner.module.parameters() if not own._backward_hooks]
                tensors = list(_Joined.apply(self, anchor, len(parameters), *parameters, *tensors))  # type: ignore[no-untyped-call]
            self._joined = tensors
        return self._joined

    def train(self, terms: Sequence[PartialLoss], factor: float | Tensor) -> None:
        """Run the whole schedule, with backward from the sum of `terms` times `factor`."""
        self._check_graph()
        bases = list(dict.fromkeys(term.base for term in terms))
        sums: dict[int, Tensor] = {}

        def loss_of(number: int, output: Any) -> Tensor:
            leaves = take_apart(output, "the model's output")[1]
            total: Tensor | None = None
            for term in terms:
                if self._output_rows.dimension(term.leaf):
                    raise UsageError(
                        "a loss uses an output of the model whose first dimension is not the batch. Transpose the "
                        "output within the model"
                    )
                part = term.part(leaves[term.leaf], self.rows, self._number_of_parts, number)
                if term.base not in sums:
                    sums[term.base] = torch.zeros((), dtype=part.dtype)
                sums[term.base] += part.detach().cpu() / max(sum(t.base == term.base for t in terms), 1)
                scaled = part * term.scale * factor
                total = scaled if total is None else total + scaled
            assert total is not None
            return total

        with torch.enable_grad():
            self._runner.run(self._step, self._orders, "goes backward", loss_of=loss_of)
        self._is_done = True
        self._losses = dict(zip(bases, self._runner.share_losses([sums.get(base) for base in bases]), strict=True))

    def value_of(self, terms: Sequence[PartialLoss]) -> Tensor | None:
        """Return the sum of losses that :meth:`train` computed, as a tensor that needs no gradient."""
        if any(term.base not in self._losses for term in terms):
            return None
        return torch.stack([self._losses[term.base] * term.scale for term in terms]).sum()

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        """Run the backwards, given the gradients of the whole output. Call this method after :meth:`values`."""
        self._check_graph()
        bounds = row_bounds(self.rows, self._number_of_parts)
        by_part = {
            number: [self._part_of(grad, leaf, bounds, number) for leaf, grad in enumerate(grads)]
            for number in range(self._number_of_parts)
        }
        self._is_done = True
        with torch.enable_grad():
            self._runner.run(self._step, backward_part(self._orders), "goes backward", output_grads=by_part)

    def _check_graph(self) -> None:
        if self._is_done:
            raise UsageError(
                "backward() was called a second time on one output of the model, but the first call frees the graph. "
                "Add the losses and call backward() once, or call the model again"
            )

    def number_weights(self, leaf: int) -> Sequence[float]:
        """Return the weight of each microbatch's number (such as a loss) in the batch's number.

        Only the last stage's rank knows the weights.
        """
        if leaf not in self._weights:
            bounds = row_bounds(self.rows, self._number_of_parts)
            rows = [end - begin for begin, end in itertools.pairwise(bounds)]
            self._weights[leaf] = self._output_rows.number_weights(leaf, rows)
        return self._weights[leaf]

    def _part_of(self, grad: Tensor | None, leaf: int, bounds: Sequence[int], number: int) -> Tensor | None:
        if grad is None:
            return None
        if not grad.dim():
            return grad * self.number_weights(leaf)[number] if self._step.has_outputs else grad
        dimension = self._output_rows.dimension(leaf) or 0
        factor = grad.shape[dimension] // self.rows
        begin, end = bounds[number] * factor, bounds[number + 1] * factor
        return grad.narrow(dimension, begin, end - begin)


class _Joined(torch.autograd.Function):
    """A node of the loop's autograd graph with the output's tensors. Its backward runs the stages' backwards."""

    @staticmethod
    def forward(ctx: Any, call: ModelCall, anchor: Tensor, num_parameters: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.num_parameters = call, num_parameters
        ctx.anchor = get_gradient_edge(anchor)
        outputs = tuple(tensor.view_as(tensor) for tensor in tensors[num_parameters:])
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if torch.is_grad_enabled() or not torch._C._will_engine_execute_node(ctx.anchor.node):
            raise UsageError(
                "a pipeline does not support torch.autograd.grad(), backward(inputs=...) or "
                "backward(create_graph=True), because each gradient stays on its stage. Call loss.backward(), or use "
                "another strategy"
            )
        ctx.call.backward(grads)
        count: int = 3 + ctx.num_parameters + len(grads)
        return (None,) * count

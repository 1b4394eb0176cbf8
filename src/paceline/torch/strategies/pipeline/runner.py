"""Run calls of a pipelined model: check that all ranks make the same call, plan in the first call, run the step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.strategies import PipelineOptions
from paceline.torch.capture.graph import CallArguments, attribute, bind
from paceline.torch.strategies.all_reduce import broadcast_values
from paceline.torch.strategies.deferred import DeferredValues, lent_memory
from paceline.torch.strategies.pipeline.loop.batches import batch_size, cut_rows, describe_cut
from paceline.torch.strategies.pipeline.loop.call import ModelCall
from paceline.torch.strategies.pipeline.loop.losses import ReturnedLoss
from paceline.torch.strategies.pipeline.loop.output import PendingLoss, PendingOutput
from paceline.torch.strategies.pipeline.loop.output_rows import NumberWeights, OutputRows, joined_output
from paceline.torch.strategies.pipeline.loop.ownership import Ownership
from paceline.torch.strategies.pipeline.loop.row_dimensions import RowShapes
from paceline.torch.strategies.pipeline.loop.row_independence import check_repeatable, check_rows_independent
from paceline.torch.strategies.pipeline.plan.choosing import (
    Measured,
    Measurements,
    PipelinePlan,
    describe_measured,
    describe_plan,
    make_plan,
    microbatch_counts,
    splits_backwards,
)
from paceline.torch.strategies.pipeline.plan.measuring import (
    mean_costs,
    measure_agreement,
    measure_layers,
    measure_link,
)
from paceline.torch.strategies.pipeline.plan.orders import (
    Orders,
    all_forward_first,
    orders_of,
    place_stages,
    split_backwards,
)
from paceline.torch.strategies.pipeline.plan.splitting import MessageCost
from paceline.torch.strategies.pipeline.run.engine import LossOf, PipelineStep
from paceline.torch.strategies.pipeline.run.failures import Failures
from paceline.torch.strategies.pipeline.run.layers import LayerGraph, trace
from paceline.torch.strategies.pipeline.run.messages import Messages
from paceline.torch.strategies.pipeline.run.partition import Partition, cut, cuts_by_name, same_cuts
from paceline.torch.strategies.pipeline.run.stage import Stage
from paceline.torch.strategies.pipeline.run.values import put_together, tensors_of
from paceline.torch.strategies.ranks import Ranks
from paceline.torch.strategies.reached import average_gradients
from paceline.torch.update_rules import rule_of


@dataclass(slots=True)
class BatchKind:
    """Descriptions of values for batches with equal shapes, in one mode (training or evaluation)."""

    values: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Descriptions of the values in messages, by (route, microbatch)."""
    output: Any = None
    """The description of the model's output; None before the first forward."""


@dataclass(slots=True)
class TracedStages:
    """A traced forward, and its stages on this rank."""

    partition: Partition
    stages: dict[int, Stage]
    _row_shapes: RowShapes | None = None

    def row_shapes(self, batch: Mapping[str, Any]) -> RowShapes:
        """Return the batch dimensions of the model's values. `batch` has the arguments of any whole batch."""
        if self._row_shapes is None:
            self._row_shapes = RowShapes(self.partition.graph, batch)
        return self._row_shapes


class Runner:
    """One rank of a pipeline: its stages, and its communication with the other ranks."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        options: PipelineOptions,
        ranks: Ranks,
        stage_group: Any,
        data_group: Any,
        deferred: DeferredValues | None = None,
    ) -> None:
        """`stage_group` has the ranks of this pipeline, `data_group` the ranks with the same stages."""
        self._deferred = deferred
        self.module = module
        self._optimizer = optimizer
        self._options = options
        self._ranks = ranks
        self.group = stage_group
        self._data_group = data_group
        self._failures = Failures(ranks.rank, [group for group in (stage_group, data_group, ranks.group) if group])
        self.plan: PipelinePlan | None = None
        self.ownership: Ownership | None = None
        self.averages = True
        """Whether the next backward averages gradients over parallel pipelines."""
        self._graphs: dict[str, list[TracedStages]] = {}
        self._kinds: dict[str, BatchKind] = {}
        self._measurements = Measurements(options.stages)
        self._num_steps = 0

    @property
    def _rank(self) -> int:
        return int(self.group.rank())

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output. In training, its values may be computed later, at first use."""
        with self._failures.raised_everywhere():
            called = bind(self.module, args, kwargs)
            leaves = list(called.values.values())
            if any(leaf.requires_grad for leaf in leaves):
                raise UsageError(
                    "an input of the model needs a gradient: a pipeline computes no gradients of inputs; detach() it"
                )
            rows = batch_size(leaves)
            self._failures.cut = describe_cut(called.values, rows)
            grads = torch.is_grad_enabled()
            key = _key(called, self.module.training, grads)
            self._agree("calls the model", key)
            if self.plan is None:
                self._make_plan(called, rows)
            assert self.plan is not None
            assert self.ownership is not None
            if not self.ownership.is_released:
                self.ownership.release()
            orders = self._orders(rows)
            num_parts = max(action.microbatch for action in orders[0]) + 1
            arguments = [dict(part) for part in cut_rows(called.values, rows, num_parts)]
            traced = self._stages(called, arguments)
            is_new = key not in self._kinds
            kind = self._kinds.setdefault(key, BatchKind())
            messages = Messages(self.group, kind.values, is_new=is_new)
            self._num_steps += 1
            split = split_backwards(orders[self._rank])
            step = PipelineStep(
                traced.partition, traced.stages, self._rank, messages, arguments, self._num_steps, split
            )
            shapes = partial(traced.row_shapes, called.values) if step.has_outputs else None
            output_rows = OutputRows(traced.partition.graph, shapes, arguments)
            call = ModelCall(self, step, orders, rows, output_rows, kind.output, grads=grads)
        if not grads or kind.output is None:
            tensors: Sequence[Tensor] = call.values()
        else:
            tensors = [_pending_output(call, leaf, *found) for leaf, found in enumerate(tensors_of(call.output))]
        kind.output = call.output
        return put_together(call.output, tensors)

    def run(
        self,
        step: PipelineStep,
        orders: Orders,
        doing: str,
        *,
        loss_of: LossOf | None = None,
        output_grads: Mapping[int, Sequence[Tensor | None]] | None = None,
    ) -> None:
        """Run this rank's actions. After a backward, each gradient equals the gradient in one process."""
        with self._failures.raised_everywhere():
            self._agree(doing, "")
            goes_back = any(action.kind != "F" for action in orders[self._rank])
            assert self.ownership is not None
            if goes_back:
                self.ownership.before_backward()
            began = time.perf_counter()
            step.run(orders[self._rank], loss_of, output_grads)
            if goes_back:
                self.ownership.after_backward(self.group, self._norm_of)
                if self._data_group is not None and self.averages:
                    trained = [own for own in self.ownership.own_parameters() if own.requires_grad]
                    average_gradients(self._data_group.group, trained)
            self._measurements.add(time.perf_counter() - began, step.busy_s, len(step.arguments), is_whole=goes_back)
            step.busy_s.clear()

    def share_output(
        self, step: PipelineStep, rows: int, output_rows: OutputRows, known: Any, weights: NumberWeights
    ) -> tuple[Any, list[Tensor]]:
        """Return the description (`known`, unless it is None) and the tensors of a batch's output on every rank."""
        assert self.plan is not None
        last = place_stages(self.plan.schedule, self._options.stages)[-1]
        with self._failures.raised_everywhere(), torch.no_grad():
            tensors: list[Tensor] = []
            if self._rank == last:
                outputs = [step.outputs[number] for number in range(len(step.arguments))]
                output_rows.check_plain(outputs)
                description, tensors = joined_output(outputs, rows, output_rows.dimension, weights)
                tensors = [tensor.detach().contiguous() for tensor in tensors]
                known = description if known is None else known
            if self.group.size() > 1:
                known = self.group.group.broadcast_object(known, root=last)
                if self._rank != last:
                    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape, _ in tensors_of(known)]
                for tensor in tensors:
                    if tensor.numel():
                        dist.broadcast(tensor, group=self.group, group_src=last)
            return known, tensors

    def share_losses(self, losses: Sequence[Tensor | None]) -> list[Tensor]:
        assert self.plan is not None
        last = place_stages(self.plan.schedule, self._options.stages)[-1]
        with self._failures.raised_everywhere():
            values = torch.tensor([0.0 if loss is None else float(loss) for loss in losses], dtype=torch.float64)
            if self.group.size() > 1:
                dist.broadcast(values, group=self.group, group_src=last)
            return list(values.to(torch.get_default_dtype()))

    def check_complete(self, description: str) -> None:
        if self.ownership is not None and self.ownership.is_released and self._options.stages > 1:
            raise UsageError(
                f"{description} does not support a model whose layers are on several processes. Use "
                "strategy.save(directory), or call strategy.gather_values() on every process, for a result on rank 0"
            )

    def hold_all(self) -> None:
        if self.ownership is not None:
            self.ownership.hold_all()

    def release(self) -> None:
        if self.ownership is not None:
            self.ownership.release()

    def _norm_of(self, name: str, order: float) -> float:
        assert self.ownership is not None
        known = self.ownership.known_norms
        if order not in known:
            with self._failures.raised_everywhere():
                all_norms = self._agree("reads norms of gradients", f"order {order}", self.ownership.norms(order))
                known[order] = {key: value for norms in all_norms for key, value in norms.items()}
        return known[order].get(name, 0.0)

    def report(self) -> str | None:
        if self.plan is None:
            return None
        return describe_measured(self.plan, self._measurements)

    def _agree(self, doing: str, detail: str, value: Any = None) -> list[Any]:
        """Return every rank's value. Raises UsageError on all ranks if they are at different program positions."""
        if self.group.size() == 1:
            self._measurements.by_rank = [self._measurements.own]
            return [value]
        reports = self.group.group.all_gather_objects([doing, detail, value, self._measurements.own])
        first_doing, first_detail, _, _ = reports[0]
        for rank, (other_doing, other_detail, _, _) in enumerate(reports):
            if other_doing != first_doing:
                raise UsageError(
                    f"process {rank} of the pipeline {other_doing}, but process 0 {first_doing}. Let every process do "
                    "the same: compute on all ranks, even if only rank 0 prints"
                )
            if other_detail != first_detail:
                raise UsageError(
                    f"process {rank} of the pipeline {doing} with {other_detail}, but process 0 with {first_detail}. "
                    "Pass the same batches to every process, for example from strategy.prepare(loader)"
                )
        self._measurements.by_rank = [measured for _, _, _, measured in reports]
        return [value for _, _, value, _ in reports]

    def _make_plan(self, called: CallArguments, rows: int) -> None:
        if self._deferred is None:
            check_repeatable(self.module, called)
        graph = trace(self.module, called)
        if self._ranks.size > 1:
            with torch.no_grad():
                broadcast_values(self.module)
        if self._deferred is None:
            part = rows // max(microbatch_counts(self._options, rows))
            check_rows_independent(self.module, called, rows, part)
        link = MessageCost()
        if self.group.size() > 1:
            agreement_s = measure_agreement(self.group)
            link = measure_link(self.group, self._rank) if self._ranks.rank < 2 else link
            link = replace(link, agreement_s=agreement_s)
        measured = self._measure(graph, called.values, rows)
        made: dict[str, Any] = {}
        if self._ranks.rank == 0:
            try:
                plan = self._find_plan(graph, measured, rows, link)
                made = asdict(replace(plan, seed=torch.initial_seed()))
            except UsageError as error:
                made = {"error": "; ".join([str(error), *graph.captured.whole.values()])}
        if self._ranks.group is not None:
            made = self._ranks.group.broadcast_object(made)
        if "error" in made:
            raise UsageError(made["error"])
        self.plan = PipelinePlan.decode(made)
        partition = self._stages(called, [called.values], graph).partition
        self.ownership = Ownership(self.module, self._optimizer, partition, self._rank)
        self.ownership.release()
        if self._deferred is not None:
            local_ids = self.ownership.local_ids()
            self._deferred.fill(lambda tensor: id(tensor) in local_ids)
            self.ownership.release()  # `fill` has also set parameters of other ranks
        if self._optimizer is not None:
            ownership = self.ownership
            self._optimizer.register_step_pre_hook(lambda *_: ownership.before_step())
            self._optimizer.register_step_pre_hook(lambda *_: self._measurements.begin_update())
            self._optimizer.register_step_post_hook(lambda *_: self._measurements.end_update())
        places = partition.routes.places
        names = [partition.modules_of(stage) for stage in range(partition.num_stages)]
        first = self._ranks.rank - self._rank
        self._failures.name_stages(names, [first + place for place in places])
        if self._ranks.rank == 0:
            print(describe_plan(self.plan, names, places), file=sys.stderr, flush=True)

    def _measure(self, graph: LayerGraph, values: Mapping[str, Any], rows: int) -> Measured:
        by_rows, crossing = {}, {}
        for size in sorted({-(-rows // count) for count in microbatch_counts(self._options, rows)}):
            part = cut_rows(values, rows, -(-rows // size))[0]
            self._ranks.barrier()
            own, crossing[size] = measure_layers(
                self.module,
                graph,
                part,
                optimizer=self._optimizer,
                splits=splits_backwards(self._options),
                filled=lambda names: lent_memory(attribute(self.module, name) for name in names),
            )
            by_rows[size] = mean_costs(self._ranks.exchange([asdict(cost) for cost in own]))
        return Measured(by_rows, crossing)

    def _find_plan(self, graph: LayerGraph, measured: Measured, rows: int, link: MessageCost) -> PipelinePlan:
        def cuts_for(num_stages: int) -> Sequence[int] | None:
            if self._options.split:
                if len(self._options.split) + 1 != num_stages:
                    raise UsageError(
                        f"--split names {len(self._options.split)} modules, for {len(self._options.split) + 1} stages, "
                        f"but the schedule has {num_stages} stages"
                    )
                return cuts_by_name(graph, self._options.split, self.module)
            if graph.marks:
                if len(graph.marks) + 1 != num_stages:
                    raise UsageError(
                        f"the model calls pipe_split() {len(graph.marks)} times, for {len(graph.marks) + 1} stages, "
                        f"but {num_stages} were requested. Change one of the two numbers"
                    )
                return graph.marks
            return None

        return make_plan(measured, self._options, rows, link, self._state_bytes(), cuts_for)

    def _state_bytes(self) -> float:
        """Return the memory for parameters, gradients and optimizer state per byte of parameters."""
        if self._optimizer is None:
            return 1.0
        try:
            return 2.0 + rule_of(self._optimizer, self._optimizer.param_groups[0]).num_states
        except UsageError:
            return 4.0

    def _stages(
        self, called: CallArguments, arguments: Sequence[Mapping[str, Any]], graph: LayerGraph | None = None
    ) -> TracedStages:
        """Return the stages for a call. Trace the model if no earlier graph supports the microbatches' `arguments`."""
        modes = "".join("et"[inner.training] for inner in self.module.modules())
        known = self._graphs.setdefault(f"{modes} {torch.is_grad_enabled()} {called.kind}", [])
        for traced in known:
            if all(traced.partition.graph.captured.check(list(part.values())) is None for part in arguments):
                return traced
        assert self.plan is not None
        if graph is None:
            graph = trace(self.module, called)
        reference = next((traces[0].partition for traces in self._graphs.values() if traces), None)
        cuts = self.plan.cuts if reference is None else tuple(same_cuts(reference, graph))
        places = place_stages(self.plan.schedule, self._options.stages)
        partition = cut(graph, cuts, places, self.module)
        own = [stage for stage, place in enumerate(places) if place == self._rank]
        stages = {stage: Stage(self.module, partition, stage, self.plan.seed) for stage in own}
        known.append(TracedStages(partition, stages))
        return known[-1]

    def _orders(self, rows: int) -> Orders:
        """Return the ranks' actions. If a batch has fewer rows than microbatches, all forwards run first."""
        assert self.plan is not None
        count, num_ranks = self.plan.microbatches, self._options.stages
        if rows >= count:
            return orders_of(self.plan.schedule, num_ranks, count)
        return all_forward_first(place_stages(self.plan.schedule, num_ranks), num_ranks, rows)


def _pending_output(call: ModelCall, leaf: int, dtype: torch.dtype, shape: list[int], needs_grad: bool) -> Tensor:
    """Return an output's tensor that is computed later. A number that needs a gradient counts as a loss."""
    if shape or not needs_grad:
        return PendingOutput(call, leaf, shape=shape, dtype=dtype)
    term = ReturnedLoss(leaf=leaf, weights=call.number_weights)
    return PendingLoss(call, (term,), lambda: call.values()[leaf], dtype=dtype)


def _key(called: CallArguments, training: bool, grads: bool) -> str:
    """Return a text with the call's shapes, constants and modes, which must be equal on all ranks of a pipeline."""
    shapes = [
        f"{name}={str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for name, leaf in called.values.items()
    ]
    parts = ", ".join([*shapes, *called.constants_as_text()])
    return f"{parts} in {'training' if training else 'evaluation'}{'' if grads else ' without gradients'}"

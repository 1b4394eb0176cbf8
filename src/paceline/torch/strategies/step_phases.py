"""Record the phases of a training loop: data, forward, backward, communication, optimizer.

Times are those of the training thread. On a GPU, an operation counts where the thread waits for its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.collectives import Group
from paceline.collectives.clocks import clock_offsets
from paceline.observe.recording import Recorder


class StepPhases:
    """Records the phases of one strategy's training loop.

    After backward, ``communication`` lasts until all gradients are exchanged. `is_exchange`, called with a model that
    has finished backward, returns whether all ranks exchange gradients now.
    """

    def __init__(self, recorder: Recorder, is_exchange: Callable[[nn.Module], bool]) -> None:
        self._recorder, self._is_exchange = recorder, is_exchange
        self._backward = -1
        """torch's number of the last backward."""

    def watch(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], group: Group | None) -> None:
        """Record the forwards and backwards of `models`, and the steps of `optimizers`.

        All ranks of the `group` must call this method. For a timeline, they compare the clocks of their machines.
        """
        spans = self._recorder.spans
        if spans is not None and group is not None and len(set(group.hosts)) > 1:
            offsets_ns = group.broadcast_object(clock_offsets(group, time.time_ns))
            if group.hosts.index(group.hosts[group.rank]) == group.rank:  # the first rank of its host
                spans.window.set_offset(offsets_ns[group.rank])
        for model in models:
            model.register_forward_pre_hook(self._begin_forward)
            model.register_forward_hook(self._end_forward)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._switch("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self._switch("other"))

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a training loop, and count their examples."""
        for batch in self._recorder.steps(batches):
            self._recorder.add("paceline_examples_total", num_examples(batch))
            yield batch

    def _switch(self, phase: str) -> None:
        self._recorder.enter(phase)

    def _begin_forward(self, model: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._recorder.enter("forward")

    def _end_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Let backward begin at the gradient of the output. Until then, the loss counts as forward."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._begin_backward(model))  # type: ignore[no-untyped-call]

    def _begin_backward(self, model: nn.Module) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self._recorder.enter("backward")
        # Callbacks run in the order of their registration. DistributedDataParallel registers its own, which waits for
        # the gradients, later in this backward. So the first callback runs before it, and the second one after it.
        engine = torch.autograd.Variable._execution_engine

        def end_backward() -> None:
            self._recorder.enter("communication")
            if self._is_exchange(model):
                self._recorder.arrive()
            engine.queue_callback(lambda: self._switch("other"))

        engine.queue_callback(end_backward)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def num_examples(batch: Any) -> int:
    """Return the length of the first tensor of a batch; 1 if no tensor has a length."""
    first = next(tensors_in(batch), None)
    return len(first) if first is not None and first.dim() else 1

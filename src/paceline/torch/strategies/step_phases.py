"""Record the phases of a training loop: data, forward, backward, communication, optimizer.

Times are those of the training thread. On a GPU, the time of an operation belongs to the phase in which the thread
waits for its result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.collectives import Group
from paceline.collectives.clocks import clock_offsets
from paceline.environment import environment
from paceline.observe import recording
from paceline.observe.recording import Recorder
from paceline.observe.spans.operators import OperatorFile
from paceline.observe.stuck.processes import WatchedProcess
from paceline.torch.operator_spans import ProfiledOperators


class StepPhases:
    """Records the phases of one strategy's training loop.

    ``forward`` lasts from the batch to the call of ``backward()``, with the loss. `is_exchange` returns whether all
    ranks exchange gradients after this ``backward()``.
    """

    def __init__(self, recorder: Recorder, is_exchange: Callable[[], bool] = lambda: False) -> None:
        """Record all later backwards of the program."""
        self._recorder = recorder
        settings = environment()
        if recorder.spans is not None and recorder.spans.profile is None and settings.job_dir is not None:
            recorder.spans.profile = ProfiledOperators(
                OperatorFile(settings.job_dir, WatchedProcess(f"rank {settings.rank}", os.getpid(), "")),
                profiles_steps=settings.timeline_operators,
            )

        def end() -> None:
            recorder.enter("other")
            if is_exchange():
                recorder.arrive()

        watch_backward(lambda tensors: recorder.enter("backward"), end)

    def watch(self, optimizers: Iterable[Optimizer], group: Group | None) -> None:
        """Record the steps of `optimizers`.

        All ranks of the `group` must call this method. For a timeline, they compare the clocks of their machines.
        """
        spans = self._recorder.spans
        if spans is not None and group is not None and len(set(group.hosts)) > 1:
            offsets_ns = group.broadcast_object(clock_offsets(group, time.time_ns))
            if group.hosts.index(group.hosts[group.rank]) == group.rank:  # the first rank of its host
                spans.window.set_offset(offsets_ns[group.rank])
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._switch("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self._switch("other"))

    def _switch(self, phase: str) -> None:
        self._recorder.enter(phase)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a training loop, and count their examples."""
        for batch in self._recorder.steps(batches, "forward"):
            self._recorder.add("paceline_examples_total", num_examples(batch))
            yield batch


def watch_backward(begin: Callable[[Any], object], end: Callable[[], object]) -> Callable[[], None]:
    """Call ``begin(tensors)`` before each backward of the program, and ``end()`` after it.

    Return a function that ends this. A hook of the model and its output would take ten times as long.
    """
    original: Callable[..., None] = torch.autograd.backward

    def backward(tensors: Any, *values: Any, **options: Any) -> None:
        begin(tensors)
        original(tensors, *values, **options)
        end()

    setattr(torch.autograd, "backward", backward)  # noqa: B010  (mypy rejects an assignment)
    return partial(setattr, torch.autograd, "backward", original)


def begin_exchange(*, is_for_all: bool) -> None:
    """Record that backward has computed this rank's gradients. Its end then waits for the exchange of the gradients.

    `is_for_all`: whether all ranks take part in the exchange.
    """
    recorder = recording.recorder
    if recorder is not None:
        recorder.enter("communication", after="backward")  # on a GPU, this is a thread of autograd
        if is_for_all:
            recorder.arrive()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings, much faster than PyTorch's ``tree_leaves``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def num_examples(batch: Any) -> int:
    """Return the length of the first tensor of a batch that has one; 1 without such a tensor."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)

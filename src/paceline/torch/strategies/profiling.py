"""Measure the steps of a training loop, then end the program. ``paceline explain`` and ``compare`` use this module.

With ``PACELINE_PROFILE=DIR``, each prepared training loader measures the program's steps: from one batch to the next.
``PACELINE_PROFILE_STEPS=N`` measures N steps as a whole, under any strategy. Without this variable, the first steps
warm up, one step measures memory, five steps measure every layer, and the remaining steps are measured as a whole.
The measuring process writes no checkpoints.
"""

from __future__ import annotations

import atexit
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from paceline.strategies.profile import COPIES, STARTED, LayerProfile, ModelProfile, StepRecord, write_record
from paceline.torch.embeddings.modules import SparseRows
from paceline.torch.strategies.step_phases import num_examples

if TYPE_CHECKING:
    from paceline.torch.strategies.base import Strategy

_WARM_UP: Final = 3
_LAYER_STEPS: Final = 5
_LEAST_STEPS, _MOST_STEPS, _LONG_S = 12, 300, 3.0
"""Numbers of steps that are measured as a whole, and the time after which the smaller number is enough."""
_FEWEST_STEPS: Final = 3
"""A program that ends earlier is not measured."""

_COPIES_S: Final = 30.0
_POLL_S: Final = 0.001


@dataclass
class _LayerSums:
    """The measurements of one layer."""

    name: str
    module: nn.Module
    forwards_s: list[float] = field(default_factory=list)
    """The time of each of the steps with hooks, in seconds."""
    backwards_s: list[float] = field(default_factory=list)
    activation_bytes: int = 0
    output_bytes: int = 0
    touched_rows: int = 0


class StepProfiler:
    """Measures the steps of one process. Writes the result to a directory, and then raises SystemExit."""

    def __init__(self, strategy: Strategy, directory: Path, num_steps: int | None) -> None:
        """With `num_steps`, measure this number of steps as a whole, without layers."""
        self._strategy, self._directory, self._num_steps = strategy, directory.absolute(), num_steps
        self._layers: dict[nn.Module, _LayerSums] = {}
        self._hooks = ExitStack()
        self._number = 0
        self._batch_size = 0
        self._steps_s: list[float] = []
        self._ends_s: list[float] = []
        self._losses: list[Tensor | None] = []
        self._loss: Tensor | None = None
        self._first_s = self._began_s = self._marked_s = 0.0
        self._current: _LayerSums | None = None
        self._betweens_s: list[float] = []
        self._updates_s: list[float] = []
        self._is_in_step = self._is_timed = self._is_written = False
        atexit.register(self._write)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, and measure the steps. Raises SystemExit after the last step."""
        with _recorded_backward(self._begin_backward, self._end_backward):
            if not self._number:
                self._directory.mkdir(parents=True, exist_ok=True)
                (self._directory / STARTED).touch()
                if (self._directory / COPIES).exists():
                    _wait_copies(self._directory)
            self._began_s = time.perf_counter()
            self._first_s = self._first_s or self._began_s
            for batch in batches:
                self._begin_step(batch)
                yield batch
                if self._end_step():
                    self._write()
                    raise SystemExit(0)

    def _begin_step(self, batch: Any) -> None:
        self._batch_size = max(self._batch_size, num_examples(batch))
        self._loss = None
        if self._num_steps is not None:
            return
        if self._number == _WARM_UP:
            self._find_layers()
            self._hook_memory()
        elif self._number == _WARM_UP + 1:
            self._hook_times()
        if self._is_timed:
            times = [self._betweens_s, self._updates_s]
            for sums in self._layers.values():
                times += [sums.forwards_s, sums.backwards_s]
            for steps_s in times:
                steps_s.append(0.0)
        self._marked_s, self._current, self._is_in_step = self._began_s, None, True

    def _end_step(self) -> bool:
        """Record the step. Return whether it is the last one."""
        self._synchronize()
        self._mark(None)
        now_s = time.perf_counter()
        step_s, self._began_s = now_s - self._began_s, now_s
        self._is_in_step = False
        self._number += 1
        if self._num_steps is not None:
            if self._number > _WARM_UP:
                self._record(step_s, now_s)
            else:
                self._first_s = now_s
            return len(self._steps_s) == self._num_steps
        first = _WARM_UP + 1 + _LAYER_STEPS
        if self._number in (_WARM_UP + 1, first):
            self._hooks.close()
            self._is_timed = False
        if self._number > first + 1:  # the step after the removal of the hooks warms up too
            self._record(step_s, now_s)
        count = len(self._steps_s)
        return count >= _MOST_STEPS or (count >= _LEAST_STEPS and sum(self._steps_s) >= _LONG_S)

    def _record(self, step_s: float, now_s: float) -> None:
        self._steps_s.append(step_s)
        self._ends_s.append(now_s - self._first_s)
        self._losses.append(self._loss)

    def _synchronize(self) -> None:
        if self._strategy.device.type == "cuda":
            torch.cuda.synchronize(self._strategy.device)

    # The time since the last mark belongs to the layer that was current, or to the program's own code.

    def _mark(self, layer: _LayerSums | None, *, is_backward: bool = False) -> None:
        if not self._is_in_step or not self._is_timed:
            return
        self._synchronize()
        now_s = time.perf_counter()
        took_s, self._marked_s = now_s - self._marked_s, now_s
        if is_backward and layer is not None:
            layer.backwards_s[-1] += took_s
        elif self._current is None:
            self._betweens_s[-1] += took_s
        else:
            self._current.forwards_s[-1] += took_s
        self._current = None if is_backward else layer

    def _begin_backward(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = loss.detach()
        self._mark(None)

    def _end_backward(self) -> None:
        """Attribute the end of the backward, after the last gradient, to the first layer."""
        self._mark(next(iter(self._layers.values()), None), is_backward=True)

    def _find_layers(self) -> None:
        module = self._strategy.module
        assert module is not None
        for name, layer in module.named_modules():
            is_trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
            if is_trained or isinstance(layer, SparseRows):
                self._layers[layer] = _LayerSums(name or type(layer).__name__, layer)

    def _hook_memory(self) -> None:
        """Measure the bytes of activations and results, and the rows of embeddings, in one step."""
        parameters = {
            parameter.untyped_storage().data_ptr() for layer in self._layers for parameter in layer.parameters()
        }
        order: dict[nn.Module, _LayerSums] = {}  # the layers in the order of their first calls
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if self._current is not None and storage.data_ptr() not in parameters | seen:
                seen.add(storage.data_ptr())
                self._current.activation_bytes += storage.nbytes()
            return tensor

        def begin(layer: nn.Module, args: Any) -> None:
            self._current = order[layer] = self._layers[layer]
            if isinstance(layer, SparseRows | nn.Embedding | nn.EmbeddingBag) and args and isinstance(args[0], Tensor):
                self._current.touched_rows += len(torch.unique(args[0]))

        def end(layer: nn.Module, args: Any, result: Any) -> None:
            sizes = [leaf.nbytes for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self._layers[layer].output_bytes += sum(sizes)

        self._hooks.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        for layer in self._layers:
            self._hooks.callback(layer.register_forward_pre_hook(begin).remove)
            self._hooks.callback(layer.register_forward_hook(end).remove)
        self._hooks.callback(lambda: self._set_order(order))

    def _set_order(self, order: dict[nn.Module, _LayerSums]) -> None:
        """Sort the layers by their calls. Layers that were not called come last."""
        self._layers = {**order, **{layer: sums for layer, sums in self._layers.items() if layer not in order}}

    def _hook_times(self) -> None:
        self._is_timed = True
        for layer, sums in self._layers.items():
            hook = layer.register_forward_pre_hook(lambda layer, args: self._mark(self._layers[layer]))
            self._hooks.callback(hook.remove)
            for parameter in layer.parameters(recurse=False):
                if parameter.requires_grad:
                    ready = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda parameter, sums=sums: self._mark(sums, is_backward=True)
                    )
                    self._hooks.callback(ready.remove)
        for optimizer in self._strategy.optimizers:
            began = optimizer.register_step_pre_hook(lambda *_: self._mark(None))
            ended = optimizer.register_step_post_hook(lambda *_: self._end_update())
            self._hooks.callback(began.remove)
            self._hooks.callback(ended.remove)

    def _end_update(self) -> None:
        before_s = self._betweens_s[-1]
        self._mark(None)
        self._updates_s[-1] += self._betweens_s[-1] - before_s
        self._betweens_s[-1] = before_s

    def _write(self) -> None:
        """Write the measurements, unless there are too few. A program may end before its last measured step."""
        if self._is_written or len(self._steps_s) < _FEWEST_STEPS:
            return
        self._is_written = True
        rank = self._strategy.rank
        if self._num_steps is not None:
            losses = tuple(float("nan") if loss is None else float(loss) for loss in self._losses)
            record = StepRecord(
                rank=rank,
                batch_size=self._batch_size,
                steps_s=tuple(self._steps_s),
                ends_s=tuple(self._ends_s),
                losses=losses,
            )
            write_record(self._directory / f"rank{rank}.json", record)
            return
        write_record(self._directory / "profile.json", self._profile())

    def _profile(self) -> ModelProfile:
        strategy = self._strategy
        assert strategy.module is not None
        state = [
            leaf
            for optimizer in strategy.optimizers
            for entry in optimizer.state.values()
            for leaf in pytree.tree_leaves(entry)
            if isinstance(leaf, Tensor)
        ]
        profile = ModelProfile(
            layers=tuple(_layer_profile(sums) for sums in self._layers.values()),
            steps_s=tuple(self._steps_s),
            between_s=statistics.median(self._betweens_s),
            update_s=statistics.median(self._updates_s),
            batch_size=max(self._batch_size, 1),
            optimizer_bytes=sum(tensor.nbytes for tensor in state),
            buffer_bytes=sum(buffer.nbytes for buffer in strategy.module.buffers()),
            num_threads=torch.get_num_threads(),
            is_on_gpu=strategy.device.type == "cuda",
        )
        return profile.scaled_to_steps()  # the hooks make steps slower


def _layer_profile(sums: _LayerSums) -> LayerProfile:
    module = sums.module
    parameters = [p for p in module.parameters(recurse=False) if p.requires_grad and p.numel()]
    has_rows = isinstance(module, SparseRows) or (
        isinstance(module, nn.Embedding | nn.EmbeddingBag) and bool(module.sparse)
    )
    dim = module.dim if isinstance(module, SparseRows) else getattr(module, "embedding_dim", 0)
    return LayerProfile(
        name=sums.name,
        forward_s=statistics.median(sums.forwards_s),
        backward_s=statistics.median(sums.backwards_s),
        num_parameters=0 if has_rows else len(parameters),
        parameter_bytes=0 if has_rows else sum(parameter.nbytes for parameter in parameters),
        activation_bytes=sums.activation_bytes,
        output_bytes=sums.output_bytes,
        touched_rows=sums.touched_rows,
        num_rows=getattr(module, "num_embeddings", 0),
        row_bytes=4 * int(dim) if has_rows else 0,
    )


def _wait_copies(directory: Path) -> None:
    """Wait until the other copies of the program have reached their training loops, so that all copies run together."""
    deadline = time.monotonic() + _COPIES_S
    while time.monotonic() < deadline and not all((each / STARTED).exists() for each in directory.parent.iterdir()):
        time.sleep(_POLL_S)


def _recorded_backward(begin: Callable[[Any], None], end: Callable[[], None]) -> ExitStack:
    """Return a context in which every backward of the program calls two functions: before and after it."""
    original, stack = torch.autograd.backward, ExitStack()

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        begin(tensors)
        original(tensors, *args, **kwargs)
        end()

    torch.autograd.backward = backward  # Tensor.backward calls it by this name
    stack.callback(setattr, torch.autograd, "backward", original)
    return stack

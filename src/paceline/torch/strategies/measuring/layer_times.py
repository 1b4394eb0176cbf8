"""Measure each layer of a model: its times, its memory, and the rows that it looks up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline.strategies.profile import LayerProfile
from paceline.torch.embeddings.modules import SparseRows


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

    def profile(self) -> LayerProfile:
        module = self.module
        parameters = [p for p in module.parameters(recurse=False) if p.requires_grad and p.numel()]
        has_rows = isinstance(module, SparseRows) or (
            isinstance(module, nn.Embedding | nn.EmbeddingBag) and bool(module.sparse)
        )
        dim = module.dim if isinstance(module, SparseRows) else getattr(module, "embedding_dim", 0)
        return LayerProfile(
            name=self.name,
            forward_s=statistics.median(self.forwards_s),
            backward_s=statistics.median(self.backwards_s),
            num_parameters=0 if has_rows else len(parameters),
            parameter_bytes=0 if has_rows else sum(parameter.nbytes for parameter in parameters),
            activation_bytes=self.activation_bytes,
            output_bytes=self.output_bytes,
            touched_rows=self.touched_rows,
            num_rows=getattr(module, "num_embeddings", 0),
            row_bytes=4 * int(dim) if has_rows else 0,
        )


class LayerTimes:
    """Hooks the layers of a model, and measures steps: first the memory, then the times.

    :meth:`mark` divides a step into intervals. An interval belongs to the current layer, or to the program's own code.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: dict[nn.Module, _LayerSums] = {}
        self._hooks = ExitStack()
        self._current: _LayerSums | None = None
        self._marked_s: float | None = None
        """The time of the last mark; None outside of the steps whose times are measured."""
        self._programs_s: list[float] = []
        self._updates_s: list[float] = []
        self._processor_s = self._layers_s = self._layers_used_s = 0.0
        """The processor time at the last mark; the time and the processor time of all layers."""
        self._is_timed = False

    def begin_step(self, began_s: float) -> None:
        self._current = None
        if self._is_timed:
            self._marked_s, self._processor_s = began_s, time.process_time()
            times = [self._programs_s, self._updates_s]
            for sums in self._layers.values():
                times += [sums.forwards_s, sums.backwards_s]
            for steps_s in times:
                steps_s.append(0.0)

    def end_step(self) -> None:
        self.mark(None)
        self._marked_s = None

    def remove_hooks(self) -> None:
        """End the measurements of memory or times."""
        self._hooks.close()
        self._is_timed = False

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def mark(self, layer: _LayerSums | None, *, is_backward: bool = False) -> None:
        """Add the time since the last mark to the current layer, and make `layer` the current one.

        With `is_backward`, add the time to the backward of `layer` instead; no layer is current then.
        """
        if self._marked_s is None:
            return
        self.synchronize()
        now_s = time.perf_counter()
        took_s, self._marked_s = now_s - self._marked_s, now_s
        processor_s = time.process_time()
        used_s, self._processor_s = processor_s - self._processor_s, processor_s
        if self._current is not None or (is_backward and layer is not None):
            self._layers_s += took_s
            self._layers_used_s += used_s
        if is_backward and layer is not None:
            layer.backwards_s[-1] += took_s
        elif self._current is None:
            self._programs_s[-1] += took_s
        else:
            self._current.forwards_s[-1] += took_s
        self._current = None if is_backward else layer

    def end_backward(self) -> None:
        """Add the end of the backward, after the last gradient, to the backward of the first layer."""
        self.mark(next(iter(self._layers.values()), None), is_backward=True)

    def hook_memory(self, module: nn.Module) -> None:
        """Measure the bytes of activations and results, and the rows of embeddings, in the next step."""
        self._find_layers(module)
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

    def hook_times(self, optimizers: Iterable[Optimizer]) -> None:
        """Measure the times of all layers and of the optimizers in the next steps."""
        self._is_timed = True
        for layer, sums in self._layers.items():
            hook = layer.register_forward_pre_hook(lambda layer, args: self.mark(self._layers[layer]))
            self._hooks.callback(hook.remove)
            for parameter in layer.parameters(recurse=False):
                if parameter.requires_grad:
                    ready = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda parameter, sums=sums: self.mark(sums, is_backward=True)
                    )
                    self._hooks.callback(ready.remove)
        for optimizer in optimizers:
            began = optimizer.register_step_pre_hook(lambda *_: self.mark(None))
            ended = optimizer.register_step_post_hook(lambda *_: self._end_update())
            self._hooks.callback(began.remove)
            self._hooks.callback(ended.remove)

    def profiles(self) -> tuple[LayerProfile, ...]:
        """Return the measured layers."""
        return tuple(sums.profile() for sums in self._layers.values())

    def program_s(self) -> float:
        """Return the seconds of a step in the program's own code, outside of forward, backward and update."""
        return statistics.median(self._programs_s)

    def update_s(self) -> float:
        """Return the seconds of a step in the optimizers."""
        return statistics.median(self._updates_s)

    def busy_cores(self) -> float:
        """Return the processor time of the layers, divided by their duration."""
        return self._layers_used_s / self._layers_s if self._layers_s else 1.0

    def _find_layers(self, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            is_trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
            if is_trained or isinstance(layer, SparseRows):
                self._layers[layer] = _LayerSums(name or type(layer).__name__, layer)

    def _set_order(self, order: dict[nn.Module, _LayerSums]) -> None:
        """Sort the layers by their calls. Layers that were not called come last."""
        self._layers = {**order, **{layer: sums for layer, sums in self._layers.items() if layer not in order}}

    def _end_update(self) -> None:
        before_s = self._programs_s[-1]
        self.mark(None)
        self._updates_s[-1] += self._programs_s[-1] - before_s
        self._programs_s[-1] = before_s

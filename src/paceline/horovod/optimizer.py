"""Optimizers that reduce the gradients of all ranks during the backward pass."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.horovod.calls import synchronize
from paceline.horovod.compression import Compression, Compressor
from paceline.horovod.context import can_change_size, current, size
from paceline.horovod.objects import check_optimizer
from paceline.horovod.process_sets import ProcessSet, global_process_set, number_of
from paceline.horovod.reductions import (
    Adasum,
    Average,
    allreduce_async_,
    reduction_of,
    request_all_reduce,
    sparse_allreduce_async,
)

_Unit: TypeAlias = tuple[Tensor, ...]
"""Parameters whose gradients one operation reduces: one parameter, or a group."""
_TOO_MANY: Final = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
_EARLY_ZERO_GRAD: Final = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
_NO_SKIP: Final = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This reduces "
    "the gradients twice. Call optimizer.step() inside `with optimizer.skip_synchronize():`"
)


class GradientReduction:
    """Reduces each gradient over all ranks, as soon as the backward pass has computed it."""

    def __init__(
        self,
        names: dict[Tensor, str],
        groups: Iterable[Sequence[Tensor]],
        *,
        compression: Compressor,
        passes: int,
        op: int,
        predivide_factor: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """`names` has all parameters. One operation reduces the gradients of a group."""
        self._names, self._compression, self.passes, self._op = names, compression, passes, op
        self._scales = (1.0 / predivide_factor, predivide_factor) if op == Average else (1.0, 1.0)
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        grouped = {parameter: tuple(group) for group in groups for parameter in group}
        self._units: dict[Tensor, _Unit] = {}
        """The unit of each parameter with a hook."""
        self._passes_left = dict.fromkeys(names, passes)
        self._sent: dict[_Unit, Callable[[], None]] = {}
        """For each unit in flight, a function that waits and stores the result."""
        self._has_gradients = False
        """Whether a backward pass has run since the last synchronization."""
        if process_set.included() and (size() > 1 or can_change_size()):
            for parameter in names:
                if parameter.requires_grad:
                    self._units[parameter] = grouped.get(parameter, (parameter,))
                    hooked: Any = parameter
                    hooked.register_post_accumulate_grad_hook(partial(_report_gradient, weakref.ref(self)))

    @property
    def is_pending(self) -> bool:
        return self._has_gradients

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.reset()

    def reset(self) -> None:
        """Ignore the backward passes and the gradients in flight since the last synchronization."""
        self._sent.clear()
        self._has_gradients = False
        self._passes_left = dict.fromkeys(self._names, self.passes)

    def gradient_added(self, parameter: Tensor) -> None:
        """Count a backward pass of a parameter. After the last pass of its unit, start to reduce the gradients."""
        if self._passes_left[parameter] <= 0:
            raise AssertionError(_TOO_MANY)
        self._has_gradients = True
        self._passes_left[parameter] -= 1
        unit = self._units[parameter]
        if all(self._passes_left[member] == 0 for member in unit):
            self._send(unit)

    def _send(self, unit: _Unit) -> None:
        for parameter in unit:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        name, is_group = self._names[unit[0]], len(unit) > 1
        gradients: list[Any] = [parameter.grad for parameter in unit]
        if gradients[0].is_sparse and not self._sparse_as_dense and not is_group:
            self._sent[unit] = self._send_sparse(unit[0], gradients[0], name)
            return
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        pairs = [self._compression.compress(gradient) for gradient in dense]
        handle = request_all_reduce(
            [compressed for compressed, _ in pairs],
            None,
            name,
            self._op,
            self._scales,
            self._process_set,
            in_place=True,
            is_grouped=is_group,
        )

        def store() -> None:
            results = synchronize(handle)
            for parameter, result, (_, ctx) in zip(unit, results if is_group else [results], pairs, strict=True):
                reduced = self._compression.decompress(result, ctx)
                gradient = parameter.grad
                if gradient is not None and gradient.is_sparse:  # optimizers such as SparseAdam need a sparse gradient
                    parameter.grad = reduced.to_sparse(gradient.sparse_dim())
                elif gradient is not None and reduced.data_ptr() != gradient.data_ptr():
                    gradient.detach().copy_(reduced)

        self._sent[unit] = store

    def _send_sparse(self, parameter: Tensor, gradient: Tensor, name: str) -> Callable[[], None]:
        wait = sparse_allreduce_async(gradient, name, self._op, self._process_set)

        def store() -> None:
            parameter.grad = wait()

        return store

    def synchronize(self) -> None:
        """Send the remaining gradients, and wait until all gradients are reduced.

        A parameter without a gradient sends zeros, because it may have a gradient on other ranks.
        """
        for unit in dict.fromkeys(self._units.values()):
            if unit not in self._sent:
                self._send(unit)
        try:
            for store in self._sent.values():
                store()
        finally:
            self.reset()


def _report_gradient(reduction: weakref.ref[GradientReduction], parameter: Tensor) -> None:
    alive = reduction()
    if alive is not None:  # the parameters keep the hook after the end of the optimizer
        alive.gradient_added(parameter)


class _AveragingOptimizer(torch.optim.Optimizer):
    """Base class beside the class of the user's optimizer. It reduces the gradients before each step."""

    _reduction: GradientReduction
    _parameter_names: dict[Tensor, str]
    """Horovod's own tests read this attribute."""
    _is_synchronized: bool
    _skips: bool

    @property
    def backward_passes_per_step(self) -> int:
        return self._reduction.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes between two calls of ``step``."""
        self._reduction.set_passes(passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Then clip them, and call ``step`` in ``skip_synchronize()``."""
        self._reduction.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block, ``step`` does not reduce the gradients again, because ``synchronize`` has reduced them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients and update the parameters."""
        if not self._skips:
            if self._is_synchronized:
                warnings.warn(_NO_SKIP, stacklevel=2)
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Clear the gradients. Raises AssertionError between ``backward`` and ``step``."""
        if self._reduction.is_pending:
            raise AssertionError(_EARLY_ZERO_GRAD)
        super().zero_grad(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Load a state, and ignore the gradients in flight."""
        self._reduction.reset()
        self._is_synchronized = self._skips = False
        super().load_state_dict(*arguments, **options)


class _AdasumOptimizer(torch.optim.Optimizer):
    """Base class beside the class of the user's optimizer. Adasum combines the ranks' updates, not their gradients."""

    _parameter_names: dict[Tensor, str]
    _compression: Compressor
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the attribute only: the gradients of any number of backward passes are added until ``step``."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: the gradients stay local."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError, as Horovod does."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a local step, and replace it by the Adasum of the steps of all ranks."""
        starts = {parameter: parameter.clone() for parameter in self._parameter_names if parameter.requires_grad}
        with torch.enable_grad():
            loss = super().step(closure)
        calls = []
        for parameter, start in starts.items():
            compressed, ctx = self._compression.compress(parameter - start)
            calls.append(
                (parameter, ctx, allreduce_async_(compressed, name=self._parameter_names[parameter], op=Adasum))
            )
        for parameter, ctx, handle in calls:
            parameter.copy_(starts[parameter] + self._compression.decompress(synchronize(handle), ctx))
        return loss


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer that reduces the gradients over all ranks, during ``backward`` and at the latest in ``step``.

    The result is an instance of a subclass of the optimizer's class, with the state and the parameters of `optimizer`.

    - `named_parameters` is ``model.named_parameters()``.
    - `backward_passes_per_step` is the number of backward passes whose gradients are added before the reduction.
    - `gradient_predivide_factor` divides the gradients before their sum. The sum is then multiplied by
      ``gradient_predivide_factor / size``.
    - `groups` is a number of groups, or a list of lists of parameters. One operation reduces the gradients of a group.
      `num_groups` is its old name.
    - `sparse_as_dense` reduces sparse gradients as dense ones.

    Raises UsageError for invalid arguments.
    """
    check_optimizer(optimizer)
    current()
    number_of(process_set)
    reduction_of(op)  # raises UsageError for a wrong value
    if not hasattr(compression, "compress"):
        raise UsageError(f"got compression={compression!r}, expected Compression.none, Compression.fp16 or .bf16")
    if backward_passes_per_step < 1:
        raise UsageError(f"got backward_passes_per_step={backward_passes_per_step}, expected 1 or more")
    if not gradient_predivide_factor > 0.0:
        raise UsageError(f"got gradient_predivide_factor={gradient_predivide_factor}, expected a positive number")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor not supported with op != Average; pass op=Average or leave it out")
    if num_groups:
        warnings.warn("the parameter `num_groups` is deprecated; pass groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = _names_of(optimizer, named_parameters)
    kind = type(optimizer)
    mixin: type = _AveragingOptimizer if op != Adasum else _AdasumOptimizer
    distributed: Any = object.__new__(type(kind.__name__, (mixin, kind), {"__module__": kind.__module__}))
    distributed.__dict__.update(optimizer.__dict__)
    distributed.__dict__.pop("step", None)  # a scheduler of the original optimizer has replaced its method
    distributed._parameter_names = names
    if op == Adasum:
        distributed._compression = compression
        distributed.backward_passes_per_step = backward_passes_per_step
        return distributed
    distributed._is_synchronized = distributed._skips = False
    distributed._reduction = GradientReduction(
        names,
        _check_groups(groups, [parameter for parameter in names if parameter.requires_grad]),
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return distributed


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the names of the optimizer's parameters. Raises UsageError if a name is missing or used twice."""
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{number}.{place}"
            for number, group in enumerate(groups)
            for place, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise UsageError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}. Add the "
            "name of the model to the names"
        )
    names = {parameter: name for name, parameter in pairs}
    missing = [list(parameter.shape) for parameter in parameters if parameter not in names]
    if missing:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named. Their shapes: "
            f"{missing[:8]}. Pass the names of all parameters of the optimizer"
        )
    return {parameter: names[parameter] for parameter in parameters}


def _check_groups(groups: int | Sequence[Sequence[Tensor]] | None, parameters: list[Tensor]) -> list[Sequence[Tensor]]:
    """Return lists of parameters. A number of groups divides `parameters` into parts of nearly equal length."""
    if groups is None or (isinstance(groups, int) and groups == 0):
        return []
    if isinstance(groups, int) and groups > 0:
        ends = [len(parameters) * number // groups for number in range(groups + 1)]
        return [parameters[start:end] for start, end in pairwise(ends) if start < end]
    if isinstance(groups, int) or not all(
        isinstance(group, (list, tuple)) and all(isinstance(parameter, Tensor) for parameter in group)
        for group in groups
    ):
        raise UsageError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    known = set(parameters)
    if any(count > 1 for count in Counter(parameter for group in groups for parameter in group).values()):
        raise UsageError("a parameter is in more than one group; pass each parameter once")
    return [members for group in groups if (members := [parameter for parameter in group if parameter in known])]

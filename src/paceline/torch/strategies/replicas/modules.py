"""Create replicas of a module: shallow copies with parameters and buffers of their own."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

_MISSING = object()
_NEW_OBJECT: Any = vars(copyreg)["__newobj__"]


class ReplacedForward:
    """Replaces a module's forward until :meth:`release`, by a subclass with the same name as the module's class."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        self.plain: type[nn.Module] = type(module)
        self.own_forward = vars(module).pop("forward", None)
        """The forward that was set on the module itself, not on its class; None without one."""
        module.__class__ = _subclass(self.plain, forward)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return self.plain.forward(self.module, *args, **kwargs)

    def release(self) -> None:
        self.module.__class__ = self.plain
        if self.own_forward is not None:
            vars(self.module)["forward"] = self.own_forward


def _subclass(plain: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    class Replicated(plain):  # type: ignore[valid-type, misc]
        __doc__ = plain.__doc__

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced = super().__reduce_ex__(protocol)
            if isinstance(reduced, str):
                return reduced
            make, arguments, *remainder = reduced
            # pickle rejects __newobj__ with a class other than the object's class, so use _reconstructor
            if make is _NEW_OBJECT and arguments == (Replicated,):
                return (copyreg._reconstructor, (plain, object, None), *remainder)  # type: ignore[attr-defined]
            return (make, tuple(plain if argument is Replicated else argument for argument in arguments), *remainder)

    Replicated.__name__, Replicated.__qualname__ = plain.__name__, plain.__qualname__
    Replicated.__module__ = plain.__module__
    return Replicated


class ReplicaModule:
    """A replica of a module, like those of ``torch.nn.DataParallel``, but with real parameters.

    The replica's modules are shallow copies. `values` has the replica's values by the id of the original parameter.
    Buffers are those of the original (``shares_buffers``), or copies on `device`.
    """

    def __init__(
        self,
        replaced: ReplacedForward,
        values: Mapping[int, torch.Tensor],
        device: torch.device,
        *,
        shares_buffers: bool,
    ) -> None:
        module = replaced.module
        copies: dict[int, nn.Module] = {}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        for original in module.modules():
            copy = original._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
            copies[id(original)] = copy
            copy._compiled_call_impl = None  # code compiled for the original uses the original's parameters
            self._pairs.append((original, copy))
        self.module = copies[id(module)]
        self.module.__class__ = replaced.plain
        if replaced.own_forward is not None:
            vars(self.module)["forward"] = replaced.own_forward
        self.parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, torch.Tensor] = {}
        for original, copy in self._pairs:
            for name, child in original._modules.items():
                copy._modules[name] = None if child is None else copies[id(child)]
            for name, parameter in original._parameters.items():
                if parameter is None:
                    copy._parameters[name] = None
                    continue
                if id(parameter) not in self.parameters:
                    value = values[id(parameter)]
                    self.parameters[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                # Use setattr, because nn.RNNBase.__setattr__ also puts the parameter into its list _flat_weights.
                setattr(copy, name, self.parameters[id(parameter)])
            for name, buffer in original._buffers.items():
                if buffer is None or shares_buffers:
                    continue
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = buffer.detach().to(device, copy=True)
                copy._buffers[name] = buffers[id(buffer)]
            attributes = vars(copy)
            for name, attribute in attributes.items():
                if isinstance(attribute, MethodType) and id(attribute.__self__) in copies:
                    attributes[name] = MethodType(attribute.__func__, copies[id(attribute.__self__)])
        self._attributes: list[dict[str, Any]] = []

    def watch(self) -> None:
        """Record the modules' attributes before a forward, so that :meth:`keep_state` finds the changed ones."""
        self._attributes = [dict(vars(copy)) for _, copy in self._pairs]

    def keep_state(self) -> None:
        """Copy this replica's changed attributes and all its buffers to the original module."""
        for (original, copy), attributes in zip(self._pairs, self._attributes, strict=True):
            for name, value in vars(copy).items():
                if attributes.get(name, _MISSING) is not value:
                    vars(original)[name] = value.detach() if isinstance(value, torch.Tensor) else value
            for name, buffer in copy._buffers.items():
                own = original._buffers.get(name)
                if buffer is own:
                    continue
                if buffer is None or own is None:
                    original._buffers[name] = buffer
                elif buffer.shape == own.shape and buffer.dtype == own.dtype:
                    own.copy_(buffer)
                else:
                    original._buffers[name] = buffer.detach().to(own.device)

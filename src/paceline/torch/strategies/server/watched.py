"""Parameters that record accesses to their gradients and values, and make accesses wait for values in flight.

Some changes do not increase a tensor's version: through ``.data``, and by some operations such as GradScaler's. But
each of them first reads an attribute of the parameter. The classes of this module record these reads.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, ItemsView, Mapping, ValuesView
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_SLOT = "_paceline_slot"
_grad: Any = torch._C.TensorBase.grad
_data: Any = torch._C.TensorBase.data


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient, without recording the access and without waiting for values."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Tensor | None = _grad.__get__(parameter)
    return found


def set_gradient(parameter: nn.Parameter, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(parameter, grad)


def memory_of(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's memory as a tensor. Writes to this tensor do not change the parameter's version."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Tensor = _data.__get__(parameter)
    return found


class WatchedSlot(Protocol):
    """The attributes of a slot that a watched parameter uses."""

    parameter: nn.Parameter
    gradient: GradientWatch
    values: ValueWatch
    wait_for_values: Callable[[], None]


class WatchedParameter(nn.Parameter):
    """A parameter that records accesses to its gradient and to its memory.

    The slot of the parameter (:class:`WatchedSlot`) stores these records. Copies of the parameter record nothing.
    """

    plain: type[nn.Parameter]
    arriving: type[WatchedParameter]
    """The class of the parameter while values are in flight. Every operation then waits for the values."""

    @property
    def data(self) -> Tensor:
        slot: WatchedSlot | None = self.__dict__.get(_SLOT)
        memory = memory_of(self)
        if slot is not None:
            slot.wait_for_values()
            slot.values.show()
            slot.values.expose(memory)
        return memory

    @data.setter
    def data(self, value: Tensor) -> None:
        slot: WatchedSlot | None = self.__dict__.get(_SLOT)
        if slot is not None:
            slot.wait_for_values()
            slot.values.replace()
        _data.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        slot: WatchedSlot | None = self.__dict__.get(_SLOT)
        if slot is not None:
            slot.gradient.show()
        return gradient_of(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        slot: WatchedSlot | None = self.__dict__.get(_SLOT)
        if slot is not None:
            slot.gradient.replace(value)
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def detach(self) -> Tensor:
        alias: Tensor = self._exposed(super().detach())
        return alias

    def numpy(self, *, force: bool = False) -> Any:
        return self._exposed(super().numpy(force=force))

    def _exposed(self, alias: Any) -> Any:
        slot: WatchedSlot | None = self.__dict__.get(_SLOT)
        if slot is not None:
            slot.wait_for_values()
            slot.values.expose(alias)
        return alias

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self.plain(self.data, self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = super().detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = self.plain(copied, self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied: Any = self.plain(super().detach(), self.requires_grad)
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != _SLOT})
        return copied.__reduce_ex__(protocol)


@cache
def _watched(plain: type[nn.Parameter]) -> type[WatchedParameter]:
    bases = (WatchedParameter,) if plain is nn.Parameter else (WatchedParameter, plain)
    kind: Any = type(plain)
    made: type[WatchedParameter] = kind(plain.__name__, bases, {"plain": plain, "__module__": plain.__module__})
    waiting = {"__torch_function__": classmethod(_wait_and_call), "__module__": plain.__module__}
    made.arriving = kind(plain.__name__, (made,), waiting)
    return made


def _wait_and_call(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    _wait_for(args)
    _wait_for(kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **(kwargs or {}))


def _wait_for(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _wait_for(item)
    elif isinstance(value, dict):
        _wait_for(list(value.values()))
    elif isinstance(value, WatchedParameter):
        wait_for_values(value)


def wait_for_values(parameter: nn.Parameter) -> None:
    slot: WatchedSlot | None = parameter.__dict__.get(_SLOT)
    if slot is not None:
        slot.wait_for_values()


def watch(slot: WatchedSlot) -> None:
    parameter = slot.parameter
    parameter.__dict__[_SLOT] = slot
    parameter.__class__ = _watched(type(parameter))


def unwatch(slot: WatchedSlot) -> None:
    parameter: Any = slot.parameter
    if parameter.__dict__.pop(_SLOT, None) is not None:
        parameter.__class__ = parameter.plain


def depart(slot: WatchedSlot) -> None:
    """Make every operation with a parameter wait for its values, until :func:`arrive`."""
    parameter: Any = slot.parameter
    parameter.__class__ = parameter.arriving


def arrive(slot: WatchedSlot) -> None:
    """Record that the values of a parameter have arrived, so that operations no longer wait."""
    parameter: Any = slot.parameter
    if type(parameter) is getattr(parameter, "arriving", None):
        parameter.__class__ = type(parameter).__base__


class ValueWatch:
    """Detects writes of the program to a parameter since its values came from the servers."""

    __slots__ = ("_aliases", "_checksum", "_parameter", "_shown", "_version", "_was_replaced")

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._aliases: list[weakref.ref[Any]] = []
        self.reset()

    def reset(self) -> None:
        """Record that the parameter now has, or will receive, the servers' values."""
        with torch._C.DisableTorchFunctionSubclass():
            self._version = self._parameter._version
        self._shown: Tensor | None = None
        self._checksum: int | None = None
        self._was_replaced = False
        self._aliases = [alias for alias in self._aliases if alias() is not None]

    def expose(self, alias: Any) -> None:
        """Record that the program has an `alias` of the memory, such as a NumPy array, which it can write unnoticed."""
        memory = memory_of(self._parameter)
        if memory.device.type == "cpu" and memory.layout is torch.strided:
            self._aliases.append(weakref.ref(alias))
            if self._shown is None:
                self.seal()

    @property
    def is_exposed(self) -> bool:
        return any(alias() is not None for alias in self._aliases)

    def seal(self) -> None:
        """Store a checksum of the memory. Call this method after the values have arrived."""
        if self._checksum is None:
            self._checksum = _checksum(memory_of(self._parameter))

    def show(self) -> None:
        """Copy the memory before the program gets access to it, to detect a write that does not change the version."""
        if self._shown is None:
            self._shown = memory_of(self._parameter).clone()

    def replace(self) -> None:
        self._was_replaced = True

    @property
    def was_written(self) -> bool:
        if self._was_replaced or self._parameter._version != self._version:
            return True
        memory = memory_of(self._parameter)
        if self._checksum is not None and self._checksum != _checksum(memory):
            return True
        return self._shown is not None and not _is_same(self._shown, memory)


class GradientWatch:
    """Detects changes of a parameter's gradient since backward."""

    __slots__ = ("_is_open", "_parameter", "_shown", "_version", "keeps", "was_replaced", "was_shown")

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.keeps = False  # whether to copy a gradient before an access, to detect a change
        self.close()

    def open(self) -> None:
        grad = gradient_of(self._parameter)
        self._version = -1 if grad is None else grad._version
        self._is_open = True

    def close(self) -> None:
        self._is_open = self.was_shown = self.was_replaced = False
        self._shown: Tensor | None = None
        self._version = -1

    def show(self) -> None:
        if not self._is_open:
            return
        self.was_shown = True
        if self.keeps and self._shown is None:
            grad = gradient_of(self._parameter)
            self._shown = None if grad is None else grad.detach().clone()

    def replace(self, grad: Tensor | None) -> None:
        """Record that the program sets the gradient to `grad`."""
        if self._is_open:
            self.was_replaced = True
        elif grad is not None:
            self._version = grad._version
            self._is_open = True

    @property
    def was_changed(self) -> bool:
        if not self._is_open:
            return False
        grad = gradient_of(self._parameter)
        if self.was_replaced or grad is None or grad._version != self._version:
            return True
        return self._shown is not None and not _is_same(self._shown, grad.detach())


def _checksum(memory: Tensor) -> int:
    return zlib.crc32(memory.contiguous().view(-1).view(torch.uint8).numpy().data)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]  # NaN equals NaN
    return torch.equal(*bits)


_Wait = Callable[[nn.Parameter], None]


class WaitingParameters(dict[str, Any]):
    """The dictionary of a module's parameters. An access such as ``module.weight`` waits for the values.

    It replaces the dictionary ``_parameters`` of ``nn.Module``. Forward pre-hooks would not be enough, because other
    modules may read the parameters without a forward of this module.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], wait: _Wait) -> None:
        super().__init__(parameters)
        self._wait = wait

    def wait(self) -> None:
        for parameter in super().values():
            if parameter is not None:
                self._wait(parameter)

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._wait(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        parameter = super().get(name, default)
        if parameter is not None and parameter is not default:
            self._wait(parameter)
        return parameter

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self.wait()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self.wait()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain dictionary, because servers do not update copies of the module."""
        return (dict, (list(self.items()),))


def make_wait(model: nn.Module, wait: _Wait) -> Callable[[], None]:
    """Make every access to the parameters of `model` wait for values. Return a function that undoes this change.

    Recurrent modules read their parameters from another list, which does not wait. So they get a forward pre-hook.
    """
    handles = []
    guarded: list[tuple[nn.Module, WaitingParameters]] = []
    for module in model.modules():
        if not module._parameters:
            continue
        own = WaitingParameters(module._parameters, wait)
        module._parameters = own
        guarded.append((module, own))
        handles.append(module.register_forward_pre_hook(_WaitBefore(own), prepend=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for module, own in guarded:
            if module._parameters is own:
                module._parameters = dict(dict.items(own))

    return undo


class _WaitBefore:
    """A forward pre-hook that waits for the values of a module. In a copy of the module, it does not wait."""

    def __init__(self, parameters: WaitingParameters | None = None) -> None:
        self._parameters = parameters

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._parameters is not None:
            self._parameters.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_WaitBefore, ())

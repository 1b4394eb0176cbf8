"""Initialize models that were built under ``torch.device("meta")``, module by module.

Random values depend only on the seed and the module's name, so they are equal in all processes and strategies.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError, first_line


class DeferredValues:
    """The modules of a model that have no values yet. Their parameters are placeholders (:func:`stand_in`)."""

    def __init__(self, modules: dict[str, nn.Module], seed: int) -> None:
        """`modules` has the modules by name. Inner modules come before the modules that contain them."""
        self._modules = modules
        self._seed = seed

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> DeferredValues | None:
        """Replace tensors on the meta device by placeholders; return None if the model has no such tensor."""
        found = {
            name: module for name, module in model.named_modules() if any(t.is_meta for t in _own(module).values())
        }
        if not found:
            return None
        for name, module in found.items():
            if _reset_of(module) is None:
                raise UsageError(
                    f"{_called(name, module)} is on the meta device with {', '.join(_own(module))}, but has no "
                    "reset_parameters() to set their values: write one, or build this module outside of "
                    'torch.device("meta")'
                )
        for module in found.values():
            for name, tensor in _own(module).items():
                if not tensor.is_meta:
                    continue
                if isinstance(tensor, nn.Parameter):
                    torch.utils.swap_tensors(tensor, nn.Parameter(stand_in(tensor), tensor.requires_grad))  # type: ignore[no-untyped-call]
                else:
                    # A buffer gets memory, not a placeholder: buffers are small, and every process needs their values.
                    module._buffers[name] = torch.full(tensor.shape, _nothing(tensor.dtype), dtype=tensor.dtype)
        return cls(dict(reversed(found.items())), seed)

    def fill(self, is_needed: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """Initialize the modules with a tensor for which `is_needed` is true, once each. Raises UsageError."""
        for name, module in list(self._modules.items()):
            own = _own(module)
            if not any(is_needed(tensor) for tensor in own.values()):
                continue
            del self._modules[name]
            for parameter in own.values():
                if isinstance(parameter, nn.Parameter):
                    make_room(parameter)
            reset = _reset_of(module)
            assert reset is not None
            try:
                with _seeded(f"{self._seed} {name}"), torch.no_grad():
                    reset()
            except Exception as error:
                raise UsageError(f"reset_parameters() of {_called(name, module)} raised {first_line(error)}") from error
            for kind, tensor in own.items():
                if tensor.is_floating_point() and tensor.numel() and bool(tensor.view(-1)[0].isnan()):
                    raise UsageError(
                        f"reset_parameters() of {_called(name, module)} does not set {kind!r}, which has no values "
                        'because the model was built under torch.device("meta")'
                    )


def stand_in(tensor: Tensor) -> Tensor:
    """Return a placeholder: a tensor of the same shape that needs memory for one element only, which is NaN."""
    return torch.full((), _nothing(tensor.dtype), dtype=tensor.dtype).expand(tensor.shape)


def is_stand_in(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())


def make_room(parameter: nn.Parameter) -> None:
    if is_stand_in(parameter) or not parameter.dim():
        parameter.data = torch.full(parameter.shape, _nothing(parameter.dtype), dtype=parameter.dtype)


@contextmanager
def lent_memory(tensors: Iterable[Any]) -> Iterator[None]:
    """Return a context in which placeholders have memory and random values, as large as those of a trained layer."""
    lent = [
        (parameter, parameter.data)
        for parameter in tensors
        if isinstance(parameter, nn.Parameter) and is_stand_in(parameter)
    ]
    with _seeded("lent"):
        for parameter, _ in lent:
            room = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter.data = room.normal_(0.0, 0.02) if room.is_floating_point() else room.zero_()
    try:
        yield
    finally:
        for parameter, before in lent:
            parameter.data = before


def _own(module: nn.Module) -> dict[str, Tensor]:
    found = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _called(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _nothing(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Return a context in which random numbers depend only on `text`. At its end, restore the random state."""
    generator = torch.default_generator
    state = generator.get_state()
    try:
        generator.manual_seed(zlib.crc32(text.encode()))
        yield
    finally:
        generator.set_state(state)

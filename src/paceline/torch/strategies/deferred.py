"""Models without memory: built under ``torch.device("meta")``, they get their values module by module, where needed.

A model that no process has room for cannot be built first and cut afterwards. On the meta device it has shapes only;
each module's own ``reset_parameters`` then gives it its values, drawn from (seed, name of the module), so that they are
the same in whichever process, and under every strategy.
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
    """The modules of one model that have no values yet. Their tensors are stand-ins of one NaN, that take no memory."""

    def __init__(self, modules: dict[str, nn.Module], seed: int) -> None:
        """`modules` are by name, innermost first."""
        self._modules = modules
        self._seed = seed

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> DeferredValues | None:
        """Put stand-ins in the place of what is on the meta device; None if nothing is.

        Raises UsageError for a module that has no ``reset_parameters`` to give it values.
        """
        found = {name: each for name, each in model.named_modules() if any(t.is_meta for t in _own(each).values())}
        if not found:
            return None
        for name, module in found.items():
            if _reset_of(module) is None:
                raise UsageError(
                    f"{_called(name, module)} is on the meta device with {', '.join(_own(module))}, and has no "
                    "reset_parameters() to give them values: write one, or build this module outside of "
                    'torch.device("meta")'
                )
        for module in found.values():
            for name, tensor in _own(module).items():
                if not tensor.is_meta:
                    continue
                if isinstance(tensor, nn.Parameter):
                    torch.utils.swap_tensors(tensor, nn.Parameter(stand_in(tensor), tensor.requires_grad))  # type: ignore[no-untyped-call]
                else:
                    # Buffers are small, and processes agree on them.
                    module._buffers[name] = torch.full(tensor.shape, _nothing(tensor.dtype), dtype=tensor.dtype)
        return cls(dict(reversed(found.items())), seed)

    def fill(self, is_here: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """Give values to every module that has a tensor which `is_here`; once for each. Raises UsageError."""
        for name, module in list(self._modules.items()):
            own = _own(module)
            if not any(is_here(tensor) for tensor in own.values()):
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
                        f"reset_parameters() of {_called(name, module)} gives no values to {kind!r}, which has none "
                        'since the model was built under torch.device("meta")'
                    )


def stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that takes no memory: one NaN, expanded."""
    return torch.full((), _nothing(tensor.dtype), dtype=tensor.dtype).expand(tensor.shape)


def is_stand_in(tensor: Tensor) -> bool:
    """Return whether a tensor is what :func:`stand_in` returns."""
    return tensor.numel() > 1 and not any(tensor.stride())


def make_room(parameter: nn.Parameter) -> None:
    """Give memory to a parameter that has a stand-in for it."""
    if is_stand_in(parameter) or not parameter.dim():
        parameter.data = torch.full(parameter.shape, _nothing(parameter.dtype), dtype=parameter.dtype)


@contextmanager
def lent_memory(tensors: Iterable[Any]) -> Iterator[None]:
    """Return a context in which stand-ins have memory, and values as a layer's usually are."""
    lent = [(each, each.data) for each in tensors if isinstance(each, nn.Parameter) and is_stand_in(each)]
    with _seeded("lent"):
        for each, _ in lent:
            room = torch.empty(each.shape, dtype=each.dtype)
            each.data = room.normal_(0.0, 0.02) if room.is_floating_point() else room.zero_()
    try:
        yield
    finally:
        for each, before in lent:
            each.data = before


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own tensors, not those of its parts."""
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
    """Return a context that draws from a text, and leaves the random state as it was."""
    generator = torch.default_generator
    state = generator.get_state()
    try:
        generator.manual_seed(zlib.crc32(text.encode()))
        yield
    finally:
        generator.set_state(state)

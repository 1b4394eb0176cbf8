"""Parameters whose values are on their way: whoever reads them waits, for just those that it reads."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping, ValuesView
from typing import Any

from torch import nn

_Wait = Callable[[nn.Parameter], None]


class WaitingParameters(dict[str, Any]):
    """A module's own parameters, which an access waits for: ``module.weight`` goes through it, and ``state_dict()``.

    It takes the place of the dictionary that ``nn.Module`` keeps them in. A hook before forward alone would miss a
    module that reads another's weight without calling it (attention does; tied weights do).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], wait: _Wait) -> None:
        super().__init__(parameters)
        self._wait = wait

    def wait(self) -> None:
        """Wait for all of them."""
        for parameter in super().values():
            if parameter is not None:
                self._wait(parameter)

    def __getitem__(self, name: str) -> Any:
        """Return a parameter when its values are there."""
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._wait(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter when its values are there."""
        parameter = super().get(name, default)
        if parameter is not None and parameter is not default:
            self._wait(parameter)
        return parameter

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return all when their values are there."""
        self.wait()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return all when their values are there."""
        self.wait()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain dictionary: a copy of the module is no longer fed by servers."""
        return (dict, (list(self.items()),))


def make_wait(model: nn.Module, wait: _Wait) -> Callable[[], None]:
    """Have every access to the parameters of `model` wait; return what undoes it.

    A hook before each module's forward serves those that keep their parameters elsewhere too (as recurrent ones do).
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
    """A hook before a module's forward. A copy of the module has one that waits for nothing."""

    def __init__(self, parameters: WaitingParameters | None = None) -> None:
        self._parameters = parameters

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._parameters is not None:
            self._parameters.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_WaitBefore, ())

"""Parameters whose values are still arriving: an access waits for exactly the accessed parameters."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping, ValuesView
from typing import Any

from torch import nn

_Wait = Callable[[nn.Parameter], None]


class WaitingParameters(dict[str, Any]):
    """A module's own parameters; an access such as ``module.weight`` waits for the values.

    It replaces the dictionary in ``nn.Module``, because hooks before forward would miss reads by other modules.
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
        """Copy and pickle as a plain dictionary, because servers do not update a copy of the module."""
        return (dict, (list(self.items()),))


def make_wait(model: nn.Module, wait: _Wait) -> Callable[[], None]:
    """Make every access to the parameters of `model` wait; return a function that undoes it.

    Hooks before forwards cover recurrent modules, which also keep their parameters in other places.
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
    """A hook before a module's forward; a copy of the module does not wait."""

    def __init__(self, parameters: WaitingParameters | None = None) -> None:
        self._parameters = parameters

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._parameters is not None:
            self._parameters.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_WaitBefore, ())

"""Save and load the states of a program's own objects, for checkpoints and for new ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from paceline.errors import UsageError
from paceline.torch.strategies.json_values import like, to_json

_TENSOR: Final = "$tensor"
"""Key of the JSON object that represents a tensor."""


class _GeneratorState:
    """Gives a ``torch.Generator`` the methods ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"])


class RegisteredStates:
    """The objects that a program registered by name. See :meth:`Strategy.register_state`."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def add(self, name: str, state: Any) -> None:
        if name in self._objects:
            raise UsageError(f"register_state({name!r}): the name is already in use. Choose another name")
        known = _GeneratorState(state) if isinstance(state, torch.Generator) else state
        if not all(callable(getattr(known, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"register_state({name!r}): got an object of type {type(state).__name__}, expected one with "
                "state_dict() and load_state_dict(), or a torch.Generator"
            )
        _encode(name, known, {})  # raise UsageError now, not at the first checkpoint
        self._objects[name] = known

    def encode(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return all states as JSON values by name, and the tensors by the names in these JSON values.

        The names of an object's tensors begin with the object's name and a slash.
        """
        tensors: dict[str, torch.Tensor] = {}
        return {name: _encode(name, self._objects[name], tensors) for name in self.names}, tensors

    def load(self, states: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load states from :meth:`encode`, after JSON was decoded. Unknown names are ignored."""
        for name, known in self._objects.items():
            if name in states:
                known.load_state_dict(like(known.state_dict(), _with_tensors(states[name], tensors)))

    @property
    def names(self) -> list[str]:
        return sorted(self._objects)


def _encode(name: str, known: Any, tensors: dict[str, torch.Tensor]) -> Any:
    return to_json(_without_tensors(known.state_dict(), name, tensors), f"the registered state {name!r}")


def _without_tensors(value: Any, owner: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` with names instead of tensors, and add its tensors to `tensors` under these names."""
    if isinstance(value, torch.Tensor):
        name = f"{owner}/{len(tensors)}"
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, owner, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, owner, tensors) for item in value]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]].clone()  # copy it, because generators ignore a tensor's offset
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return [_with_tensors(item, tensors) for item in value] if isinstance(value, list) else value

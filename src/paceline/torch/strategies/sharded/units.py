"""Choose the units of a sharded model, and the dimension along which a parameter is sharded. Pure.

A unit is a block of the model that a process gathers as a whole, one unit at a time. So a process has at most one
complete unit in addition to its shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import nn

from paceline.errors import UsageError

LEAST_NUMEL: Final = 1 << 16
"""Minimum number of parameters in a unit without `patterns`. A unit costs three collectives of 0.1 ms per step."""
_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def choose_units(model: nn.Module, patterns: Sequence[str] = (), *, least: int = LEAST_NUMEL) -> list[str]:
    """Return the names of a model's units. Inner units come before the units that contain them.

    Without `patterns`, the units are the modules in the outermost ``nn.Sequential``, ``ModuleList`` and ``ModuleDict``
    (a transformer's blocks), and the other modules next to these containers (the transformer's embedding and head).
    They must have at least `least` parameters and share no parameter with the rest of the model. A pattern is a
    module's name, with ``*`` for any one part of the name: ``blocks.*``.

    Raises UsageError for a pattern that matches no module that can be a unit. These cannot be units: the model itself,
    modules without parameters or without a forward (``ModuleList``), and modules that share a parameter with another
    part of the model.
    """
    if not patterns:
        return [
            name
            for name in _found(model, "")
            if _num_parameters(model.get_submodule(name)) >= least and not _shared(model, name)
        ]
    names = {name: None for pattern in patterns for name in _matching(model, pattern)}
    for name in names:
        shared = _shared(model, name)
        if shared:
            raise UsageError(
                f"--shard {','.join(patterns)}: {name} shares the parameter {shared[0]!r} with another part of the "
                "model: tied parameters are gathered together; name a module that contains all of them"
            )
    return sorted(names, key=lambda name: -name.count("."))


def _found(module: nn.Module, prefix: str) -> list[str]:
    """Return the names of possible units in a module: items of containers, and modules that contain no container."""
    names: list[str] = []
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        is_item = isinstance(module, _CONTAINERS) and _has_forward(child)
        if is_item or not any(isinstance(submodule, _CONTAINERS) for submodule in child.modules()):
            names.append(name)
        else:
            names += _found(child, f"{name}.")
    return names


def _matching(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules that match a pattern. Raises UsageError if no such module can be a unit."""
    parts = pattern.split(".")
    matching = [
        name
        for name, _ in model.named_modules()
        if name and name.count(".") == len(parts) - 1 and all(map(fnmatchcase, name.split("."), parts))
    ]
    if not matching:
        known = [name for name, _ in model.named_modules() if name]
        shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise UsageError(f"--shard {pattern}: no module of the model has this name; its modules: {shown or 'none'}")
    modules = {name: model.get_submodule(name) for name in matching}
    units = [name for name, module in modules.items() if _has_forward(module) and _num_parameters(module)]
    if not units:
        raise UsageError(
            f"--shard {pattern}: {', '.join(matching[:8])} has no parameters, or no forward of its own (like a "
            f"ModuleList): name modules that are called, {pattern}.* for the modules of a list"
        )
    return units


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shared(model: nn.Module, name: str) -> list[str]:
    """Return the parameters of module `name` that other parts of the model also have."""
    own = {id(parameter): inner for inner, parameter in model.get_submodule(name).named_parameters()}
    shared = {
        id(parameter)
        for outer, parameter in model.named_parameters(remove_duplicate=False)
        if not outer.startswith(f"{name}.") and id(parameter) in own
    }
    return [inner for number, inner in own.items() if number in shared]


def shard_dimension(shape: Sequence[int] | torch.Size, num_shards: int) -> int | None:
    """Return the dimension along which a parameter is sharded; None if every process keeps it complete.

    The dimension is 0, unless shards would be empty. In that case, it is the first other dimension whose size is a
    multiple of the number of shards. For example, a layer of shape (1, n) is sharded along its inputs. If no dimension
    fits, a small parameter is not sharded, and a large parameter is sharded along dimension 0.
    """
    rows = -(-shape[0] // num_shards) if shape and shape[0] else 0
    if rows and -(-shape[0] // rows) == num_shards:
        return 0
    even = (number for number, size in enumerate(shape) if number and size and size % num_shards == 0)
    return next(even, None if math.prod(shape) < LEAST_NUMEL else 0)

"""Import public names of packages at first use, so that a process loads only the modules of its role."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def import_on_demand(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports public names and the given modules at first use.

    `modules` maps each module to its names; names of modules inside the `package` begin with a dot.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    submodules = {module[1:]: module for module in modules if module.startswith(".")}

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name], package), name)
        elif name in submodules:
            value = importlib.import_module(submodules[name], package)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__

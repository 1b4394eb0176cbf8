"""Exclude this package from ``torch.compile``, so that its code runs uncompiled, between compiled graphs.

Dynamo would otherwise compile this package's functions that run during a compiled model's call. But a graph cannot
express communication, and Dynamo does not find the attributes of a process group.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_RULES: Final = "torch._dynamo.trace_rules"


def keep_out_of_graphs() -> None:
    """Make Dynamo skip this package's files, now or when it is imported: its import takes over a second."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        rules.add("paceline")
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Adds this package to the rules in Dynamo's module ``trace_rules`` when that module is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                module.add("paceline")

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

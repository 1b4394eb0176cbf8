"""The public names of ``paceline.protocol``; its modules import only pure modules."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

from paceline import protocol

PURE = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "operator",
    "statistics",
    "types",
    "typing",
    "typing_extensions",
}


def test_all_is_sorted_and_has_exactly_the_public_names() -> None:
    assert protocol.__all__ == sorted(protocol.__all__)
    assert all(hasattr(protocol, name) for name in protocol.__all__)  # some modules are imported at their first use
    content = {name for name, value in vars(protocol).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert set(protocol.__all__) == content - {"TYPE_CHECKING", "import_on_demand"}


def test_only_pure_modules_are_imported() -> None:
    assert protocol.__file__ is not None
    for path in Path(protocol.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_internal = name in ("paceline.errors", "paceline.on_demand")
                is_internal = is_internal or name.split(".")[:2] == ["paceline", "protocol"]
                assert is_internal or name.split(".")[0] in PURE, f"{path.name} imports {name}"

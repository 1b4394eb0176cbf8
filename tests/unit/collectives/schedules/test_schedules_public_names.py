"""The public names of ``paceline.collectives.schedules``; its modules import only pure modules."""

from __future__ import annotations

import ast
import doctest
from inspect import ismodule
from pathlib import Path

from paceline.collectives import schedules
from paceline.collectives.schedules import base

PURE = {"__future__", "collections", "dataclasses", "functools", "heapq", "itertools", "typing"}


def test_all_is_sorted_and_has_exactly_the_public_names() -> None:
    assert schedules.__all__ == sorted(schedules.__all__)
    public = {name for name, value in vars(schedules).items() if not (name.startswith("_") or ismodule(value))}
    assert set(schedules.__all__) == public


def test_only_pure_modules_are_imported() -> None:
    assert schedules.__file__ is not None
    for path in Path(schedules.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_internal = name == "paceline.errors" or name.startswith("paceline.collectives.schedules")
                assert is_internal or name.split(".")[0] in PURE, f"{path.name} imports {name}"


def test_examples_in_docstrings_pass() -> None:
    for module in (schedules, base):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0

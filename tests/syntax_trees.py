"""Syntax trees of the project's modules."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file.

    The garbage collector is paused, because its passes over the new nodes would take most of the time.
    """
    source, is_enabled = path.read_text(encoding="utf-8"), gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if is_enabled:
            gc.enable()

"""Syntax trees of the project's modules."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file.

    Without a pause of the garbage collector, most of the time would be spent on passes over the new nodes.
    """
    source, is_enabled = path.read_text(encoding="utf-8"), gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if is_enabled:
            gc.enable()

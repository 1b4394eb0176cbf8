"""Kernels are compiled once, by the parent, before it starts processes that would all do it at once."""

from __future__ import annotations

import sys
from collections.abc import Callable


def prepare_kernels(say: Callable[[str], None] | None = None) -> None:
    """Compile the kernels unless the cache on disk has them; `say` is told so (default: standard error)."""
    from paceline.kernels.compile import compile_kernels, is_compiled

    if not is_compiled():
        text = "paceline: compiling kernels, once for this installation (about 20 s) ..."
        if say is None:
            print(text, file=sys.stderr, flush=True)
        else:
            say(text)
        compile_kernels()


def load_kernels() -> None:
    """Load the compiled kernels from the cache on disk, so that no request waits for it; takes half a second."""
    from paceline.kernels.compile import compile_kernels

    compile_kernels()

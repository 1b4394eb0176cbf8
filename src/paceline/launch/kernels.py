"""Kernels are compiled once, by the parent, before it starts processes that would all do it at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final


def prepare_kernels(say: Callable[[str], None] | None = None) -> None:
    """Compile the kernels unless the cache on disk has them; `say` is told so (default: standard error)."""
    from paceline.kernels.compile import compile_kernels, is_compiled

    if not is_compiled():
        text = "paceline: compiling kernels, once for this installation (about 20 s) ..."
        if say is None:
            print(text, file=sys.stderr, flush=True)
        else:
            say(text)
        _compile_side_by_side()
        compile_kernels()  # what has failed there


def _compile_side_by_side() -> None:
    """Compile one half of the kernels here, and the other in a process beside, from whose cache they are loaded."""
    from paceline.kernels.compile import compile_half

    with (
        suppress(OSError),
        subprocess.Popen(
            [sys.executable, "-c", _OTHER_HALF], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as other,
    ):
        try:
            compile_half(0)
            other.wait()
        finally:
            other.kill()


_OTHER_HALF: Final = """
import os
from paceline.launch.roles import watch_parent
watch_parent(lambda: os._exit(1))
from paceline.kernels.compile import compile_half
compile_half(1)
"""


def load_kernels() -> None:
    """Load the compiled kernels from the cache on disk, so that no request waits for it; takes half a second."""
    from paceline.kernels.compile import compile_kernels

    compile_kernels()

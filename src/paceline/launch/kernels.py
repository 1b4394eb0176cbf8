"""Compile the kernels once, before starting several processes that would each compile them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Final

from paceline.observe.work import start_work


def prepare_kernels(report: Callable[[str], None] | None = None) -> None:
    """Compile the kernels unless the disk cache has them. Before, pass a note to `report` (default: standard error)."""
    from paceline.tables.compile import KERNELS, compile_kernels, count_compiled, is_compiled

    if not is_compiled():
        text = "paceline: compiling kernels, once for this installation (one to three minutes) ..."
        if report is None:
            print(text, file=sys.stderr, flush=True)
        else:
            report(text)
        with start_work("compiling kernels", len(KERNELS), count=count_compiled):
            _compile_side_by_side()
        compile_kernels()  # load all kernels, and compile the missing ones if the other process failed


def _compile_side_by_side() -> None:
    """Compile half of the kernels here and half in another process, which stores them in the disk cache."""
    from paceline.tables.compile import compile_remaining

    command = [sys.executable, "-c", _COMPILE_VALUES]
    try:
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    # the other process cannot start (sys.executable is unknown in an embedded Python), so the caller compiles all
    except (OSError, TypeError):
        return
    with other:
        try:
            compile_remaining()
            other.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass  # the other process is too slow or stopped, so it is killed
        finally:
            other.kill()


_COMPILE_VALUES: Final = """
import os, sys
sys.path[:] = filter(None, sys.path)  # not the current folder, where a user's file may have a module's name
from paceline.launch.supervisor import watch_parent
watch_parent(lambda: os._exit(1))
from paceline.tables.compile import compile_values
compile_values()
"""
_PATIENCE_S: Final = 300.0


@cache
def load_kernels() -> None:
    """Load the frequently called kernels from the disk cache, so that no request waits for them.

    Other kernels are loaded at their first call, in 5 ms each, because loading all kernels takes half a second. If the
    cache lacks kernels, compile them.
    """
    from paceline.tables.compile import compile_common, compile_kernels, is_compiled

    if is_compiled():
        compile_common()
    else:
        compile_kernels()


def load_kernels_nowait() -> None:
    if load_kernels.cache_info().currsize:
        return
    from paceline.tables.compile import is_compiled

    if is_compiled():
        load_kernels()

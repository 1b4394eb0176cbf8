"""Kernels are compiled once, before the processes are started that would all do it at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Final


def prepare_kernels(say: Callable[[str], None] | None = None) -> None:
    """Compile the kernels unless the cache on disk has them; `say` is told so (default: standard error)."""
    from paceline.tables.compile import compile_kernels, is_compiled

    if not is_compiled():
        text = "paceline: compiling kernels, once for this installation (one to three minutes) ..."
        if say is None:
            print(text, file=sys.stderr, flush=True)
        else:
            say(text)
        _compile_side_by_side()
        compile_kernels()  # loads them, and compiles what has failed there


def _compile_side_by_side() -> None:
    """Compile one half of the kernels here, and the other in a process beside, from whose cache they are loaded."""
    from paceline.tables.compile import compile_rest

    command = [sys.executable, "-c", _COMPILE_VALUES]
    try:
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except (OSError, TypeError):  # no process can be started, or no program is known (Python is embedded)
        return
    with other:
        try:
            compile_rest()
            other.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass  # it is stopped, perhaps
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
    """Load from the cache on disk the kernels that almost all processes call, so that no request waits for them.

    The others are loaded when they are first called, in 5 ms each: to load all takes half a second. Where the cache
    does not have all, those that are missing are compiled.
    """
    from paceline.tables.compile import compile_common, compile_kernels, is_compiled

    if is_compiled():
        compile_common()
    else:
        compile_kernels()


def load_kernels_nowait() -> None:
    """Load the kernels if they are compiled."""
    if load_kernels.cache_info().currsize:
        return
    from paceline.tables.compile import is_compiled

    if is_compiled():
        load_kernels()

"""Numba's `njit`, with a cache that also detects changes of inlined source files.

Numba keeps cache files for each function, and checks only whether the function's own source file has changed.
Paceline's kernels are inlined across files. So if an upgrade changed only `index.py`, the cached `sparse.gather` would
contain the old hash function, and would read wrong addresses. The check of this module covers all source files.

Numba writes the index of a cache before the file that the index names. Meanwhile another process could load an old file
of this name. Therefore the file names of this module include the hash of the sources and the process id. The module
uses private attributes of Numba, which are the same from 0.57 to 0.68. If they are missing, only Numba's own check is
used.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numba.core.caching
import numba.core.compiler
import numba.core.options
from numba.core.runtime.nrt import rtsys
from typing_extensions import override

_PACKAGE = Path(__file__).parents[1]
_UNCOUNTED = {"_nrt": False} if hasattr(numba.core.options.DefaultOptions, "_nrt") else {}
_SOURCES = (*_PACKAGE.glob("kernels/**/*.py"), *_PACKAGE.glob("tables/rules/*.py"))


@cache
def _package_stamp() -> str:
    """Return a hash of all source files whose functions may be inlined in a compiled kernel."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class _OwnName(str):
    """The name of a cache file. It contains the id of the process that uses it, which is a new id after a fork."""

    @override
    def format(self, *arguments: object, **fields: object) -> str:
        return super().format(*arguments, process=os.getpid(), **fields)


class _LoadedAlone(numba.core.caching.FunctionCache):
    """A kernel's cache that loads machine code without importing Numba's compiler.

    Before the first load, Numba normally imports its implementations of all NumPy functions, and SciPy and pycparser if
    they are installed. This takes 0.45 s. Compiled code needs only Numba's runtime, so this class imports the rest only
    if it must compile.
    """

    @override
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        loaded = None
        with self._guard_against_spurious_io_errors():
            loaded = self._load_overload(sig, target_context)
        return loaded  # noqa: RET504 - None after an error of the disk


_LOADS_ALONE = all(
    hasattr(numba.core.caching.FunctionCache, name) for name in ("_guard_against_spurious_io_errors", "_load_overload")
)


def njit(**options: Any) -> Any:
    """Return a decorator like ``numba.njit(**options)``, with the cache of this module."""
    decorate_with_numba = numba.njit(**options)

    def decorate(function: Any) -> Any:
        kernel = decorate_with_numba(function)
        if _LOADS_ALONE and type(getattr(kernel, "_cache", None)) is numba.core.caching.FunctionCache:
            kernel._cache.__class__ = _LoadedAlone
        file = _cache_file(kernel)
        if file is not None and hasattr(file, "_source_stamp"):
            file._source_stamp = (file._source_stamp, _package_stamp())
        if file is not None and hasattr(file, "_data_name_pattern"):
            base = file._data_name_pattern.removesuffix(".{number:d}.nbc")
            file._data_name_pattern = _OwnName(f"{base}.{_package_stamp()[:12]}.{{process}}.{{number:d}}.nbc")
        return kernel

    return decorate


def inlined(**options: Any) -> Any:
    """Return a decorator for kernels that are inlined in other kernels and never called from Python.

    For these kernels, Numba compiles no wrapper for calls from Python, and caches nothing. The kernels must not create
    arrays, because they do not count references to arrays (see :func:`uncounted`).
    """
    return uncounted(nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


class Unaliased(numba.core.compiler.Compiler):
    """A compiler for kernels whose arrays never share memory. It vectorizes loops without a check for overlaps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags.noalias = True


def uncounted(**options: Any) -> Any:
    """Return a decorator for kernels that other kernels call, that create no arrays, and that count no references.

    If a function is not inlined, Numba counts the references to its array arguments with two atomic additions per array
    and call. A csv row of 13 numbers takes 1,100 ns with this counting and 310 ns without.
    """
    return njit(**_UNCOUNTED, **options)


def is_cached(kernel: Any) -> bool:
    """Return whether the cache of a kernel has code that was compiled from the current source files."""
    if numba.config.DISABLE_JIT or kernel.signatures:  # type: ignore[attr-defined]
        return True
    load_index = getattr(_cache_file(kernel), "_load_index", None)
    try:
        return load_index is not None and bool(load_index())
    except Exception:  # a damaged index may raise any error, which Numba reports when it compiles the kernel
        return False


def _cache_file(kernel: Any) -> Any:
    return getattr(getattr(kernel, "_cache", None), "_cache_file", None)

"""Numba's `njit` with a cache that is renewed after a change of any file that a kernel inlines.

Numba keeps one cache file per function and checks it against the function's own source file only. Paceline's kernels
are inlined across files, so an upgrade that changes only `index.py` would leave an old hash function in
`sparse.gather`, which would then read wrong addresses. The check of this module covers all files. Numba writes a
cache's index before the file that the index describes. File names include the source's hash and the process, because
otherwise a process could load an old file that another process has not replaced yet. The module uses private attributes
of Numba (equal from 0.57 to 0.68). Without these attributes, only Numba's own check remains.
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
    """Return a hash of all source files that may be inlined in a compiled kernel."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class _OwnName(str):
    """The name of a file in the cache, with the id of the current process, which is another one after a fork."""

    @override
    def format(self, *arguments: object, **fields: object) -> str:
        return super().format(*arguments, process=os.getpid(), **fields)


class _LoadedAlone(numba.core.caching.FunctionCache):
    """A kernel's cache that loads machine code without importing Numba's compiler.

    Before the first load, Numba imports its implementations of all NumPy functions, and SciPy and pycparser if
    installed, which takes 0.45 s. Compiled code needs only Numba's runtime; a compilation imports the rest.
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
    """Return a decorator for kernels that are compiled into other kernels, and that Python does not call.

    So no wrapper for Python's objects is compiled, and nothing is cached. The kernels must not create arrays, because
    references to arrays are not counted (:func:`uncounted`).
    """
    return uncounted(nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


class Unaliased(numba.core.compiler.Compiler):
    """Compiler of kernels whose arrays share no memory: loops are vectorized without a check for overlap."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags.noalias = True


def uncounted(**options: Any) -> Any:
    """Return a decorator for kernels that other kernels call, and that create no arrays.

    Numba counts the references to each array at each call of a function that it does not inline, by two atomic
    additions: a csv row of 13 numbers takes 1,100 ns with counting and 310 ns without.
    """
    return njit(**_UNCOUNTED, **options)


def is_cached(kernel: Any) -> bool:
    """Return whether a kernel needs no compilation, because its cache has code compiled from the current source."""
    if numba.config.DISABLE_JIT or kernel.signatures:  # type: ignore[attr-defined]
        return True
    load_index = getattr(_cache_file(kernel), "_load_index", None)
    try:
        return load_index is not None and bool(load_index())
    except Exception:  # a damaged index may unpickle to anything; Numba reports the problem when it compiles
        return False


def _cache_file(kernel: Any) -> Any:
    return getattr(getattr(kernel, "_cache", None), "_cache_file", None)

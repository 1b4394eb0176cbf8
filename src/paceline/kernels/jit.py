"""Numba's `njit` with a cache that is renewed when any file that a kernel inlines has changed.

Numba keeps one cache file per function and checks it against the function's own source file only. These
kernels are inlined across files, so an upgrade that changes `index.py` alone would leave an old hash inside
`sparse.gather`, which then looks in the wrong places. Here the check covers all files. Numba first writes in the
index what a file will hold, and then the file: files are named by source and process, or one process could take for
new what another one has yet to write. This reaches into private attributes of Numba (the same from 0.57 to 0.68);
where they are missing, only Numba's own check remains.
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
    """Return a hash of every source file that may stand inside a compiled kernel."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class _OwnName(str):
    """The name of a file in the cache, with the process that writes it: after a fork, that is another one."""

    @override
    def format(self, *arguments: object, **fields: object) -> str:
        return super().format(*arguments, process=os.getpid(), **fields)


class _LoadedAlone(numba.core.caching.FunctionCache):
    """A kernel's cache that loads machine code without all that Numba needs to compile.

    Numba imports its implementations of every function of NumPy before the first load, with SciPy and pycparser where
    they are installed: 0.45 s. Compiled code needs Numba's runtime alone; a compilation imports the rest.
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
    """Return a decorator as ``numba.njit(**options)`` does."""
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

    So there is no wrapper to compile that takes Python's objects, and nothing to cache. They make no arrays: the
    references to arrays are not counted (:func:`uncounted`).
    """
    return uncounted(nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


class Unaliased(numba.core.compiler.Compiler):
    """Compiler of kernels whose arrays share no memory: loops are vectorized without a check for that."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags.noalias = True


def uncounted(**options: Any) -> Any:
    """Return a decorator for kernels that other kernels call, which take arrays and make none.

    Numba counts the references to each array at each call of a function that it does not inline, by two atomic
    additions: a csv row of 13 numbers took 1,100 ns so, and takes 310 where nothing is counted.
    """
    return njit(**_UNCOUNTED, **options)


def is_cached(kernel: Any) -> bool:
    """Return whether a kernel needs no compilation: its cache holds something made from today's source."""
    if numba.config.DISABLE_JIT or kernel.signatures:  # type: ignore[attr-defined]
        return True
    load_index = getattr(_cache_file(kernel), "_load_index", None)
    try:
        return load_index is not None and bool(load_index())
    except Exception:  # a damaged index, which unpickles to anything: Numba will say so when it compiles
        return False


def _cache_file(kernel: Any) -> Any:
    return getattr(getattr(kernel, "_cache", None), "_cache_file", None)

"""Examine this machine: its capabilities, its problems and their remedies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil

from paceline.environment import num_cores
from paceline.errors import PacelineError
from paceline.ps import SGD
from paceline.version import __version__

from .kernels import prepare_kernels
from .local import LocalCluster

_LEAST_FILES = 1024
_LEAST_DISK_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of a check. `status` is ok, note (Paceline works despite the problem) or fail."""

    status: str
    what: str
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Yield the findings, quick checks first. The last check starts and uses a cluster."""
    yield Finding("ok", "paceline", __version__)
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        "ok" if supported else "note",
        "python",
        f"{platform.python_implementation()} {platform.python_version()}",
        "" if supported else "tested on CPython 3.10 to 3.13",
    )
    yield Finding("ok", "platform", f"{platform.system()} {platform.machine()}, {num_cores()} cores")
    memory = psutil.virtual_memory()
    yield Finding("ok", "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    yield _disk()
    yield _files()
    for package in ("numpy", "numba", "msgspec", "safetensors"):
        yield Finding("ok", package, importlib.metadata.version(package))
    yield _extra("pyarrow", "parquet", "pip install 'paceline[parquet]'")
    yield _extra("zstandard", "data in .zst files, filter zstd", "pip install 'paceline[zstd]'")
    yield _extra("fsspec", "data at URLs", "pip install 'paceline[remote]'")
    yield _extra("matplotlib", "paceline inspect --png", "pip install 'paceline[plots]'")
    yield _extra("torch", "PyTorch models, and Gloo in bench collectives", "pip install torch")
    yield _extra("scikit-learn", "paceline.sklearn", "pip install 'paceline[sklearn]'", module="sklearn")
    yield _extra("uvicorn", "paceline serve", "pip install 'paceline[serve]'")
    yield _extra("distributed", "paceline.dask", "pip install 'paceline[dask]'")
    yield _extra("ray", "paceline.ray", "pip install 'paceline[ray]'")
    yield _extra("mpi4py", "Open MPI in bench collectives", "pip install mpi4py; Debian: apt install openmpi-bin")
    yield _kernels()
    yield _cluster()


def _disk() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    enough = free >= _LEAST_DISK_BYTES
    advice = "" if enough else "Paceline caches parsed data there. Free some space, or set TMPDIR"
    return Finding("ok" if enough else "note", "temporary files", f"{folder}, {free / 2**30:.1f} GiB free", advice)


def _files() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding("ok", "open files", "no limit known")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= _LEAST_FILES or soft == resource.RLIM_INFINITY
    return Finding(
        "ok" if enough else "note", "open files", str(soft), "" if enough else "for many workers: ulimit -n 4096"
    )


def _extra(package: str, use: str, install: str, module: str | None = None) -> Finding:
    if importlib.util.find_spec(module or package) is not None:
        return Finding("ok", package, f"{importlib.metadata.version(package)}, for {use}")
    return Finding("note", package, f"not installed, needed for {use}", install)


def _kernels() -> Finding:
    start = time.perf_counter()
    try:
        prepare_kernels()
    except Exception as error:  # report any error of Numba as a finding
        return Finding("fail", "kernels", f"cannot be compiled ({error})", "reinstall numba and llvmlite")
    return Finding("ok", "kernels", f"compiled, ready in {time.perf_counter() - start:.1f} s")


def _cluster() -> Finding:
    try:
        with LocalCluster.start() as cluster, cluster.connect(timeout_s=20.0) as client:
            table = client.sparse_table("doctor", dim=1, update=SGD(lr=1.0))
            keys = np.arange(1000, dtype=np.uint64)
            table.push(keys, np.ones((1000, 1), np.float32)).wait()
            times = []
            for _ in range(200):
                start = time.perf_counter()
                values = table.pull(keys)
                times.append(time.perf_counter() - start)
            if not (values == -1.0).all():
                return Finding("fail", "local cluster", "returns wrong values", "please report this")
    except (PacelineError, OSError) as error:
        return Finding("fail", "local cluster", str(error), "check that processes may open loopback and Unix sockets")
    return Finding("ok", "local cluster", f"works, a pull of 1,000 keys takes {np.median(times) * 1e6:.0f} µs")

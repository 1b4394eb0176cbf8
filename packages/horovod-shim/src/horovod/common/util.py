"""Functions that scripts and Horovod's own tests use."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import paceline.horovod


def _with_verbose(name: str) -> Any:
    return lambda verbose=False: getattr(paceline.horovod, name)()


mpi_built, gloo_built, nccl_built = map(_with_verbose, ("mpi_built", "gloo_built", "nccl_built"))
ddl_built, ccl_built = map(_with_verbose, ("ddl_built", "ccl_built"))


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework such as ``torch`` is supported and installed."""
    return ext_base_name == "torch" and importlib.util.find_spec(ext_base_name) is not None


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether Adasum supports this number of ranks."""
    return num_rank > 0 and num_rank.bit_count() == 1


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables during a block. A variable whose value is None keeps its value."""
    before = {name: os.environ.get(name) for name, value in kwargs.items() if value is not None}
    os.environ.update({name: value for name, value in kwargs.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

"""pytest's workers as forks of a process that has collected the tests, and so has imported all modules.

Otherwise each worker would need ten seconds. xdist starts ``python -m tests.warm.workers`` instead of a worker. It has
the worker forked with its own streams, and ends with the worker. It needs few modules, so functions import the
rest.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from typing import NoReturn

from . import processes
from .zygote import COMPILER

COLLECTED = "WARM_COLLECTED_TESTS"
"""The environment variable with the arguments that select the collected tests, as JSON."""


@functools.cache
def prepare() -> None:
    """Collect the tests and load the kernels. Errors of tests are left to the workers, which report them.

    pytest stores the rewritten tests, as `make test` stores bytecode: to rewrite them takes ten seconds.
    """
    import pytest

    from . import programs

    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["--collect-only", "--quiet", "-n", "0", *json.loads(os.environ[COLLECTED])])
    sys.dont_write_bytecode = before
    for name in COMPILER if "torch" in sys.modules else ():
        importlib.import_module(name)
    programs.prepare()


def main() -> NoReturn:
    """Run one worker, which executes the commands of xdist."""
    from . import programs

    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    programs.end(0)


if __name__ == "__main__":
    with processes.connect("workers", "tests.warm.workers") as server:
        worker = server.fork_onto([], environment=os.environ, streams=(0, 1, 2), folder=os.getcwd())
        sys.exit(max(worker.wait(), 0))

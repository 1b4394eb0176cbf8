"""The number of modules that a process loads at its start. Times are not tested, because they depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numba
import pytest

from paceline.launch import prepare_kernels


def run(program: str) -> Any:
    """Run a program in a new interpreter; return the object that it prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_a_client_and_a_training_import_neither_server_nor_scheduler() -> None:
    program = """
import json, sys
import paceline.ps.client.client, paceline.training.worker.worker
both = ("paceline.ps.server.server", "paceline.ps.scheduler.runtime", "paceline.protocol.server", "paceline.torch")
print(json.dumps([[name in sys.modules for name in both], len([m for m in sys.modules if m.startswith("paceline")])]))
"""
    found, num_modules = run(program)
    assert found == [False] * 4
    assert num_modules < 290


def test_a_launcher_without_servers_does_not_import_numba() -> None:
    assert run("import json, sys, paceline.launch.run.on_engine\nprint(json.dumps('numba' in sys.modules))") is False


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing to load")  # type: ignore[attr-defined]
def test_kernels_are_loaded_without_the_compiler() -> None:
    """Kernels that few processes call are not loaded at the start, because each kernel takes 5 ms."""
    prepare_kernels()
    program = """
import json, sys
from paceline.launch import load_kernels
load_kernels()
from paceline.tables.compile import KERNELS
loaded = [kernel.__name__ for kernel in KERNELS if kernel.signatures]
heavy = [m for m in ("scipy.linalg", "pycparser", "numba.np.linalg", "numba.np.arraymath") if m in sys.modules]
print(json.dumps([loaded, heavy]))
"""
    loaded, heavy = run(program)
    assert {"push", "gather", "dedup", "csr_dot"} <= set(loaded)
    assert len(loaded) < 30
    assert heavy == []


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing to load")  # type: ignore[attr-defined]
def test_loaded_kernels_run_and_other_kernels_are_compiled() -> None:
    prepare_kernels()
    program = """
import json
import numba, numpy as np
from paceline.launch import load_kernels
from paceline.tables.compile import compile_kernels
load_kernels()
twice = numba.njit(lambda x: np.searchsorted(x, 3) + len(x))(np.arange(5))  # what needs all of Numba
compile_kernels()
print(json.dumps(int(twice)))
"""
    assert run(program) == 8

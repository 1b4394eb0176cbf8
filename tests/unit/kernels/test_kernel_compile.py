"""Each kernel is compiled once, for one signature."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numba
import numpy as np
import psutil
import pytest
from tests.reference import filter_cases, rule_cases
from tests.reference.kernel_cases import ARRAY_CASES

from paceline.kernels import dedup, jit
from paceline.kernels.sparse import largest
from paceline.launch import prepare_kernels
from paceline.protocol.buckets import ALL
from paceline.ps.messages import TableSpec
from paceline.tables import compile
from paceline.tables.compile import KERNELS, compile_kernels, is_compiled
from paceline.tables.initializers import Normal
from paceline.tables.part import Selection
from paceline.tables.rules import FTRL, Adam, kernels
from paceline.tables.settings import to_fields
from paceline.tables.sparse_part import make_part
from paceline.tables.sparse_store import SparseStore

pytestmark = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing to compile")  # type: ignore[attr-defined]


def signatures() -> dict[str, int]:
    return {kernel.__name__: len(kernel.signatures) for kernel in KERNELS}


def test_real_use_adds_no_signatures() -> None:
    compile_kernels()
    assert is_compiled()
    before = signatures()

    keys = np.arange(3000, dtype=np.uint64)
    for dim, rule in ((1, FTRL()), (4, Adam(lr=0.1))):
        store = SparseStore(dim=dim, rule=rule, initializer=Normal(), seed=2**63 + 1)
        buffer = np.ones(dim * len(keys) + 3, np.float32)[3:]
        store.reserve(keys)
        store.push(keys, buffer)
        store.push(keys, buffer.reshape(-1, dim))
        store.pull(keys, buffer)
        store.erase(keys[10:20])
        for bucket_keys, records in store.items():
            store.write_records(bucket_keys, records)

    update, start = to_fields(Adam(lr=0.1)), to_fields(Normal())
    for spec in (
        TableSpec(name="d", kind="dense", size=3000, update=update, initializer=start),
        TableSpec(name="s", kind="sparse", dim=2, update=update, initializer=start),
    ):
        part, grads = make_part(spec, ALL), np.ones(spec.dim * len(keys) + 3, np.float32)[3:]
        for selection in (Selection(keys), Selection(None, 0, 3000)) if spec.kind == "dense" else (Selection(keys),):
            part.push(*part.restrict(selection, grads, ALL >> 7))
            part.pull(selection, grads)
        part.load_bucket(9, *part.read_bucket(9))
        part.drop(ALL >> 100)
        part.hold(ALL)

    record, array = np.zeros(40, np.float32), rule_cases.parameters(Adam(lr=0.1))
    grads = np.ones(10, np.float32)
    kernels.dense_start(Adam.code, record, 10, 0, 10, 0, 2, np.uint64(2**64 - 1), array)
    kernels.dense_push(Adam.code, record, 10, 2, 9, grads, 1, array)
    kernels.dense_push_at(Adam.code, record, 10, np.arange(10), grads, array)
    assert largest(grads) < np.inf
    scratch = np.empty(dedup.scratch_size(len(keys)), np.int32)
    dedup.dedup(keys, scratch, np.empty_like(keys), np.empty(len(keys), np.int32))
    for case in (*ARRAY_CASES, *rule_cases.ARRAY_CASES, *filter_cases.ARRAY_CASES):
        if case.num_items <= 100:
            case.kernel(*case.arguments())
    assert signatures() == before


def test_this_process_compiles_all_kernels_if_the_helper_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper process compiles some kernels. If it fails, this process compiles these kernels too."""
    done: list[str] = []
    for name in ("compile_values", "compile_remaining", "compile_kernels"):
        monkeypatch.setattr(compile, name, partial(done.append, name))
    monkeypatch.setattr(compile, "is_compiled", lambda: False)
    printed: list[str] = []
    before = psutil.Process().children()  # children of earlier tests
    for program in (sys.executable, "/no/such/program", None):
        monkeypatch.setattr(sys, "executable", program)
        prepare_kernels(printed.append)
    assert done == ["compile_remaining", "compile_kernels", "compile_kernels", "compile_kernels"]
    assert len(printed) == 3
    assert psutil.Process().children() == before


def test_a_compiling_process_ends_with_the_parent() -> None:
    code = "import subprocess, sys\nfrom paceline.launch import kernels\n"
    code += "command = [sys.executable, '-c', kernels._COMPILE_VALUES + 'import time; time.sleep(600)']\n"
    code += "print(subprocess.Popen(command, stdin=subprocess.PIPE).pid, flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(60)


def test_one_signature_per_kernel_and_a_cache_for_the_next_process() -> None:
    compile_kernels()
    code = "from paceline.tables.compile import *; print(is_compiled()); compile_kernels()\n"
    code += "print({len(k.signatures) for k in KERNELS}, sum(len(k.stats.cache_misses) for k in KERNELS))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["True", "{1}", "0"]


CODE = """
import numba, sys
from paceline.kernels import jit
from paceline.kernels.dedup import take_keys
import numpy as np
print(jit.is_cached(take_keys))
keys = np.ones(1, np.uint64)
take_keys(keys, np.zeros(1, np.int64), keys)
print(jit.is_cached(take_keys), sum(take_keys.stats.cache_hits.values()))
"""


def run_with_cache(cache_dir: Path, before: str = "") -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", before + CODE],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return result.stdout.split()


@pytest.mark.thorough
def test_the_cache_reports_whether_a_kernel_is_cached(tmp_path: Path) -> None:
    assert run_with_cache(tmp_path) == ["False", "True", "0"]
    assert run_with_cache(tmp_path) == ["True", "True", "1"]
    # The stamp of the package has changed: code that the kernel inlines from other files may be outdated.
    changed = "from paceline.kernels import jit\njit._package_stamp = lambda: 'another'\n"
    assert run_with_cache(tmp_path, changed) == ["False", "True", "0"]
    for index in tmp_path.rglob("*take_keys*.nbi"):
        index.write_bytes(b"damaged")
    assert not jit.is_cached(type("Kernel", (), {"signatures": ()})())

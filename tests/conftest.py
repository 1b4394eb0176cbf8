"""Compile the kernels before the first test, and turn off limits that slow machines exceed."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.leftovers import TemporaryFiles
from tests.random_examples import load_profiles
from tests.warm import processes, workers

from paceline.launch import prepare_kernels

pytest_plugins = ["tests.time_limits"]
_TESTS = Path(__file__).parent
_TEMPORARY = pytest.StashKey[TemporaryFiles]()
_CLOCKS = {"asyncio", "threading", "time"}
_SLOW = ("system/", "simulation/", "fuzz/", "integration/strategies/", "integration/torch/")

load_profiles()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels before workers start, and start the shared processes.

    Otherwise each worker would compile kernels.
    """
    temporary = session.config.stash[_TEMPORARY] = TemporaryFiles()
    session.config.add_cleanup(temporary.close)
    session.config.add_cleanup(processes.close)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or no test could end a process by Ctrl-C
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        prepare_kernels()
        os.environ[workers.COLLECTED] = json.dumps(_collected_kinds(session.config))
        warm = contextlib.ExitStack()
        warm.enter_context(processes.zygotes())
        session.config.add_cleanup(warm.close)


def _collected_kinds(config: pytest.Config) -> list[str]:
    """Return the pytest arguments of this run, for the process that collects the tests before the workers start."""
    profile = config.getoption("--hypothesis-profile")
    return ["-m", config.option.markexpr, *(["--hypothesis-profile", profile] if profile else []), *config.args]


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers from a process that has collected the tests. Load the modules of the tests in parallel."""
    if not processes.are_warm():
        return
    for spec in specs:
        if spec.popen:
            spec.python = f"{sys.executable} -m {workers.__name__}"
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        for kind in ("plain", "torch"):
            processes.request_parent(kind, processes.PROGRAMS).close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run slow tests first.

    Rerun a failing test of real processes, sockets and clocks once, because machines stall. The summary reports each
    rerun. ``-p no:rerunfailures`` turns reruns off.
    """
    items[:] = _in_shares(items, getattr(config, "workerinput", {}).get("workercount", 1))
    for item in items if config.pluginmanager.hasplugin("rerunfailures") else ():
        if _is_in(item.path, ("integration/", "system/")) or _CLOCKS & vars(getattr(item, "module", None)).keys():
            item.add_marker(pytest.mark.flaky(reruns=1))


@functools.cache
def _is_in(path: Path, folders: tuple[str, ...]) -> bool:
    return path.relative_to(_TESTS).as_posix().startswith(folders)


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collections: each visits a million objects, and many tests collect."""
    gc.freeze()


def _in_shares(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Sort the tests: each worker's share begins with slow files, so the tests that workers take last are fast."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [tests for path, tests in files.items() if _is_in(path, _SLOW)]
    quick = [item for path, tests in files.items() if not _is_in(path, _SLOW) for item in tests]
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        share = [item for tests in slow[worker::num_workers] for item in tests]
        room = max(len(items) * (worker + 1) // num_workers - len(ordered) - len(share), 0)
        ordered += share + quick[:room]
        del quick[:room]
    return ordered + quick


@pytest.fixture(scope="module", autouse=True)
def _no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no temporary file or folder remains after the last test of a file."""
    temporary = request.config.stash[_TEMPORARY]
    before = temporary.names()
    yield
    left = temporary.wait_removed(before)
    assert not left, f"{request.node.name} leaves {', '.join(sorted(left))} in the folder for temporary files"


@pytest.fixture(scope="module")
def warm_clusters() -> Iterator[None]:
    """Fork local clusters from a process that has already imported their modules."""
    with processes.clusters_from_warm_parents():
        yield


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for ``-n auto``.

    There are more workers than cores, because tests of processes mostly wait. Each worker may use a gibibyte.
    """
    return max(min(2 * (os.cpu_count() or 1) + 2, 8, int(psutil.virtual_memory().total) >> 30), 1)

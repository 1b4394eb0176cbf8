"""For every test: the kernels are compiled before the first one, and nothing fails for being slow on a busy machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from tests.warm import processes

from paceline.launch import prepare_kernels

_TESTS = Path(__file__).parent
_SLOW = ("system/", "simulation/", "fuzz/", "integration/strategies/", "integration/torch/")

# A deadline for each example would measure what else the machine does.
hypothesis.settings.register_profile(
    "side by side", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("side by side")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels before workers start: else each would, and tests would see it said; start what all share."""
    session.config.add_cleanup(processes.close)
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        prepare_kernels()
        warm = contextlib.ExitStack()
        warm.enter_context(processes.zygotes())
        session.config.add_cleanup(warm.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes long. Run a test of real processes and sockets that fails once more: machines stall.

    The summary tells of it; ``-p no:rerunfailures`` does without.
    """
    items[:] = _in_shares(items, getattr(config, "workerinput", {}).get("workercount", 1))
    for item in items if config.pluginmanager.hasplugin("rerunfailures") else ():
        if item.path.relative_to(_TESTS).parts[0] in ("integration", "system"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def _in_shares(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Return the tests so that each worker's share begins with slow files: what is stolen at the end is quick."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path.relative_to(_TESTS), []).append(item)
    slow = [tests for path, tests in files.items() if path.as_posix().startswith(_SLOW)]
    quick = [item for path, tests in files.items() if not path.as_posix().startswith(_SLOW) for item in tests]
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        share = [item for tests in slow[worker::num_workers] for item in tests]
        room = max(len(items) * (worker + 1) // num_workers - len(ordered) - len(share), 0)
        ordered += share + quick[:room]
        del quick[:room]
    return ordered + quick


@pytest.fixture(scope="module")
def warm_clusters() -> Iterator[None]:
    """Local clusters of the test's process are forked from a process that has loaded all."""
    with processes.clusters_from_warm_parents():
        yield


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means here: tests of processes wait more than they compute, so workers are more than cores.

    Each has up to a gibibyte.
    """
    return max(min(2 * (os.cpu_count() or 1) + 2, 8, int(psutil.virtual_memory().total) >> 30), 1)

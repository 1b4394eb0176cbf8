"""For every test: the kernels are compiled before the first one, and nothing fails for being slow on a busy machine."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from paceline.launch import prepare_kernels

_TESTS = Path(__file__).parent

# A deadline for each example would measure what else the machine does.
hypothesis.settings.register_profile(
    "side by side", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("side by side")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels before workers start: else each would, and tests would see it said."""
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        prepare_kernels()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run a test of real processes and sockets that fails once more: machines stall. The summary tells of it.

    ``-p no:rerunfailures`` does without.
    """
    for item in items if config.pluginmanager.hasplugin("rerunfailures") else ():
        if item.path.relative_to(_TESTS).parts[0] in ("integration", "system"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means here: many tests wait, so there are two workers more than cores."""
    return min((os.cpu_count() or 1) + 2, 8)

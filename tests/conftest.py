"""For every test: the kernels are compiled before the first one, and nothing fails for being slow on a busy machine."""

from __future__ import annotations

import os

import hypothesis
import pytest

from paceline.launch import prepare_kernels

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


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means here: many tests wait, so there are two workers more than cores."""
    return min((os.cpu_count() or 1) + 2, 8)

"""A plugin of pytest: a limit for each run of a test that also holds after its first failure.

pytest-timeout and pytest's own ``faulthandler_timeout`` end their limits when a test fails, because a debugger might
start then. So without this plugin the teardown of a failed test and its rerun could hang forever.
"""

from __future__ import annotations

import faulthandler
import functools
import os
from collections.abc import Generator

import pytest

LIMIT_S = 240.0
"""Longer than the limit of pytest-timeout, which ends one test. This limit ends the process."""
_STANDARD_ERROR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep standard error, which pytest replaces during tests, for the stacks."""
    standard_error = config.stash[_STANDARD_ERROR] = os.dup(2)
    config.add_cleanup(functools.partial(os.close, standard_error))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """End the limit after the test: between tests, a worker of xdist may wait for any time."""
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the limit. At its end the process prints the stacks of all threads and exits; xdist reports the test."""
    faulthandler.dump_traceback_later(LIMIT_S, file=item.config.stash[_STANDARD_ERROR], exit=True)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Start the limit again at a failure."""
    if isinstance(node, pytest.Item):
        pytest_runtest_setup(node)

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

ADDITIONAL_S = 40.0
"""How much longer this limit, which ends the process, is than that of pytest-timeout, which ends one test."""
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
    marker = item.get_closest_marker("timeout")
    option = item.config.getoption("timeout") or item.config.getini("timeout")
    limit_s = ADDITIONAL_S + float(marker.args[0] if marker else option)
    faulthandler.dump_traceback_later(limit_s, file=item.config.stash[_STANDARD_ERROR], exit=True)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Start the limit again at a failure."""
    if isinstance(node, pytest.Item):
        pytest_runtest_setup(node)

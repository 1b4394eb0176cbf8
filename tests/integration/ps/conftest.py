"""Every test in this folder must leave no thread and no file descriptor."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from paceline.tables.compile import compile_kernels


@pytest.fixture(autouse=True, scope="session")
def kernels() -> None:
    """Load the kernels before the tests, because no other thread runs during the load."""
    compile_kernels()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    process = psutil.Process()
    threads, files = threading.active_count(), process.num_fds()
    yield
    deadline = time.monotonic() + 5
    while (threading.active_count(), process.num_fds()) > (threads, files) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() <= threads, threading.enumerate()
    assert process.num_fds() <= files

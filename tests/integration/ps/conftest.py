"""Every test in this folder must leave no thread and no file descriptor."""

from __future__ import annotations

import pytest
from tests.leftovers import nothing_leaks as nothing_leaks

from paceline.tables.compile import compile_kernels


@pytest.fixture(autouse=True, scope="session")
def kernels() -> None:
    """Load the kernels before the tests, because no other thread runs during the load."""
    compile_kernels()

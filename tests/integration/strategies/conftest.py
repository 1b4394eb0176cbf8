"""Every cluster here is forked from what is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.warm.processes import clusters_from_warm_parents


@pytest.fixture(autouse=True, scope="module")
def _warm() -> Iterator[None]:
    with clusters_from_warm_parents():
        yield

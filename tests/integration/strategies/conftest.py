"""All clusters of these tests are forked from a process with loaded modules."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _warm(warm_clusters: None) -> None:
    pass

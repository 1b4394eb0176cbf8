"""Every cluster here is forked from what is loaded."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _warm(warm_clusters: None) -> None:
    pass

"""Tests of tables compile no kernel again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.tables.rules import kernels


@pytest.fixture(autouse=True, scope="module")
def push_is_compiled_once() -> Iterator[None]:
    """For other types of arguments than a server's, as of arrays with gaps, it would be anew, for half a minute."""
    yield
    assert len(getattr(kernels.push, "signatures", ())) <= 1

"""Tests of tables compile no kernel again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.tables.rules import kernels


@pytest.fixture(autouse=True, scope="module")
def push_is_compiled_once() -> Iterator[None]:
    """Types other than a server's arguments, such as arrays with gaps, would compile it again, for half a minute."""
    yield
    assert len(getattr(kernels.push, "signatures", ())) <= 1

"""Check that tests of tables do not compile kernels for further signatures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.tables.rules import kernels


@pytest.fixture(autouse=True, scope="module")
def push_is_compiled_once() -> Iterator[None]:
    """Other argument types, such as arrays with gaps, would compile the kernel again, which takes half a minute."""
    yield
    assert len(getattr(kernels.push, "signatures", ())) <= 1

"""For every test: the kernels are compiled before the first one, which would else be slow and see it said."""

from __future__ import annotations

import pytest

from paceline.launch import prepare_kernels


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    prepare_kernels()

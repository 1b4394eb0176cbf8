"""The public conformance suites reject names of checks that they do not have, because such a test would always pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import check_collectives, check_engine, check_transport


def _fail(*_: object) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_engine(_fail, Path(), only="check_outputs"),
        lambda: check_collectives(_fail, only="check_barriers"),
        lambda: check_transport(_fail, only="check_echoes"),
    ],
    ids=["engine", "collectives", "transport"],
)
def test_an_unknown_check_is_an_error(check: Callable[[], None]) -> None:
    with pytest.raises(KeyError):
        check()

from __future__ import annotations

import pytest

import paceline.observe


def test_all_is_sorted_and_complete() -> None:
    names = paceline.observe.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(paceline.observe, name).__name__ == name
        assert name in dir(paceline.observe)
    with pytest.raises(AttributeError, match="nothing"):
        paceline.observe.nothing  # noqa: B018

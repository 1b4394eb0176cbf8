from __future__ import annotations

import types

import pytest

import paceline.testing
import paceline.transport


@pytest.mark.parametrize("room", [paceline.transport, paceline.testing])
def test_public_names_are_listed_sorted_and_defined(room: types.ModuleType) -> None:
    names = room.__all__
    assert sorted(names, key=_as_ruff_does) == names
    found = {
        name
        for name, value in vars(room).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert found == set(names)


def _as_ruff_does(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

from __future__ import annotations

from types import ModuleType

import paceline.observe


def test_all_is_sorted_and_complete() -> None:
    names = paceline.observe.__all__
    assert names == sorted(names)
    content = vars(paceline.observe).items()
    assert {name for name, value in content if name[0] != "_" and not isinstance(value, ModuleType)} == set(names)

from __future__ import annotations

from types import ModuleType

from paceline.protocol import scheduler


def test_all_is_sorted_and_complete() -> None:
    assert scheduler.__all__ == sorted(scheduler.__all__)
    content = vars(scheduler).items()
    public = {name for name, value in content if name[0] != "_" and not isinstance(value, ModuleType)}
    assert set(scheduler.__all__) == public | {"events"}

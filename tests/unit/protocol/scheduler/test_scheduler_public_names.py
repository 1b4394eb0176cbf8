from __future__ import annotations

from types import ModuleType

from paceline.protocol import scheduler


def test_all_is_sorted_and_complete() -> None:
    assert scheduler.__all__ == sorted(scheduler.__all__)
    assert all(hasattr(scheduler, name) for name in scheduler.__all__)  # some are imported when they are first used
    content = vars(scheduler).items()
    public = {name for name, value in content if name[0] != "_" and not isinstance(value, ModuleType)}
    public -= {"TYPE_CHECKING", "import_on_demand"}
    assert set(scheduler.__all__) == public | {"events", "messages"}

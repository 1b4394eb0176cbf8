"""The number of examples of random tests: the profile of Hypothesis scales it."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

_WHOLE = 100
_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def load_profiles() -> None:
    """Run 10% of the examples by default, and all of them with ``--hypothesis-profile thorough``.

    Deadlines are off, because a busy machine would exceed them.
    """
    settings.register_profile("quick", max_examples=10, **_COMMON)
    settings.register_profile("thorough", max_examples=_WHOLE, **_COMMON)
    settings.load_profile("quick")


def num_examples(number: int, **options: Any) -> settings:
    """Return settings for `number` examples in the thorough profile, and proportionally fewer in the quick one."""
    return settings(max_examples=max(number * settings().max_examples // _WHOLE, 1), **options)

"""Check the behaviour of a :class:`~paceline.collectives.Group` against NumPy.

``COLLECTIVE_CHECKS`` contains the checks by name, for one test each. A check is called on every rank with its group.
The check computes the other ranks' inputs from their rank numbers, so the ranks need no channel besides the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from paceline.collectives import Group
from paceline.testing import group_checks as _group_checks
from paceline.testing import operation_checks as _operation_checks
from paceline.testing.ranks import nothing_left, run_ranks

__all__ = ["COLLECTIVE_CHECKS", "Check", "RunRanks", "check_collectives", "nothing_left", "run_ranks"]

Check = Callable[[Group], None]


RunRanks = Callable[[Check], object]
"""Calls a function on every rank of a new group, and raises AssertionError if the function raises on some rank."""


def check_collectives(run: RunRanks, *, only: str | None = None) -> None:
    """Check that groups behave as `paceline.collectives` documents; raise AssertionError otherwise.

    ``run`` calls a function on every rank of a new group; ``only`` selects one check of ``COLLECTIVE_CHECKS``, and
    another name is a KeyError.
    """
    for name in COLLECTIVE_CHECKS if only is None else [only]:
        run(COLLECTIVE_CHECKS[name])


COLLECTIVE_CHECKS: Final[Mapping[str, Check]] = {
    check.__name__: check for check in (*_operation_checks.CHECKS, *_group_checks.CHECKS)
}
"""The checks by name."""

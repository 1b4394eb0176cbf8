"""What every :class:`~paceline.collectives.Group` must do, checked against NumPy.

``COLLECTIVE_CHECKS`` has the checks by name, for a test each: every one is called on every rank with its group, and
computes from the rank's number what the others give, so it needs no other way between them than the group itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

from paceline.collectives import Group
from paceline.testing import group_checks as _group_checks
from paceline.testing import operation_checks as _operation_checks
from paceline.testing.ranks import nothing_left, run_ranks

__all__ = ["COLLECTIVE_CHECKS", "Check", "RunRanks", "check_collectives", "nothing_left", "run_ranks"]

_T = TypeVar("_T")
Check = Callable[[Group], None]


class RunRanks(Protocol):
    """Calls a function on every rank of a fresh group, closes the groups, and returns what it returned, by rank."""

    def __call__(self, function: Callable[[Group], _T], /) -> list[_T]:
        """Raise AssertionError if the function raises anywhere."""


def check_collectives(run: RunRanks, *, only: str | None = None) -> None:
    """Check that groups keep the promises of `paceline.collectives`; AssertionError if they do not.

    ``run`` calls a function on every rank of a fresh group; ``only`` names one check of ``COLLECTIVE_CHECKS``.
    """
    for name, check in COLLECTIVE_CHECKS.items():
        if only is None or name == only:
            run(check)


COLLECTIVE_CHECKS: Final[Mapping[str, Check]] = {
    check.__name__: check for check in (*_operation_checks.CHECKS, *_group_checks.CHECKS)
}
"""The checks by name."""

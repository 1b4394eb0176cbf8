"""Every engine and schedule passes the conformance suite of Group and releases threads, descriptors and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.collectives import Group
from paceline.collectives.schedules import ALGORITHMS
from paceline.testing import COLLECTIVE_CHECKS, check_collectives, nothing_left, run_ranks

_WHOLE = {
    "shared, 2 ranks": {"size": 2},
    "shared, 4 ranks": {"size": 4},
    "ring, 3 ranks": {"size": 3, "algorithm": "ring"},
    "2 hosts of 2": {"size": 4, "hosts": [0, 0, 1, 1]},
}
_PARTLY = {
    "shared, 3 ranks": {"size": 3},
    "shared, 5 ranks": {"size": 5},
    "forced shared, 2 ranks": {"size": 2, "algorithm": "shared"},
    "direct, 2 ranks": {"size": 2, "algorithm": "direct"},
    "direct, 3 ranks": {"size": 3, "algorithm": "direct"},
    "ring, 2 ranks": {"size": 2, "algorithm": "ring"},
    "recursive-doubling, 3 ranks": {"size": 3, "algorithm": "recursive-doubling"},
    "recursive-doubling, 4 ranks": {"size": 4, "algorithm": "recursive-doubling"},
    "halving-doubling, 3 ranks": {"size": 3, "algorithm": "halving-doubling"},
    "binomial-tree, 3 ranks": {"size": 3, "algorithm": "binomial-tree"},
    "binomial-tree, 5 ranks": {"size": 5, "algorithm": "binomial-tree"},
    "double-binary-tree, 4 ranks": {"size": 4, "algorithm": "double-binary-tree"},
    "central, 3 ranks": {"size": 3, "algorithm": "central"},
    "bruck, 3 ranks": {"size": 3, "algorithm": "bruck"},
    "pairwise, 3 ranks": {"size": 3, "algorithm": "pairwise"},
    "hierarchical, one host": {"size": 2, "algorithm": "hierarchical"},
    "hierarchical, hosts of 2 and 1": {"size": 3, "hosts": [0, 1, 0], "algorithm": "hierarchical"},
    "hierarchical, hosts of 2, 1 and 1": {"size": 4, "hosts": [0, 1, 0, 2], "algorithm": "hierarchical"},
    "3 hosts of 1": {"size": 3, "hosts": [0, 1, 2]},
    "hosts of 2 and 1": {"size": 3, "hosts": [0, 0, 1]},
}
_SELDOM = (
    "2 hosts of 2",
    "binomial-tree, 5 ranks",
    "hierarchical, hosts of 2, 1 and 1",
    "shared, 3 ranks",
    "shared, 4 ranks",
    "shared, 5 ranks",
    "3 hosts of 1",
    "hosts of 2 and 1",
    "forced shared, 2 ranks",
    "recursive-doubling, 3 ranks",
    "recursive-doubling, 4 ranks",
    "double-binary-tree, 4 ranks",
    "hierarchical, one host",
    "direct, 3 ranks",
    "ring, 2 ranks",
)
_SELDOM_TOGETHER = [
    ("ring, 3 ranks", check)
    for check in (
        "check_all_reduce_dtypes",
        "check_all_reduce_large",
        "check_not_finite",
        "check_layouts",
        "check_dropped_tickets",
        "check_async_does_not_wait",
        "check_union",
        "check_wrong_use",
        "check_explain",
    )
]
"""Checks of code that all engines share."""
_CHECKS_OF = {
    "all_reduce": ("check_all_reduce_sizes", "check_layouts"),
    "reduce": ("check_reduce",),
    "reduce_scatter": ("check_reduce_scatter",),
    "broadcast": ("check_broadcast",),
    "all_gather": ("check_all_gather",),
    "gather": ("check_gather",),
    "scatter": ("check_scatter",),
    "all_to_all": ("check_all_to_all",),
}


def _checks(options: dict[str, Any]) -> Iterator[str]:
    """Return the checks of operations that support the forced algorithm. Other operations do not change with it."""
    algorithm = options.get("algorithm")
    is_schedule = algorithm != "hierarchical" and any(algorithm in known for known in ALGORITHMS.values())
    for operation, checks in _CHECKS_OF.items():
        if not is_schedule or algorithm in ALGORITHMS[operation]:
            yield from checks


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize(
    ("options", "check"),
    [
        pytest.param(
            *(options, check),
            marks=[pytest.mark.thorough] * (name in _SELDOM or (name, check) in _SELDOM_TOGETHER),
            id=f"{name}-{check}",
        )
        for name, options in _WHOLE.items()
        for check in COLLECTIVE_CHECKS
    ],
)
def test_every_check_passes(options: dict[str, Any], check: str) -> None:
    check_collectives(lambda function: run_ranks(function=function, **options), only=check)


def run_on_one_group(options: dict[str, Any], *checks: str) -> None:
    """Run several checks on a group. Its ranks measure their links only once."""

    def run(group: Group) -> None:
        for check in checks:
            COLLECTIVE_CHECKS[check](group)

    run_ranks(function=run, **options)


@pytest.mark.parametrize(
    "options",
    [pytest.param(_PARTLY[name], marks=[pytest.mark.thorough] * (name in _SELDOM), id=name) for name in _PARTLY],
)
def test_every_operation_passes_with_every_algorithm(options: dict[str, Any]) -> None:
    run_on_one_group(options, *_checks(options))


@pytest.mark.thorough
@pytest.mark.parametrize("options", [pytest.param(_PARTLY[name], id=name) for name in _PARTLY])
def test_programs_pass_with_every_algorithm(options: dict[str, Any]) -> None:
    run_on_one_group(options, "check_programs", "check_explain")

"""The choice of an algorithm, in groups of threads."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.collectives import Group
from paceline.collectives.schedules import ALGORITHMS
from paceline.collectives.tuner import check_algorithm
from paceline.errors import UsageError
from paceline.testing import run_ranks


def chosen(group: Group, num_bytes: int, operation: str = "all_reduce") -> str:
    return group.explain(num_bytes, operation).splitlines()[0].split(": ", 1)[1].split(" (")[0]


def test_unknown_names_of_algorithms_are_rejected() -> None:
    for names in ALGORITHMS.values():
        for name in names:
            check_algorithm(name)
    for other in (None, "shared", "direct"):
        check_algorithm(other)
    with pytest.raises(UsageError, match=r"got algorithm 'Ring', expected one of binomial-tree, .*ring"):
        check_algorithm("Ring")


def test_small_calls_on_one_host_are_never_measured() -> None:
    def call(group: Group) -> list[str]:
        group.all_reduce(np.ones(1000))
        return [chosen(group, num_bytes, operation) for num_bytes in (0, 1000) for operation in ALGORITHMS]

    for explanation in run_ranks(2, call):
        assert set(explanation) == {"shared"}


@pytest.mark.parametrize(
    "options",
    [
        {"size": 3},
        pytest.param({"size": 3, "hosts": [0, 1, 2]}, marks=pytest.mark.thorough),
        {"size": 4, "hosts": [0, 0, 1, 1]},
    ],
)
def test_all_ranks_choose_the_same_algorithm(options: dict[str, object]) -> None:
    def call(group: Group) -> list[str]:
        for size in (10, 100_000, 1_000_000):
            group.all_reduce(np.ones(size, np.float32))
            group.all_gather(np.ones(size, np.int8))
        return [chosen(group, 1 << power, name) for power in range(4, 25) for name in ("all_reduce", "all_gather")]

    explanations = run_ranks(function=call, **options)  # type: ignore[arg-type]
    assert all(choice == explanations[0] for choice in explanations)


def test_a_requested_algorithm_is_used_if_it_supports_the_call() -> None:
    def call(group: Group) -> list[str]:
        group.all_gather(np.ones(5))
        group.all_reduce(np.ones(5))
        group.broadcast(np.ones(5))
        return [chosen(group, 40, operation) for operation in ("all_reduce", "all_gather", "broadcast")]

    for on_three in run_ranks(3, call, algorithm="recursive-doubling"):
        assert on_three[0] == "recursive-doubling"
        assert on_three[1] != "recursive-doubling"  # it needs a power of two ranks
        assert on_three[2] not in ("recursive-doubling", "none yet")
    for on_four in run_ranks(4, call, algorithm="recursive-doubling"):
        assert on_four[:2] == ["recursive-doubling"] * 2


def test_explain_reports_missing_measurements() -> None:
    texts = run_ranks(2, lambda group: group.explain(1 << 20), hosts=[0, 1])
    assert all("none yet (the first call measures the links" in text for text in texts)


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 0]])
def test_new_ranks_use_the_costs_that_an_earlier_group_has_measured(hosts: list[int]) -> None:
    def call(group: Group) -> tuple[list[float | None], list[float | None]]:
        def predicted(group: Group) -> list[float | None]:
            group.all_reduce(np.ones(1 << 20, np.float32))
            return [candidate.predicted_s for candidate in group.candidates(1 << 22)]

        first = predicted(group)
        later = group.subgroup([0, 1, 2])
        assert later is not None
        if group.rank < 2:  # rank 2 is new
            later.tuner.reuse(group.tuner)
        return first, predicted(later)

    for first, later in run_ranks(3, call, hosts=hosts):
        assert later == first
        assert any(first)

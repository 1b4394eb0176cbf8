"""The checker accepts every algorithm for every size from 1 to 64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.reference.schedules import check

from paceline.collectives.schedules import ALGORITHMS, Algorithm

EVERY = [
    pytest.param(algorithm, id=f"{collective}-{name}")
    for collective, algorithms in ALGORITHMS.items()
    for name, algorithm in algorithms.items()
]
SIZES = [range(1, 17), *(pytest.param(range(n, n + 16), marks=pytest.mark.thorough) for n in (17, 33, 49))]


def options_of(algorithm: Algorithm, size: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of an algorithm; each set of arguments gives different schedules."""
    for root in sorted({0, size // 2, size - 1}) if algorithm.rooted else [0]:
        for pieces in (1, 3) if algorithm.pipelined else (1,):
            yield {"root": root, "pieces": pieces}
    if algorithm.hierarchical:
        alone, by_three, in_turns = range(size), [rank // 3 for rank in range(size)], [rank % 5 for rank in range(size)]
        yield from ({"hosts": hosts} for hosts in (alone, by_three, in_turns, [max(7 - rank, 0) for rank in alone]))


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]}-{sizes[-1]}")
@pytest.mark.parametrize("algorithm", EVERY)
def test_every_algorithm_is_correct_for_every_size(algorithm: Algorithm, sizes: range) -> None:
    num_checked = 0
    for size in filter(algorithm.supports, sizes):
        for options in options_of(algorithm, size):
            if algorithm.hierarchical and "hosts" not in options:
                options["hosts"] = [0] * size
            check(algorithm.collective, algorithm.schedules(size, **options), root=options.get("root", 0))
            num_checked += 1
    assert num_checked > 0 or algorithm.powers_of_two_only


@pytest.mark.parametrize("algorithm", EVERY)
def test_one_rank_sends_nothing(algorithm: Algorithm) -> None:
    (schedule,) = algorithm.schedules(1, hosts=[0])
    assert all(not hasattr(action, "peer") for actions in schedule.rounds for action in actions)


def test_every_collective_has_an_algorithm_for_every_size() -> None:
    assert len(ALGORITHMS) == 9
    for algorithms in ALGORITHMS.values():
        for size in range(1, 65):
            assert any(algorithm.supports(size) for algorithm in algorithms.values())


def test_the_names_in_the_table_are_the_names_of_the_algorithms() -> None:
    names = set()
    for collective, algorithms in ALGORITHMS.items():
        for name, algorithm in algorithms.items():
            assert (algorithm.collective, algorithm.name) == (collective, name)
            names.add(name)
    assert sorted(names) == [
        "binomial-tree",
        "bruck",
        "central",
        "dissemination",
        "double-binary-tree",
        "halving-doubling",
        "hierarchical",
        "pairwise",
        "recursive-doubling",
        "ring",
    ]

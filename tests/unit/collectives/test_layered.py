"""All-reduce within hosts and then between hosts equals all-reduce among all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.collectives import Group
from paceline.testing import run_ranks


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1], [0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1, 2], [0, 1, 1, 2, 2]])
def test_sums_and_means(hosts: list[int]) -> None:
    size = len(hosts)

    def call(group: Group) -> None:
        for count in (0, 1, 5, 20_000, 400_000):
            given = np.full(count, group.rank + 1.0, np.float32)
            assert (group.all_reduce(given) == size * (size + 1) // 2).all()
            assert np.allclose(group.all_reduce(given, "mean"), (size + 1) / 2)
            assert (given == group.rank + 1).all()
            group.all_reduce(given, "max", out=given)
            assert (given == size).all()

    run_ranks(size, call, hosts=hosts, algorithm="hierarchical")


def test_half_precision_results_are_equal_on_all_ranks() -> None:
    def call(group: Group) -> bytes:
        given = np.random.default_rng(group.rank).random(30_001).astype(np.float16)
        return bytes(group.all_reduce(given, "mean").tobytes())

    explanations = run_ranks(4, call, hosts=[0, 0, 1, 1], algorithm="hierarchical")
    assert len(set(explanations)) == 1

"""Simulations of the product's own processes: guarantees hold, planted defects are found, runs are reproducible."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.simulation.broken_rules import BREAK

from paceline.protocol.delivery import Delivery
from paceline.tables.sparse_part import SparsePart
from simulator.__main__ import main
from simulator.oracle import Violation
from simulator.product import KINDS, ProductCluster
from simulator.product.truth import Truth

SEEDS = range(34, 36)
DEFECT_SEEDS = (2, 11, *range(200))  # the first seeds find the defects below


def test_no_guarantee_is_violated() -> None:
    outcomes = [ProductCluster(seed).run() for seed in SEEDS]
    assert [f"seed {outcome.seed}: {outcome.violation}" for outcome in outcomes if outcome.violation] == []
    fired = sum((outcome.fired for outcome in outcomes), Counter[str]())
    assert len(fired) > len(KINDS) // 2
    assert sum(outcome.num_reads for outcome in outcomes) > 25
    assert sum(outcome.num_compared for outcome in outcomes) > 750


def test_a_seed_gives_the_same_run_every_time() -> None:
    for seed in (3,):
        lines: list[list[str]] = [[], []]
        outcomes = [ProductCluster(seed, num_faults=3, trace=lines[run].append).run() for run in (0, 1)]
        assert lines[0] == lines[1]
        assert outcomes[0] == outcomes[1]
        assert len(lines[0]) > 1000


def violations(num_faults: int) -> Iterator[str]:
    """Yield the violation of each seed."""
    for seed in DEFECT_SEEDS:
        violation = ProductCluster(seed, num_faults=num_faults).run().violation
        if violation is not None:
            yield violation


def test_a_broken_duplicate_filter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    BREAK["exactly once"](monkeypatch)
    assert any("(exactly once)" in violation or "(reads)" in violation for violation in violations(8))


@pytest.mark.thorough
def test_a_fill_without_a_filter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Delivery.adopt
    monkeypatch.setattr(Delivery, "adopt", lambda delivery, buckets, state: adopt(delivery, buckets, ()))
    assert any("(exactly once)" in violation or "(reads)" in violation for violation in violations(8))


def test_a_fill_without_one_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = SparsePart.load_bucket
    monkeypatch.setattr(
        SparsePart, "load_bucket", lambda part, bucket, keys, rows: load(part, bucket, keys[1:], rows[1:])
    )
    assert any("(replicas)" in violation or "(reads)" in violation for violation in violations(8))


def test_a_violation_prints_the_replay_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_fault(truth: Truth, chains: object) -> None:
        raise Violation(f"(test) {len(truth.issued)} pushes")

    monkeypatch.setattr(Truth, "check", find_fault)
    assert main(["--product", "--seeds", "0:2", "--faults=", "--num-faults", "2"]) == 1
    found = re.search(r"seed (\d+): (.*)\n  python -m simulator (.*)\n", capsys.readouterr().out)
    assert found is not None
    assert main(found[3].split()) == 1
    assert f"VIOLATION {found[2]}" in capsys.readouterr().out

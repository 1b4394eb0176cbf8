"""Learning-rate schedules: their factors, their notation, and the update rules that support them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data import open_dataset
from paceline.errors import UsageError
from paceline.protocol import BoundedDelay, Eventual, Sequential
from paceline.protocol.jobs import Lease
from paceline.ps import FTRL, SGD
from paceline.tables.rules import Adam
from paceline.training.schedules import LEAST, SCHEDULES, ConstantRate, CosineRate, RatePlan, StepRate, parse_schedule
from paceline.training.worker.table_rates import WorkerRates


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25, LEAST]),
        ("cosine", [1, 0.853553, 0.5, 0.146447, LEAST]),
        ("inverse-sqrt", [1, 0.707107, 0.577350, 0.5, 0.447214]),
        ("exponential", [1, 0.5, 0.25, 0.125, 0.0625]),
        ("exponential:0.1", [1, 0.1, 0.01, LEAST, LEAST]),
        ("step", [1, 0.5, 0.25, 0.125, 0.0625]),
        ("step:2:0.1", [1, 1, 0.1, 0.1, 0.01]),
    ],
)
def test_factors_of_four_passes(text: str, shares: list[float]) -> None:
    plan = RatePlan(schedule=parse_schedule(text))
    assert [plan.share(passes, 4) for passes in range(5)] == pytest.approx(shares, abs=1e-6)
    assert parse_schedule(str(plan.schedule)) == plan.schedule
    assert plan.share(4.5, 4) == plan.share(4, 4)  # a resumed training may have fewer passes than it has completed


def test_every_schedule_has_a_case() -> None:
    assert set(SCHEDULES) == {"constant", "linear", "cosine", "inverse-sqrt", "exponential", "step"}


def test_warming_up() -> None:
    plan = RatePlan(schedule=CosineRate(), warmup=0.5)
    assert plan.share(0.0, 2) == LEAST
    assert plan.share(0.25, 2) == pytest.approx(0.5 * CosineRate().share(0.25, 2))
    assert plan.share(1.0, 2) == pytest.approx(0.5)
    assert not RatePlan(warmup=1).is_constant
    assert RatePlan().is_constant
    assert plan.settings() == {"schedule": "cosine", "warmup": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", "expected one of constant, linear"),
        ("cosine:1", "expected cosine without numbers"),
        ("step:x", r"expected step\[:passes\]\[:factor\]"),
        ("step:nan", r"expected step\[:passes\]\[:factor\]"),
        ("step:0", "expected passes above 0"),
        ("exponential:1.5", "expected factor above 0 and at most 1"),
    ],
)
def test_invalid_schedules_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_schedule(text)
    with pytest.raises(UsageError, match="--warmup -1: expected"):
        RatePlan(warmup=-1)


def test_rules_with_a_learning_rate_support_schedules() -> None:
    plan = RatePlan(schedule=StepRate())
    for rule in (SGD(lr=0.2), Adam(lr=0.2)):
        plan.check(rule)
        changed = plan.rule(rule, 0.5)
        assert changed.lr == pytest.approx(0.1)  # type: ignore[attr-defined]
        assert type(changed) is type(rule)
    with pytest.raises(UsageError, match="ftrl has no such rate"):
        plan.check(FTRL())
    RatePlan(schedule=ConstantRate()).check(FTRL())


def test_rates_constant_within_passes() -> None:
    """With sequential consistency, the rate is constant within a pass, so a warmup needs more than one pass."""
    plan = RatePlan(schedule=parse_schedule("linear"), warmup=2)
    assert [plan.share_of_pass(number, 4) for number in (1, 2, 3, 4)] == pytest.approx([0.5, 0.75, 0.5, 0.25])
    plan.check_consistency(Sequential())
    for consistency in (Eventual(), BoundedDelay(tau=0)):
        RatePlan(warmup=0.5).check_consistency(consistency)
    for warmup in (0.5, 1.0):
        with pytest.raises(UsageError, match="Pass more than 1, or another --consistency"):
            RatePlan(warmup=warmup).check_consistency(Sequential())
    RatePlan(schedule=parse_schedule("linear")).check_consistency(Sequential())


def test_progress_of_a_lease(tmp_path: Path) -> None:
    """The progress counts the shards of a pass: here, the only shard of the small file is a quarter of a pass."""
    files = [tmp_path / "a.libsvm", tmp_path / "b.libsvm"]
    files[0].write_text("1 3:1 5:1\n" * 10)
    files[1].write_text("0 4:1 5:1\n" * 30)
    with open_dataset(files, shard_bytes=50) as dataset:
        leases = [
            Lease(lease=1, epoch=2, file=file, shard=shard, num_shards=num_shards)
            for file, shard, num_shards in ((0, 0, 1), (0, 1, 2), (1, 0, 6), (1, 5, 6), (1, 1, 0), (1, 99, 0))
        ]
        progress = WorkerRates(None, dataset, 40)  # type: ignore[arg-type]
        found = [progress.passes(lease) for lease in leases]
        read = [progress.passes(leases[0], number) for number in (0, 5, 10, 11)]
        unknown = WorkerRates(None, dataset, 0)  # type: ignore[arg-type]
        assert unknown.passes(leases[0], 9) == found[0]
    assert read == pytest.approx([2.0, 2.125, 2.25, 2.25])
    assert found == pytest.approx([2.125, 2.1875, 2.3125, 2.9375, 2.25 + 0.75 * 1.5 / 24, 3.0])

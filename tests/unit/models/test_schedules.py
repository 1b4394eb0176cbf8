"""Learning-rate schedules: their shares, how they are written, and which update rules take them."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.models.schedules import LEAST, SCHEDULES, ConstantRate, CosineRate, RatePlan, StepRate, parse_schedule
from paceline.ps import FTRL, SGD
from paceline.tables.rules import Adam


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
def test_shares_of_four_passes(text: str, shares: list[float]) -> None:
    plan = RatePlan(schedule=parse_schedule(text))
    assert [plan.share(passes, 4) for passes in range(5)] == pytest.approx(shares, abs=1e-6)
    assert parse_schedule(str(plan.schedule)) == plan.schedule
    assert plan.share(4.5, 4) == plan.share(4, 4)  # a resumed training may have fewer passes than are done


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
    ("text", "said"),
    [
        ("cosin", "expected one of constant, linear"),
        ("cosine:1", "expected cosine, with numbers"),
        ("step:x", r"expected step\[:passes\]\[:factor\], with numbers"),
        ("step:nan", "with numbers"),
        ("step:0", "expected passes above 0"),
        ("exponential:1.5", "expected factor above 0 and at most 1"),
    ],
)
def test_no_schedule(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_schedule(text)
    with pytest.raises(UsageError, match="--warmup -1: expected"):
        RatePlan(warmup=-1)


def test_which_rules_take_one() -> None:
    plan = RatePlan(schedule=StepRate())
    for rule in (SGD(lr=0.2), Adam(lr=0.2)):
        plan.check(rule)
        changed = plan.rule(rule, 0.5)
        assert changed.lr == pytest.approx(0.1)  # type: ignore[attr-defined]
        assert type(changed) is type(rule)
    with pytest.raises(UsageError, match="ftrl has none"):
        plan.check(FTRL())
    RatePlan(schedule=ConstantRate()).check(FTRL())

"""The plan of a training without options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import DataError, UsageError
from paceline.models.registry import make_model
from paceline.models.update import make_update
from paceline.ps import FTRL, SGD
from paceline.training.driver import train_locally
from paceline.training.options import PassOptions, TrainOptions
from paceline.training.planning import plan_training
from paceline.training.tuning.trial import HeldOutLosses

pytestmark = pytest.mark.usefixtures("warm_clusters")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    values = rng.normal(50, 20, (3000, 4))
    labels = rng.random(3000) < 1 / (1 + np.exp(-(values - 50) @ [0.1, -0.05, 0.02, 0] + 1))
    file = tmp_path / "x.svm"
    rows = (" ".join(f"{k}:{v:.4f}" for k, v in enumerate(row)) for row in values)
    file.write_text("".join(f"{int(label)} {row}\n" for label, row in zip(labels, rows, strict=True)))
    return file


def test_all_settings_are_chosen_on_the_data(data: Path) -> None:
    plan = plan_training(TrainOptions(data=[data]))
    assert isinstance(plan.update, FTRL)
    of_standardised = [0.35 / 4**0.5, 0.7 / 4**0.5]
    assert any(plan.update.alpha == pytest.approx(alpha, rel=0.01) for alpha in of_standardised)
    assert plan.epochs > 1
    assert plan.batch_size == 32
    assert plan.scaling is not None
    assert plan.scaling.means == pytest.approx(50, abs=2)
    assert plan.shards_at_once == 1
    assert plan.chosen_on == 3000
    rule = f"alpha {plan.update.alpha:.3g}, L1 1" + (f", L2 {plan.update.l2:g}" if plan.update.l2 else "")
    assert plan.sentence() == f"{plan.epochs} passes, minibatches of 32, {rule} (chosen on 3,000 examples)"
    assert plan.settings()["kind"] == "FTRL"
    assert plan_training(TrainOptions(data=[data])).settings() == plan.settings()


def test_given_settings_are_used(data: Path) -> None:
    plan = plan_training(TrainOptions(data=[data], epochs=3, batch_size=7, update=FTRL(alpha=0.01, l1=2.0)))
    assert (plan.epochs, plan.batch_size, plan.update) == (3, 7, FTRL(alpha=0.01, l1=2.0))
    other = plan_training(TrainOptions(data=[data], update=SGD(lr=0.1)))
    assert other.update == SGD(lr=0.1)
    assert 1 <= other.epochs <= 64


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "epochs"), [("lr", None), ("lr", 3), ("poisson", 3), ("fm", 3)])
def test_tune_keeps_the_default_if_no_other_setting_is_better(
    data: Path, name: str, epochs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search also evaluates the default on the same held-out examples."""
    default = plan_training(TrainOptions(data=[data], model=make_model(name), epochs=epochs))
    monkeypatch.setattr(HeldOutLosses, "is_below", lambda self, other, errors=1.0: False)
    unchanged = plan_training(TrainOptions(data=[data], model=make_model(name), epochs=epochs))
    wide = plan_training(TrainOptions(data=[data], model=make_model(name), epochs=epochs, adapt="widely"))
    assert wide.settings() == unchanged.settings()
    if epochs is not None and name != "fm":
        assert wide.settings() == default.settings()


@pytest.mark.thorough
def test_tuning_tries_missing_settings(data: Path) -> None:
    wide = TrainOptions(data=[data], adapt="widely")
    found = plan_training(wide).update.alpha  # type: ignore[attr-defined]
    assert any(found == pytest.approx(alpha, rel=0.01) for alpha in (0.1, 0.175, 0.35))
    given = TrainOptions(data=[data], adapt="widely", update=lambda lr, l1, l2: make_update(lr=lr, l1=0.3, l2=l2))
    assert plan_training(given).update.l1 == 0.3  # type: ignore[attr-defined]


def test_without_a_sample_settings_do_not_depend_on_the_data(data: Path) -> None:
    plan = plan_training(TrainOptions(data=[data], adapt="no"))
    assert (plan.epochs, plan.batch_size, plan.update) == (4, 256, FTRL(alpha=0.05, l1=1.0))
    assert plan.scaling is None
    assert plan.model == make_model()
    assert plan.chosen_on == 0


def test_data_sorted_by_label_is_mixed(data: Path) -> None:
    data.write_text("".join(sorted(data.read_text().splitlines(keepends=True))))
    plan = plan_training(TrainOptions(data=[data]))
    assert plan.shards_at_once > 1
    assert "labels come in runs" in plan.sentence()


def test_invalid_numbers_and_empty_data_are_rejected(data: Path) -> None:
    with pytest.raises(UsageError, match="epochs=0: expected a positive whole number"):
        plan_training(TrainOptions(data=[data], epochs=0))
    data.write_text("\n")
    with pytest.raises(DataError):
        plan_training(TrainOptions(data=[data], format="libsvm"))


def test_continuing_uses_the_former_rule_except_for_given_settings(data: Path, tmp_path: Path) -> None:
    train_locally(TrainOptions(data=[data], epochs=1, update=FTRL(alpha=0.2, l1=0.5, l2=0.1), save=tmp_path / "m"))
    further = TrainOptions(data=[data], init_from=tmp_path / "m")
    assert plan_training(further).update == FTRL(alpha=0.2, l1=0.5, l2=0.1)
    given = dataclasses.replace(further, update=lambda lr, l1, l2: make_update(lr=0.7, l1=l1, l2=l2))
    assert plan_training(given).update == FTRL(alpha=0.7, l1=0.5, l2=0.1)
    assert plan_training(dataclasses.replace(further, update=FTRL(alpha=3.0))).update == FTRL(alpha=3.0)


def test_values_may_stay_unscaled(data: Path) -> None:
    assert plan_training(TrainOptions(data=[data], numeric_scale="none")).scaling is None


def test_a_sorted_file_keeps_the_order_on_request(data: Path) -> None:
    data.write_text("\n".join(sorted(data.read_text().splitlines())) + "\n")
    assert plan_training(TrainOptions(data=[data])).shards_at_once > 1
    plan = plan_training(TrainOptions(data=[data], passes=PassOptions(order="file")))
    assert (plan.shards_at_once, plan.order) == (1, "file")

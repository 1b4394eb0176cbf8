"""Features that do not occur for some passes are dropped, by all servers of a chain and in further trainings."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.errors import UsageError
from paceline.models.fm import SparseFactorizationMachine
from paceline.models.metrics import ClickEvaluation
from paceline.protocol import Sequential
from paceline.ps import read_model
from paceline.training.driver import train_locally
from paceline.training.options import PassOptions, TrainOptions

pytestmark = pytest.mark.usefixtures("warm_clusters")


def write(path: Path, features: range) -> Path:
    lines = [f"{number % 2} {feature}:1 {feature + 1}:1\n" for number, feature in enumerate(features)]
    path.write_text("".join(lines * 20))
    return path


@pytest.mark.thorough
def test_unseen_rows_are_removed_from_the_replica_too() -> None:
    keys = np.arange(5000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    grads = np.ones((len(keys), 1), np.float32)
    with paceline.local_cluster(servers=2, workers=1, replicas=1, consistency=Sequential()) as cluster:
        client = cluster.connect(timeout_s=60.0)
        table = client.sparse_table("t", dim=1, update=paceline.SGD(lr=1.0))
        assert table.erase_unseen(1) == 0
        table.begin_pass(1)
        table.push(keys, grads, tick=True).wait()
        table.begin_pass(2)
        table.push(keys[:2000], grads[:2000], tick=True).wait()
        table.pull(keys[:1])
        assert table.erase_unseen(2) == 0
        os.kill(cluster.pids("server")[0], signal.SIGKILL)  # the replica has recorded the same passes
        assert table.erase_unseen(1) == 3000
        np.testing.assert_array_equal(table.pull(keys).ravel(), [-2.0] * 2000 + [0.0] * 3000)
        assert len(table) == 2000


def test_further_training_of_a_model_erases_old_rows(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1.svm", range(200)), write(tmp_path / "2.svm", range(150, 260))
    common: dict[str, Any] = {"adapt": "no", "epochs": 1}
    before = train_locally(TrainOptions(data=[first], save=tmp_path / "m", **common), consistency=Sequential())
    assert before.num_features == 201
    kept = train_locally(TrainOptions(data=[second], init_from=tmp_path / "m", **common), consistency=Sequential())
    assert kept.num_features == 261
    passes = PassOptions(expire_after=1)
    after = train_locally(
        TrainOptions(data=[second], init_from=tmp_path / "m", passes=passes, **common), consistency=Sequential()
    )
    assert after.num_features == 111
    with pytest.raises(UsageError, match="--expire-after 63: expected 1 to 62 passes"):
        PassOptions(expire_after=63)


def write_pairs(path: Path, examples: int, strangers: int) -> Path:
    """Write examples whose label depends on a pair of features, and then examples with features that occur once."""
    random = np.random.default_rng(examples)
    lines = [
        f"{(a + b) % 2} {a}:1 {b}:1\n"
        for a, b in zip(*random.integers([[0], [10]], [[10], [20]], (2, examples)), strict=True)
    ]
    path.write_text("".join(lines + [f"{number % 2} {1000 + number}:1\n" for number in range(strangers)]))
    return path


def test_factors_and_counts_are_dropped_together_with_the_feature(tmp_path: Path) -> None:
    first, second = write_pairs(tmp_path / "1.svm", 3000, 100), write_pairs(tmp_path / "2.svm", 1000, 0)
    model = SparseFactorizationMachine(factor_min_count=50, factor_lr=0.3, factor_l2=0.0)
    common: dict[str, Any] = {"model": model, "adapt": "no", "evaluation": [second]}
    train_locally(TrainOptions(data=[first], epochs=2, save=tmp_path / "m", **common), consistency=Sequential())
    passes = PassOptions(expire_after=1)
    options = TrainOptions(
        data=[second], epochs=1, init_from=tmp_path / "m", save=tmp_path / "n", passes=passes, **common
    )
    after = train_locally(options, consistency=Sequential())
    assert after.num_features == 20
    assert isinstance(after.evaluation, ClickEvaluation)
    assert after.evaluation.auc > 0.95
    kept = read_model(tmp_path / "n")
    rows = {
        name: sum(len(keys) for keys, _ in kept.records(kept.table(name))) for name in ("fm", "fm factors", "fm counts")
    }
    assert rows == {"fm": 21, "fm factors": 20, "fm counts": 20}

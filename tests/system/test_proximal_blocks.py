"""``paceline train --solver proximal-blocks``: it finds the optimum on every cluster, and prints its progress."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import paceline as package
from paceline.errors import PeerError
from paceline.launch.local import LocalCluster
from paceline.models.proximal.rules import ProximalBlocks
from paceline.protocol import Sequential
from paceline.ps.messages import ClusterSettings
from paceline.training.driver import train_locally
from paceline.training.options import PassOptions, TrainOptions
from paceline.training.planning import plan_training
from paceline.training.train import Training

from .running import Commands

pytestmark = pytest.mark.usefixtures("warm_clusters")

Array = npt.NDArray[Any]
NUM_ROWS, NUM_COLUMNS = 600, 40


def write_examples(file: Path, *, separable: bool = False) -> tuple[Array, Array]:
    """Write each row twice, with columns whose scales differ by 10^6 and a zero column; return matrix and labels."""
    random = np.random.default_rng(5)
    matrix = random.normal(0, 1, (NUM_ROWS // 2, NUM_COLUMNS)) * (random.random((NUM_ROWS // 2, NUM_COLUMNS)) < 0.2)
    truth = random.normal(0, 1, NUM_COLUMNS) * (np.arange(NUM_COLUMNS) < 15)
    truth[7] = 0
    margins = matrix @ truth * 2 - 0.5
    labels = (margins > 0) if separable else (random.random(len(margins)) < 1 / (1 + np.exp(-margins)))
    matrix = (matrix * np.logspace(-3, 3, NUM_COLUMNS)).astype(np.float32).astype(np.float64)
    matrix[:, 7] = 0
    matrix, labels = np.repeat(matrix, 2, axis=0), np.repeat(labels, 2)
    with file.open("w") as out:
        for row, label in zip(matrix, labels, strict=True):
            pairs = " ".join(f"{j + 1}:{row[j]:.9g}" for j in range(NUM_COLUMNS) if row[j] or j == 7)
            out.write(f"{int(label)} {pairs}\n")
    return matrix, labels.astype(np.float64)


def best_objective(matrix: Array, labels: Array, l1: float, l2: float) -> float:
    """Return the least objective, found by cyclic coordinate descent with exact second derivatives and backtracking."""
    matrix = np.column_stack([matrix, np.ones(len(matrix))])
    weights, signs = np.zeros(matrix.shape[1]), 2 * labels - 1
    l1s, l2s = (np.append(np.full(matrix.shape[1] - 1, penalty), 0.0) for penalty in (l1, l2))

    def objective(margins: Array, weights: Array) -> float:
        penalty = (l1s * np.abs(weights) + l2s * weights * weights / 2).sum()
        return float(np.logaddexp(0, -signs * margins).sum() + penalty)

    margins, best = np.zeros(len(matrix)), objective(np.zeros(len(matrix)), weights)
    for _ in range(400):
        before = best
        for j in range(matrix.shape[1]):
            column = matrix[:, j]
            p = 1 / (1 + np.exp(-margins))
            slope = column @ (p - labels) + l2s[j] * weights[j]
            bound = (column * column * p * (1 - p)).sum() + l2s[j] + 1e-12
            target = weights[j] - slope / bound
            step = np.sign(target) * max(abs(target) - l1s[j] / bound, 0) - weights[j]
            for _ in range(30):
                changed = weights.copy()
                changed[j] += step
                found = objective(margins + step * column, changed)
                if found <= best:
                    weights, margins, best = changed, margins + step * column, found
                    break
                step /= 2
        if before - best < 1e-10 * best:
            break
    return best


@pytest.mark.parametrize(
    ("servers", "workers", "max_delay", "l2"),
    [
        pytest.param(1, 1, 0, 0.0, id="alone", marks=pytest.mark.thorough),
        pytest.param(2, 3, 2, 0.5, id="together"),
    ],
)
def test_the_optimum_is_found(tmp_path: Path, servers: int, workers: int, max_delay: int, l2: float) -> None:
    matrix, labels = write_examples(tmp_path / "rows.svm")
    blocks = ProximalBlocks(l1=1.5, l2=l2, max_delay=max_delay, tolerance=1e-8)
    options = TrainOptions(
        data=[tmp_path / "rows.svm"],
        epochs=1,
        passes=PassOptions(blocks=blocks),
        numeric_scale="none",
        save=tmp_path / "model",
        evaluation=[tmp_path / "rows.svm"],
    )
    result = train_locally(options, servers=servers, workers=workers, consistency=Sequential())
    passes, expected = result.block_passes, best_objective(matrix, labels, 1.5, l2)
    assert passes[-1].ended == "converged"
    assert passes[-1].objective == pytest.approx(expected, rel=2e-6)
    assert all(after.objective <= before.objective * (1 + 1e-6) for before, after in itertools.pairwise(passes))
    assert passes[0].active == passes[-1].active == 1.0
    assert min(report.active for report in passes) < 0.9
    assert passes[-1].features == NUM_COLUMNS - 1  # one column has no values
    # The saved model is an ordinary model; its predictions have the reported loss.
    model = package.load(tmp_path / "model")
    weights = model.weights()
    assert np.count_nonzero(weights.values) == passes[-1].nonzero == result.num_features
    assert result.evaluation is not None
    assert result.evaluation.as_json()["log_loss"] == pytest.approx(passes[-1].loss / NUM_ROWS, rel=1e-4)


@pytest.mark.thorough
def test_printed_progress(paceline: Commands, tmp_path: Path) -> None:
    write_examples(tmp_path / "rows.svm", separable=True)
    common = ["train", "rows.svm", "--solver", "proximal-blocks", "--workers", "1", "--numeric-scale", "none"]
    found = paceline.succeed(*common, "--epochs", "3", "--json", "--plot", "passes.html", "--filters", "key-caching")
    passes = found.json["block_passes"]
    assert [report["number"] for report in passes] == [1, 2, 3]
    assert passes[-1]["ended"] == "passes"
    assert "Pass a larger --epochs" in found.err
    assert "pass 2: objective" in found.err
    assert "of the columns active" in found.err
    page = (tmp_path / "passes.html").read_text()
    assert '"title":"Active columns","x_label":"pass","series":[{"name":"Active columns","x":[1,2,3]' in page
    settings = {"solver": "proximal-blocks", "l1": 1.0, "l2": 0.0, "max_delay": 0, "max_passes": 3}
    assert settings.items() <= found.json["settings"].items()
    assert "alpha" not in found.json["settings"]
    # The remaining negatives have larger weights, so the mean loss estimates the loss of all rows.
    kept = paceline.succeed(*common, "--l1", "1000", "--keep-negatives", "0.2", "--json")
    assert kept.json["examples"] == found.json["examples"]
    assert kept.json["train_log_loss"] < 0.75
    separated = paceline.succeed(*common, "--l1", "0", "--max-delay", "100")
    assert "a plane separates the labels" in separated.err
    assert "labels separated after" in separated.out
    (tmp_path / "one.svm").write_text("1 1:1 2:1\n1 2:1\n")
    one = paceline.succeed("train", "one.svm", *common[2:4], "--workers", "2", "--save", "one")
    assert "all 2 labels are 1" in one.err


def test_a_training_continues_after_the_death_of_a_worker(tmp_path: Path) -> None:
    """The other workers read its examples again and find the same optimum. The death of all workers is an error."""
    matrix, labels = write_examples(tmp_path / "rows.svm")
    blocks = ProximalBlocks(l1=1.5, tolerance=1e-8)
    data = [tmp_path / "rows.svm"]
    options = TrainOptions(data=data, epochs=1, passes=PassOptions(blocks=blocks), numeric_scale="none")
    reports: list[str] = []
    with (
        LocalCluster.start(ClusterSettings(num_workers=2, consistency="sequential"), start_workers=True) as cluster,
        cluster.connect(observer=True) as client,
    ):
        cluster.wait_workers(client, 2)
        killed = threading.Event()

        def kill_one(text: str) -> None:
            if not killed.is_set():
                killed.set()
                os.kill(cluster.pids("worker")[0], signal.SIGKILL)

        def training() -> Training:
            plan = plan_training(options)
            return Training(
                options, plan, client, num_workers=2, processes=cluster, on_news=kill_one, warn=reports.append
            )

        result = training().run()
        assert result.block_passes[-1].objective == pytest.approx(best_objective(matrix, labels, 1.5, 0.0), rel=2e-6)
        assert any("workers read all data again" in line for line in reports)
        assert result.lost_workers == 1
        killed.clear()
        start = time.monotonic()
        with pytest.raises(PeerError, match="all workers have died"):
            training().run()
        assert time.monotonic() - start < 60

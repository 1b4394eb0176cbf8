"""The results of a training as text and as JSON: malformed lines, staleness, no NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path

from paceline.launch.supervisor import describe_status
from paceline.models.metrics import evaluate
from paceline.models.registry import make_model
from paceline.training.bad_data import BadData, describe_bad_lines
from paceline.training.driver import RunningLoss
from paceline.training.results import TrainResult, mean_loss, summarize_staleness


def test_malformed_lines_of_a_shard_read_by_two_workers_are_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"good\nbad\ngood\nworse\n")
    bad = [str(file), 5, None, "bad", "no label"]
    worse = [str(file), 14, None, "worse", "no label"]
    found = describe_bad_lines([([(0, 0, 2), (1, 0, 3)], [worse, bad]), ([(0, 0, 2)], [bad])])
    assert found.count == 5
    assert found.first == [f"{file}, line 2: no label: 'bad'", f"{file}, line 4: no label: 'worse'"]
    assert found.sentence().startswith("5 malformed lines were skipped (--strict stops at the first):\n  ")
    assert BadData(1, []).sentence().startswith("1 malformed line was skipped")


def test_rows_of_a_table_are_named_by_number() -> None:
    assert describe_bad_lines([([(0, 0, 1)], [["t.csv", None, 7, "x", "no number"]])]).first == [
        "t.csv, row 7: no number: 'x'"
    ]


def test_no_nan_in_json() -> None:
    result = TrainResult(
        model=make_model(),
        settings={},
        examples=1,
        seconds=1.0,
        examples_per_s=1.0,
        train_loss=math.inf,
        num_features=1,
        evaluation=evaluate([0.0, 0.0], [0.5, 0.25]),
        staleness=summarize_staleness([[3, 0, 1], [1, 0, 0]], 7),
        bad_lines=BadData(0, []),
        lost_workers=0,
        bytes=0,
    )
    report = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert report["auc"] is None
    assert report["train_log_loss"] is None
    assert report["staleness"] == {"mean": 0.4, "max": 2, "histogram": [4, 0, 1], "dropped": 7}


def test_staleness_without_delayed_gradients() -> None:
    assert summarize_staleness([[0, 0, 0]]) == {"mean": 0.0, "max": 0, "histogram": [0], "dropped": 0}


def test_the_running_loss_covers_the_last_examples() -> None:
    running = RunningLoss()
    assert running.add(0, 0.0, 0.0) is None
    assert running.add(10_000, 14_000.0, 20_000.0) == 0.7  # each example has weight 2
    assert running.add(60_000, 54_000.0, 120_000.0) == 0.4  # the loss of the last 50,000 examples
    assert running.add(120_000, 90_000.0, 240_000.0) == 0.3
    assert running.add(119_000, 89_400.0, 238_000.0) is None  # a worker's death: the average starts again
    assert running.add(129_000, 95_400.0, 258_000.0) == 0.3


def test_the_mean_loss_is_weighted() -> None:
    assert mean_loss({"examples": 100.0, "weight": 4000.0, "loss": 2000.0}) == 0.5
    assert mean_loss({}) == 0.0


def test_description_of_an_exit_status() -> None:
    assert describe_status(3) == "ended with status 3"
    assert describe_status(-9) == "was killed by SIGKILL"
    assert describe_status(-99) == "was killed by signal 99"

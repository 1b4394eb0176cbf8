"""The tables and the page of ``paceline compare``, from planted measurements."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import UsageError
from paceline.observe.plots import page_bytes, write_page
from paceline.planning.comparing import StepComparison, comparison_as_json, page_of, show_comparisons
from paceline.planning.predictions import StepPrediction, parse_candidate
from paceline.strategies.profile import StepRecord, latest_loss

STEPS = 40


def compared(label: str, step_s: float, slope: float, **measured: float) -> StepComparison:
    """Return two ranks with 8 examples per step, whose loss decreases by `slope` in each step from 1.0 on."""
    prediction = StepPrediction(
        candidate=parse_candidate(label), step_s=2 * step_s, examples_per_s=1.0, memory_bytes=0.0, parts={}
    )
    records = [
        StepRecord(
            rank=rank,
            batch_size=8,
            steps_s=(step_s,) * STEPS,
            ends_s=tuple(step_s * (number + 1) for number in range(STEPS)),
            losses=tuple(1.0 - slope * number for number in range(STEPS)),
            **measured,
        )
        for rank in range(2)
    ]
    return StepComparison(prediction=prediction, records=tuple(records))


FAST = compared("parameter-server:eventual", 0.01, 0.01, step_bytes=2e6, staleness=0.75)
SLOW = compared("all-reduce", 0.02, 0.02, step_bytes=1e6)


def test_losses_at_equal_times_and_examples() -> None:
    assert SLOW.loss_at(0.4) == pytest.approx(1 - 0.02 * 18.5)  # the mean of steps 19 and 20
    assert SLOW.loss_at(examples=160) == pytest.approx(1 - 0.02 * 9)  # step 10
    assert FAST.loss_at(examples=160) == pytest.approx(1 - 0.01 * 9)
    assert math.isnan(SLOW.loss_at(0.001))


def test_ranks_of_a_pipeline_read_the_same_batch() -> None:
    pipeline = compared("pipeline", 0.01, 0.01)
    assert [pipeline.batch_size, pipeline.examples_per_s] == pytest.approx([8, 800])
    assert [FAST.batch_size, FAST.examples_per_s] == pytest.approx([16, 1600])


def test_the_target_is_reached_by_the_latest_losses() -> None:
    """The mean of losses 7 to 16 is 0.79, and the mean of losses 6 to 15 is 0.81."""
    seconds, examples = SLOW.reached(0.801) or (0.0, 0)
    assert seconds == pytest.approx(0.02 * 16)
    assert examples == 16 * 16
    assert FAST.reached(0.5) is None
    assert comparison_as_json(FAST, 0.5)["reached"] is None
    assert latest_loss([0.0] * 9 + [math.nan]) != latest_loss([0.0] * 9 + [math.nan])


def test_ranks_may_have_different_numbers_of_steps_and_huge_losses() -> None:
    first, second = SLOW.records
    short = replace(first, steps_s=first.steps_s[:3], ends_s=first.ends_s[:3], losses=(1e300, -1e300, None))
    comparison = replace(SLOW, records=(short, second))
    assert comparison.reached(0.801) == SLOW.reached(0.801)
    show_comparisons(Console(file=io.StringIO()), [comparison], 0.801)


def test_the_tables_fit_into_80_columns() -> None:
    output = io.StringIO()
    show_comparisons(Console(file=output, width=80), [FAST, SLOW], 0.801)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in output.getvalue()
    measured, losses = (line.split() for line in lines if line.startswith("parameter-server:eventual"))
    assert measured[1:] == ["20.00", "10.00", "+100%", "1,600", "0.75", "2.00", "MB"]
    assert losses[-3:-1] == ["0.26", "416"]


def test_the_page_has_all_curves(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page("--report", page, page_bytes("<b>", "2 ranks", page_of([FAST, SLOW], None)))
    found = re.search(r"const GIVEN = (\{.*\});", page.read_text())
    assert found is not None
    state = json.loads(found[1])
    sections = {part["title"]: part for part in state["sections"]}
    assert state["title"] == "<b>"
    rows = sections["Prediction and measurement"]["rows"]
    assert [row[-2:] for row in rows] == [["0.75", "2.00 MB"], ["", "1.00 MB"]]
    for title, last in (("Loss against time", (0.4, 0.8)), ("Loss against examples", (640, 640))):
        series = sections[title]["series"]
        assert [each["name"] for each in series] == ["parameter-server:eventual", "all-reduce"]
        assert tuple(each["x"][-1] for each in series) == pytest.approx(last)


def test_a_full_disk() -> None:
    with pytest.raises(UsageError, match=r"--report /dev/full: No space left on device\. Choose another path"):
        write_page("--report", Path("/dev/full"), page_bytes("", "", page_of([FAST], None)))

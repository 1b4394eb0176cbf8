"""The table of metrics, and the formats that are made from it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

import paceline
from paceline.observe.metrics import METRICS, PHASES, MetricValues, as_json, bucket_counts, exposition, is_valid

SOURCE = Path(paceline.__file__).parent
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def values() -> MetricValues:
    values = MetricValues()
    values.add("paceline_examples_total", 32, "0")
    values.add("paceline_examples_total", 32, "0")
    values.set("paceline_rank_memory_bytes", 1e9, "1")
    for seconds in (0.00005, 0.0001, 0.003, 99.0):
        values.observe("paceline_step_seconds", seconds, "0")
    values.set("paceline_staleness_pushes", [math.nan, *bucket_counts([5, 0, 0, 2], (0.0, 1.0, 2.0, 4.0))], "0", "w")
    values.samples["paceline_staleness_pushes"]["0", "w"] += [0.0] * 5  # type: ignore[operator]
    return values


def test_names_follow_the_rules_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"paceline_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert bool(metric.bounds) == (metric.kind == "histogram"), name
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert metric.help.endswith("."), name
        assert not {"le", "quantile"} & set(metric.labels)


def test_the_docs_have_every_metric() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(paceline_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    expected = [
        (metric.name, metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS.values()
    ]
    assert rows == expected


def test_every_metric_has_a_source() -> None:
    """Every name in the source code is a metric, and every metric is set by code that does not only read it."""
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py") if path.name != "metrics.py"}
    assert len(texts) > 500
    named = {path: set(re.findall(r'"(paceline_[a-z_]+)"', text)) for path, text in texts.items()}
    read = named.pop(SOURCE / "observe" / "history.py")
    assert 10 < len(read) < len(METRICS)
    joined = {f"paceline_training_{name}" for name in ("loss", "done_ratio")}  # the driver joins these names
    assert joined.union(*named.values()) == set(METRICS) >= read


def test_exposition_in_both_formats(values: MetricValues) -> None:
    for accept, parse in (("", parse_prometheus), ("application/openmetrics-text; version=1.0.0", parse_openmetrics)):
        content, content_type = exposition(values.samples, accept)
        assert ("openmetrics" in content_type) == bool(accept)
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in parse(content.decode())
            for sample in family.samples
        }
        assert samples["paceline_examples_total", ("rank", "0")] == 64
        assert samples["paceline_rank_memory_bytes", ("rank", "1")] == 1e9
        step = ("rank", "0")
        assert samples["paceline_step_seconds_bucket", ("le", "0.0001"), step] == 2
        assert samples["paceline_step_seconds_bucket", ("le", "10.0"), step] == 3
        assert samples["paceline_step_seconds_bucket", ("le", "+Inf"), step] == 4
        assert samples["paceline_step_seconds_sum", step] == pytest.approx(99.00315)
        # The sum of the last histogram is unknown.
        assert samples["paceline_staleness_pushes_bucket", ("le", "2.0"), ("server", "0"), ("table", "w")] == 5
        assert ("paceline_staleness_pushes_sum", ("server", "0"), ("table", "w")) not in samples


def test_json(values: MetricValues) -> None:
    found = as_json(values.samples)
    assert found["paceline_examples_total"] == [{"rank": "0", "value": 64}]
    [step] = found["paceline_step_seconds"]
    assert (step["rank"], step["count"], step["buckets"]["0.0001"], step["buckets"]["+Inf"]) == ("0", 4, 2, 4)
    [staleness] = found["paceline_staleness_pushes"]
    assert (staleness["sum"], staleness["count"], staleness["buckets"]["4.0"]) == (None, 7, 7)


def test_samples_of_another_process_are_checked() -> None:
    assert is_valid("paceline_step_phase_seconds_total", (PHASES[0],), 1.0, without_rank=True)
    assert not is_valid("paceline_step_phase_seconds_total", ("0", PHASES[0]), 1.0, without_rank=True)
    assert not is_valid("paceline_step_seconds", (), 1.0, without_rank=True)
    assert not is_valid("paceline_step_seconds", (), [1.0, 2.0], without_rank=True)
    assert not is_valid("paceline_examples_total", (), [1.0], without_rank=True)
    assert not is_valid("other", (), 1.0, without_rank=True)

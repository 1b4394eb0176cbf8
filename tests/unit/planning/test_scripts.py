"""The measurements of several processes."""

from __future__ import annotations

import pytest

from paceline.planning.scripts import devices_of, measured_step_s
from paceline.strategies.profile import StepRecord, warm_up_steps


@pytest.mark.parametrize(
    ("given", "copies", "devices"),
    [("0,1,3", 2, ["0", "1"]), ("0,1", 3, [None] * 3), ("", 2, [None] * 2), ("0,1", 1, [None])],
)
def test_each_copy_has_its_device(
    monkeypatch: pytest.MonkeyPatch, given: str, copies: int, devices: list[str | None]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert devices_of(copies) == devices


def test_steps_of_several_ranks() -> None:
    records = [
        StepRecord(rank=rank, batch_size=8, steps_s=steps_s, ends_s=(), losses=())
        for rank, steps_s in enumerate([(1.0, 1.0, 9.0), (2.0, 2.0, 2.0)])
    ]
    assert measured_step_s(records) == 1.5


def test_few_steps_warm_up() -> None:
    """With a target loss there are up to 10,000 steps. The loss must not be reached in the steps that do not count."""
    assert [warm_up_steps(count) for count in (3, 60, 10_000)] == [3, 12, 12]

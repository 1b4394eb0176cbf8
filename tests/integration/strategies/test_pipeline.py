"""``Pipeline`` with real processes: two ranks, which run all checks one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.mark.timeout(420)
def test_all_checks_and_a_checkpoint_on_one_device(tmp_path: Path) -> None:
    """One test runs all checks, so that each pytest worker does not start its own ranks."""
    from tests.integration.strategies import pipeline_checks as checks
    from tests.integration.strategies.rank_checks import run_checks

    from paceline.torch import strategy

    environment = {"PIPELINE_CHECKPOINT": str(tmp_path / "checkpoint")}
    result = run_checks("pipeline_checks", 2, tmp_path, environment=environment, patience_s=380)
    assert not result.failures()
    assert result.codes == [0] * 2, result.errors

    batches = checks.batches_of([8] * 4)
    expected = checks.plain_loop(*checks.model_and_optimizer("adam"), batches)
    with strategy("one-device", device="cpu") as one:
        model, optimizer = one.prepare(*checks.model_and_optimizer("adam"))
        assert one.load(tmp_path / "checkpoint") == {"epoch": 2}
        assert checks.plain_loop(model, optimizer, batches[2:]) == pytest.approx(expected[2:], abs=1e-5)


@pytest.mark.thorough
@pytest.mark.timeout(420)
def test_thorough_checks(tmp_path: Path) -> None:
    from tests.integration.strategies.rank_checks import run_checks

    result = run_checks("pipeline_checks", 2, tmp_path, checks="thorough_", patience_s=380)
    assert not result.failures()
    assert result.codes == [0] * 2, result.errors

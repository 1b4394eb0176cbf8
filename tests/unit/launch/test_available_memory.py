"""The available memory is limited by the control groups of the process."""

from __future__ import annotations

from pathlib import Path

import psutil

from paceline.environment import available_memory


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_the_smallest_free_amount_of_all_groups_is_returned(tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/jobs/mine\n")
    (groups / "jobs").mkdir(parents=True)
    assert available_memory(groups, own) > 1 << 20  # without control groups
    group(groups / "jobs" / "mine", "max", 100, 0)
    group(groups / "jobs", "5000", 3000, 500)
    assert available_memory(groups, own) == 2500
    group(groups / "jobs" / "mine", "2000", 1900, 0)
    assert available_memory(groups, own) == 100
    group(groups / "jobs" / "mine", "2000", 2100, 0)
    assert available_memory(groups, own) == 0
    assert available_memory(groups, tmp_path / "none") <= psutil.virtual_memory().total

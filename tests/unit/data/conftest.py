"""Small files for tests, and the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    default = Path(__file__).parents[3].parent / "shared" / "data"
    folder = Path(os.environ.get("PACELINE_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder}: set PACELINE_TEST_DATA to the folder with the real data")
    return folder

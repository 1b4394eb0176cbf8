"""Let copies of a program, which are measured at the same time, begin each step together, as the ranks of a run do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np

from paceline.strategies.profile import STARTED

_STEPS: Final = "steps"
_PATIENCE_S: Final = 30.0
_POLL_S: Final = 0.001
_NO_STEP: Final = np.iinfo(np.int64).max


class ProgramCopies:
    """The copies of a program. Each copy writes the number of its last step to a file in its own folder."""

    def __init__(self, directory: Path) -> None:
        """Wait until the copies in the neighbouring folders have reached their training loops, too."""
        np.zeros(1, np.int64).tofile(directory / _STEPS)
        (directory / STARTED).touch()
        folders = [*directory.parent.iterdir()]
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and not all((folder / STARTED).exists() for folder in folders):
            time.sleep(_POLL_S)
        self._own = np.memmap(directory / _STEPS, np.int64, "r+")
        self._all = [np.memmap(folder / _STEPS, np.int64, "r") for folder in folders if (folder / STARTED).exists()]

    def wait(self) -> None:
        """Wait until all copies have ended the same step. A copy that is 30 s late is not waited for again."""
        self._own[0] += 1
        deadline = time.monotonic() + _PATIENCE_S
        while any(steps[0] < self._own[0] for steps in self._all):
            if time.monotonic() > deadline:
                self._all = [steps for steps in self._all if steps[0] >= self._own[0]]
            time.sleep(0)  # another process may use the core

    def end(self) -> None:
        """End the measurements. The other copies do not wait for this one any more."""
        self._own[0] = _NO_STEP

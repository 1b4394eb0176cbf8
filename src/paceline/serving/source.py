"""Load the served model, and reload it when a newer one replaces it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from paceline.inference import LoadedModel, load
from paceline.models.stored import find_version

_logger = logging.getLogger("paceline.serving")


class ModelSource:
    """The newest model in a directory of a saved model, which a training may replace, or of snapshots."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Load the model. Raises ModelError without one."""
        self._directory = Path(directory)
        self.version = find_version(self._directory)
        self.model: LoadedModel = load(directory)
        self.reloads = 0
        self.failures = 0
        """Number of newer models that could not be loaded."""
        self._failed: str | None = None
        self._last_error: str | None = None

    def refresh(self) -> None:
        """Load a newer model, if any; the old model serves until then, and after a failure."""
        try:
            version = find_version(self._directory)
            if version in (self.version, self._failed):
                self._last_error = None
                return
            self._failed = version  # until it is loaded
            model = load(self._directory)
        except Exception as error:  # the model is being replaced or damaged, or memory is short
            if str(error) != self._last_error:  # log once while a directory is missing
                self.failures += 1
                self._last_error = str(error)
                _logger.warning("cannot load a newer model, so the old one is still served: %s", error)
            return
        self.model, self.version, self._failed, self._last_error = model, version, None, None
        self.reloads += 1
        _logger.info("serving a newer model: %r", model)

"""The model that is served: loaded, and loaded again when there is a newer one in its place."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from paceline.inference import LoadedModel, load
from paceline.models.stored import find_version

_logger = logging.getLogger("paceline.serving")


class ModelSource:
    """The newest model of a directory: of a saved model, which a training replaces, or of snapshots."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Load the model. Raises ModelError if there is none."""
        self._directory = Path(directory)
        self.version = find_version(self._directory)
        self.model: LoadedModel = load(directory)
        self.reloads = 0
        self.failures = 0
        """How often a newer model could not be loaded."""
        self._failed: str | None = None
        self._told: str | None = None

    def refresh(self) -> None:
        """Take a newer model, if there is one; the former serves until that is loaded, and if it cannot be."""
        try:
            version = find_version(self._directory)
            if version in (self.version, self._failed):
                self._told = None
                return
            self._failed = version  # until it has not
            model = load(self._directory)
        except Exception as error:  # a model is about to be replaced, or is damaged, or there is no memory for it
            if str(error) != self._told:  # once, as long as a directory is gone
                self.failures += 1
                self._told = str(error)
                _logger.warning("the former model is served on, for a newer one is not to be had: %s", error)
            return
        self.model, self.version, self._failed, self._told = model, version, None, None
        self.reloads += 1
        _logger.info("a newer model is served: %r", model)

"""Early stopping: the loss on a validation file after every pass, and the tables of the best pass.

A training ends when its last passes have not become better, and the model is that of its best pass (Prechelt, "Early
stopping, but when?", 1998: of the criteria there, the one that counts passes without progress).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.errors import ModelError
from paceline.launch.train.options import EarlyStopping
from paceline.launch.train.results import json_number
from paceline.models.metrics import Evaluation
from paceline.ps import (
    Client,
    SavedModel,
    SparseTable,
    read_model,
    read_records,
    save_tables,
    write_records,
)
from paceline.tables.spec import TableSpec

FOLDER: Final = "best-pass"
"""Of a directory of snapshots: where the tables of the best pass are kept."""


@dataclass(slots=True)
class PassLosses:
    """The validation loss after each pass, and what follows from them."""

    stopping: EarlyStopping
    best_pass: int = 0
    """From 1; 0 if there was none."""
    best_loss: float = math.inf
    last_pass: int = 0
    passes: list[dict[str, float | None]] = field(default_factory=list)
    """Number and metrics of each pass, fit for JSON."""

    def note(self, number: int, found: Evaluation) -> bool:
        """Note the metrics after a pass; return whether it is the best one so far."""
        self.last_pass = number
        self.passes.append({"pass": number, **found.as_json()})
        has_best = self.best_pass > 0 and not math.isnan(self.best_loss)
        is_best = not has_best or found.loss < self.best_loss - self.stopping.min_delta
        if is_best:
            self.best_pass, self.best_loss = number, found.loss
        return is_best

    @property
    def is_over(self) -> bool:
        """Whether there were as many passes without progress as there may be."""
        return self.last_pass - self.best_pass >= self.stopping.patience

    def line(self, found: Evaluation) -> str:
        """Return what the last pass came to, for people."""
        since = self.last_pass - self.best_pass
        place = "the best so far" if not since else f"{since} after the best"
        return f"pass {self.last_pass}: on the validation file {found.sentence()} ({place})"

    def summary(self, most: int) -> str:
        """Return why the training has ended, and with what, for people; there may be so many passes."""
        if self.last_pass < most:
            why = f"stopped after pass {self.last_pass} of at most {most}: no progress since pass {self.best_pass}"
        else:
            why = f"all {most} passes are done, the best was pass {self.best_pass}"
        return f"{why}, whose model it is" if self.best_pass < self.last_pass else why

    def as_json(self) -> dict[str, Any]:
        """Return what came of it."""
        return {"passes": self.passes, "best_pass": self.best_pass, "best_loss": json_number(self.best_loss)}

    def go_on(self, former: Mapping[str, Any] | None) -> None:
        """Take over the passes of a former run, as :meth:`as_json` returned them, if there was one."""
        if former is not None:
            self.passes = [dict(each) for each in former["passes"]]


class BestPass:
    """The tables of the best pass, kept as a saved model in a folder."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._folder = self._kept_in = folder

    def keep(self, losses: PassLosses) -> None:
        """Write the cluster's tables in place of what is kept."""
        self._kept_in = self._folder
        save_tables(self._client, self._folder, best_pass=losses.best_pass, best_loss=losses.best_loss)

    def find(self, losses: PassLosses, folder: Path) -> None:
        """Note which pass is kept in a folder, if one is: the best one of a training that is gone on with."""
        try:
            kept = read_model(folder).manifest.model
            losses.best_pass, losses.best_loss = int(kept["best_pass"]), float(kept["best_loss"])
        except (ModelError, KeyError, TypeError, ValueError):
            return  # none was kept: the next one is the best then
        self._kept_in = folder

    def restore(self) -> None:
        """Make the cluster's tables what is kept: no worker may push meanwhile."""
        kept = read_model(self._kept_in)
        for spec in self._client.tables():
            self._erase_later_rows(kept, spec)
            for keys, records in kept.records(kept.table(spec.name)):
                write_records(self._client, spec, keys, records)

    def _erase_later_rows(self, kept: SavedModel, spec: TableSpec) -> None:
        table = self._client.open_table(spec)
        assert isinstance(table, SparseTable)  # as all of a model's are
        there, known = (
            np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in records)])
            for records in (read_records(self._client, spec), kept.records(kept.table(spec.name)))
        )
        later = np.setdiff1d(there, known, assume_unique=True)
        if len(later):
            table.erase(later)

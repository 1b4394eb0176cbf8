"""Early stopping: the loss on a validation file after every pass, and the tables of the best pass.

A training ends when its last passes have not become better, and the model is that of its best pass (Prechelt, "Early
stopping, but when?", 1998: of the criteria there, the one that counts passes without progress).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.errors import ModelError
from paceline.models.metrics import Evaluation
from paceline.ps import (
    Client,
    SavedModel,
    SparseTable,
    UpdateRule,
    read_model,
    read_records,
    save_tables,
    to_fields,
    write_records,
)
from paceline.storage.model_directory import save_model
from paceline.tables.spec import TableSpec
from paceline.training.options import EarlyStopping
from paceline.training.results import json_number

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
    is_best: bool = False
    """Whether the last pass is the best one: not so if it is a pass that a former run has done better."""
    passes: list[dict[str, float | None]] = field(default_factory=list)
    """Number and metrics of each pass, fit for JSON."""

    def note(self, number: int, found: Evaluation) -> bool:
        """Note the metrics after a pass; return whether it is the best one so far."""
        self.last_pass = number
        self.passes.append({"pass": number, **found.as_json()})
        has_best = self.best_pass > 0 and not math.isnan(self.best_loss)
        self.is_best = not has_best or found.loss < self.best_loss - self.stopping.min_delta
        if self.is_best:
            self.best_pass, self.best_loss = number, found.loss
        return self.is_best

    @property
    def is_over(self) -> bool:
        """Whether there were as many passes without progress as there may be."""
        return self.last_pass - self.best_pass >= self.stopping.patience

    def line(self, found: Evaluation) -> str:
        """Return what the last pass came to, for people."""
        since = self.last_pass - self.best_pass
        if self.is_best:
            place = "the best so far"
        else:
            place = f"{since} after the best" if since > 0 else f"the former run's pass {self.best_pass} was better"
        return f"pass {self.last_pass}: on the validation file {found.sentence()} ({place})"

    def summary(self, most: int) -> str:
        """Return why the training has ended, and with what, for people; there may be so many passes."""
        if self.last_pass < most:
            why = f"stopped after pass {self.last_pass} of at most {most}: no progress since pass {self.best_pass}"
        else:
            why = f"all {most} passes are done, the best was pass {self.best_pass}"
        return why if self.is_best else f"{why}, whose model it is"

    def as_json(self) -> dict[str, Any]:
        """Return what came of it."""
        return {"passes": self.passes, "best_pass": self.best_pass, "best_loss": json_number(self.best_loss)}

    def go_on(self, former: Mapping[str, Any] | None) -> None:
        """Take over the passes of a former run, as :meth:`as_json` returned them, if there was one."""
        if former is not None:
            self.passes = [dict(each) for each in former["passes"]]


class BestPass:
    """The tables of the best pass of a training, kept as a saved model in a folder.

    `names` are those of the model's tables; `origin`, fit for JSON, is kept with them and says of which training they
    are, and which files have judged them.
    """

    def __init__(
        self, client: Client, folder: Path, losses: PassLosses, names: Sequence[str], origin: Mapping[str, Any]
    ) -> None:
        self._client = client
        self._folder = self._kept_in = folder
        self._names = names
        self._origin = dict(origin)
        self.losses = losses
        self.kept_pass = 0
        """Which pass is kept; 0 if none is."""

    @property
    def is_kept(self) -> bool:
        """Whether what is kept is the best pass: not so if there was no space for it."""
        return 0 < self.kept_pass == self.losses.best_pass

    def keep(self) -> None:
        """Write the cluster's tables in place of what is kept. Raises ModelError; then what was kept still is."""
        losses = self.losses
        best = {"best_pass": losses.best_pass, "best_loss": json_number(losses.best_loss)}
        save_tables(self._client, self._folder, self._names, **best, origin=self._origin)
        self._kept_in, self.kept_pass = self._folder, losses.best_pass

    def find(self, folder: Path) -> None:
        """Take over what is kept in a folder, if that is of this training: the best pass of a former run."""
        try:
            kept = read_model(folder).manifest.model
            if kept.get("origin") != self._origin:
                return  # another training has used the folder
            number, loss = int(kept["best_pass"]), float(kept["best_loss"])
        except (ModelError, KeyError, TypeError, ValueError):
            return  # none was kept: the next one is the best then
        self.losses.best_pass, self.losses.best_loss = number, loss
        self._kept_in, self.kept_pass = folder, number

    def restore(self) -> None:
        """Make the model's tables in the cluster what is kept: no worker may push meanwhile."""
        kept = read_model(self._kept_in)
        for spec in self._client.tables():
            if spec.name in self._names:
                self._erase_later_rows(kept, spec)
                for keys, records in kept.records(kept.table(spec.name)):
                    write_records(self._client, spec, keys, records)

    def save(self, directory: str | Path, rules: Mapping[str, UpdateRule], **model: Any) -> None:
        """Save what is kept as a model, with these update rules by table; `model` is kept in its manifest.

        Raises as :func:`paceline.storage.model_directory.save_model`.
        """
        kept = read_model(self._kept_in)
        specs = {name: kept.table(name).spec.with_update(to_fields(rules[name])) for name in self._names}
        save_model(directory, ((spec, kept.records(kept.table(name))) for name, spec in specs.items()), model)

    def _erase_later_rows(self, kept: SavedModel, spec: TableSpec) -> None:
        table = self._client.open_table(spec)
        assert isinstance(table, SparseTable)  # as all of a model's are
        copies = (keys.copy() for keys, _ in kept.records(kept.table(spec.name)))  # views would keep the records
        known = np.sort(np.concatenate([np.empty(0, np.uint64), *copies]))
        for keys, _ in read_records(self._client, spec):  # a bucket at a time
            places = np.searchsorted(known[:-1], keys)  # at most the last
            later = keys[known[places] != keys] if len(known) else keys
            if len(later):
                table.erase(later)

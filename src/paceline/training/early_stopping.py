"""Early stopping: end a training after several passes without progress, with the model of the best pass.

The criterion is UP (Prechelt, "Early stopping, but when?", 1998) on the loss on a validation file after every pass.
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


@dataclass(slots=True)
class PassLosses:
    """The validation loss after each pass, and the decision to stop."""

    stopping: EarlyStopping
    best_pass: int = 0
    """Number of the best pass, from 1; 0 before the first pass."""
    best_loss: float = math.inf
    last_pass: int = 0
    is_best: bool = False
    """Whether the last pass is better than all earlier passes, including those before a resumption."""
    passes: list[dict[str, float | None]] = field(default_factory=list)

    def add(self, number: int, found: Evaluation) -> bool:
        self.last_pass = number
        self.passes.append({"pass": number, **found.as_json()})
        has_best = self.best_pass > 0 and not math.isnan(self.best_loss)
        self.is_best = not has_best or found.loss < self.best_loss - self.stopping.min_delta
        if self.is_best:
            self.best_pass, self.best_loss = number, found.loss
        return self.is_best

    @property
    def is_over(self) -> bool:
        return self.last_pass - self.best_pass >= self.stopping.patience

    def line(self, found: Evaluation) -> str:
        since = self.last_pass - self.best_pass
        if self.is_best:
            place = "the best so far"
        else:
            place = f"{since} after the best" if since > 0 else f"pass {self.best_pass} of the earlier run was better"
        return f"pass {self.last_pass}: on the validation file {found.sentence()} ({place})"

    def summary(self, most: int) -> str:
        if self.last_pass < most:
            reason = f"stopped after pass {self.last_pass} of at most {most}: no progress since pass {self.best_pass}"
        else:
            reason = f"all {most} passes are done, and pass {self.best_pass} was the best"
        return reason if self.is_best else f"{reason}. The model is from pass {self.best_pass}"

    def as_json(self) -> dict[str, Any]:
        return {"passes": self.passes, "best_pass": self.best_pass, "best_loss": json_number(self.best_loss)}

    def continue_from(self, former: Mapping[str, Any] | None) -> None:
        if former is not None:
            self.passes = [dict(result) for result in former["passes"]]


class BestPass:
    """The tables of a training's best pass, saved as a model in a folder.

    `names` lists the model's tables. `origin` holds JSON values that identify the training and its validation files;
    they are saved with the tables.
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
        """Number of the saved pass; 0 if no pass is saved."""

    @property
    def is_kept(self) -> bool:
        """Whether the best pass is saved; False if the disk had no space for it."""
        return 0 < self.kept_pass == self.losses.best_pass

    def keep(self) -> None:
        """Save the cluster's tables. Raises ModelError if this fails; the previously saved tables then remain."""
        losses = self.losses
        best = {"best_pass": losses.best_pass, "best_loss": json_number(losses.best_loss)}
        save_tables(self._client, self._folder, self._names, **best, origin=self._origin)
        self._kept_in, self.kept_pass = self._folder, losses.best_pass

    def find(self, folder: Path) -> None:
        try:
            saved = read_model(folder).manifest.model
            if saved.get("origin") != self._origin:
                return  # another training used the folder and replaced the saved pass
            number, loss = int(saved["best_pass"]), float(saved["best_loss"])
        except (ModelError, KeyError, TypeError, ValueError):
            return  # no pass is saved, so the next pass will be the best
        self.losses.best_pass, self.losses.best_loss = number, loss
        self._kept_in, self.kept_pass = folder, number

    def restore(self) -> None:
        """Restore the cluster's tables from the saved pass. No worker may push during the call."""
        saved = read_model(self._kept_in)
        for spec in self._client.tables():
            if spec.name in self._names:
                self._erase_later_rows(saved, spec)
                for keys, records in saved.records(saved.table(spec.name)):
                    write_records(self._client, spec, keys, records)

    def save(self, directory: str | Path, rules: Mapping[str, UpdateRule], **model: Any) -> None:
        """Save the best pass as a model with update `rules` by table. `model` is stored in the manifest."""
        saved = read_model(self._kept_in)
        specs = {name: saved.table(name).spec.with_update(to_fields(rules[name])) for name in self._names}
        save_model(directory, ((spec, saved.records(saved.table(name))) for name, spec in specs.items()), model)

    def _erase_later_rows(self, saved: SavedModel, spec: TableSpec) -> None:
        table = self._client.open_table(spec)
        assert isinstance(table, SparseTable)  # true for all tables of models
        copies = (keys.copy() for keys, _ in saved.records(saved.table(spec.name)))  # views would keep the records
        known = np.sort(np.concatenate([np.empty(0, np.uint64), *copies]))
        for keys, _ in read_records(self._client, spec):  # one bucket at a time, to limit the memory
            places = np.searchsorted(known[:-1], keys)  # [:-1], so that every place is a valid index
            later = keys[known[places] != keys] if len(known) else keys
            if len(later):
                table.erase(later)

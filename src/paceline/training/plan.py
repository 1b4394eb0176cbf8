"""The plan of a training: all its settings except the files."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from paceline.data.batch import Batch
from paceline.data.key_scaling import KeyScaling
from paceline.models.base import Optimism, SparseModel
from paceline.ps import FTRL, UpdateRule, to_fields
from paceline.storage.snapshot_directory import Snapshot
from paceline.tables.types import Floats
from paceline.training.schedules import RatePlan
from paceline.training.worker.jobs import JobRates


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training's settings without its files."""

    model: SparseModel
    epochs: int
    batch_size: int
    update: UpdateRule
    scaling: KeyScaling | None = None
    """Scaling that readers apply to values of formats without columns (libsvm, vw, jsonl, numpy)."""
    shards_at_once: int = 1
    """A worker reads this number of shards at once and mixes their examples. It is above 1 if labels come in runs."""
    order: str = "shuffle"
    optimism: Optimism | None = None
    """A trial's calibration error on new examples; None: the mean prediction is not corrected."""
    rates: tuple[float, float] | None = None
    """The rate of positives at the start and at the end of the data, if the rate drifts; otherwise None."""
    recent: Batch | None = None
    """Sample for correcting the mean prediction. It has the order of the data, but is shuffled if sorted by label."""
    note: str | None = None
    chosen_on: int = 0
    num_examples: int = 0
    """Number of examples in the data, possibly an estimate; 0 if no sample was read."""

    resumed: Snapshot | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)
    """Unique name of the training; a resumed training keeps it."""

    def settings(self) -> dict[str, Any]:
        return {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            **to_fields(self.update),
            **{name: self.model.value_of(name) for name in self.model.usual},
            "shards_at_once": self.shards_at_once,
            "chosen_on": self.chosen_on,
        }

    @property
    def is_recent_complete(self) -> bool:
        return self.recent is not None and self.recent.num_examples == self.num_examples

    def calibrated_model(self, predictions: Floats) -> SparseModel:
        assert self.recent is not None
        labels, weights = self.recent.labels, self.recent.weights
        return self.model.calibrated(labels, predictions, weights, self.optimism, is_complete=self.is_recent_complete)

    def job_rates(self, rates: RatePlan) -> JobRates | None:
        if rates.is_constant:
            return None
        return JobRates(
            schedule=str(rates.schedule),
            warmup=rates.warmup,
            most_passes=self.epochs,
            num_examples=self.num_examples,
        )

    def sentence(self) -> str:
        update = self.update
        rate = f"alpha {update.alpha:.3g}, L1 {update.l1:g}" if isinstance(update, FTRL) else f"{update}"
        rate += f", L2 {update.l2:g}" if isinstance(update, FTRL) and update.l2 else ""
        passes = "1 pass" if self.epochs == 1 else f"{self.epochs} passes"
        if self.model.usual and self.note is None:
            rate += "".join(f", {name.replace('_', ' ')} {self.model.value_of(name):g}" for name in self.model.usual)
        nonlinear = {} if self.scaling is None else self.scaling.nonlinear_scales()
        num_binned = sum(bool(scale.edges) for scale in nonlinear.values())
        for count, kind in ((num_binned, "in bins"), (len(nonlinear) - num_binned, "on logarithms")):
            rate += f", {count:,} {'feature' if count == 1 else 'features'} {kind}" if count else ""
        mixed = "; labels come in runs, so examples are mixed" if self.shards_at_once > 1 else ""
        if self.rates is not None:
            mixed += "; the rate of positives changed from {:.2%} to {:.2%} over the file".format(*self.rates)
        return f"{passes}, minibatches of {self.batch_size}, {rate} (chosen on {self.chosen_on:,} examples){mixed}"

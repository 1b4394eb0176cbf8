"""What a training does, everything chosen."""

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
    """All that a training needs to know beside its files."""

    model: SparseModel
    epochs: int
    batch_size: int
    update: UpdateRule
    scaling: KeyScaling | None = None
    """How values are changed as they are read (of formats without columns: libsvm, vw, jsonl, numpy)."""
    shards_at_once: int = 1
    """Of how many shards a worker mixes the examples: more than 1 where labels stand in runs."""
    order: str = "shuffle"
    """Of the examples, as :class:`PassOptions` has it."""
    optimism: Optimism | None = None
    """What a trial has shown of predictions for new examples; where there is none, they are not corrected."""
    rates: tuple[float, float] | None = None
    """The rates of positives at the start and the end of the data, if the rate drifts."""
    recent: Batch | None = None
    """The sample, by which the mean prediction is corrected: in the order of the data, or mixed if that is sorted."""
    note: str | None = None
    """What came of the trial that people should know."""
    chosen_on: int = 0
    """How many examples were looked at."""
    num_examples: int = 0
    """How many the data has, or an estimate; 0 where it was not looked at."""

    resumed: Snapshot | None = None
    """What the training goes on from."""
    run: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)
    """What no other training has; one that is resumed keeps it."""

    def settings(self) -> dict[str, Any]:
        """Return what was chosen, as JSON."""
        return {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            **to_fields(self.update),
            **{name: self.model.value_of(name) for name in self.model.usual},
            "shards_at_once": self.shards_at_once,
            "chosen_on": self.chosen_on,
        }

    @property
    def is_recent_whole(self) -> bool:
        """Whether :attr:`recent` is all the data."""
        return self.recent is not None and self.recent.num_examples == self.num_examples

    def calibrated_model(self, predictions: Floats) -> SparseModel:
        """Return the model with a corrected mean prediction, given its predictions for :attr:`recent`."""
        assert self.recent is not None
        labels, weights = self.recent.labels, self.recent.weights
        return self.model.calibrated(labels, predictions, weights, self.optimism, is_whole=self.is_recent_whole)

    def job_rates(self, rates: RatePlan) -> JobRates | None:
        """Return how workers change rates; None if they are constant."""
        if rates.is_constant:
            return None
        return JobRates(
            schedule=str(rates.schedule),
            warmup=rates.warmup,
            most_passes=self.epochs,
            num_examples=self.num_examples,
        )

    def sentence(self) -> str:
        """Return what was chosen, for people."""
        update = self.update
        rate = f"alpha {update.alpha:.3g}, L1 {update.l1:g}" if isinstance(update, FTRL) else f"{update}"
        rate += f", L2 {update.l2:g}" if isinstance(update, FTRL) and update.l2 else ""
        passes = "1 pass" if self.epochs == 1 else f"{self.epochs} passes"
        if self.model.usual and self.note is None:
            rate += "".join(f", {name.replace('_', ' ')} {self.model.value_of(name):g}" for name in self.model.usual)
        bent = {} if self.scaling is None else self.scaling.bent()
        num_binned = sum(bool(scale.edges) for scale in bent.values())
        for count, what in ((num_binned, "in bins"), (len(bent) - num_binned, "on logarithms")):
            rate += f", {count:,} {'feature' if count == 1 else 'features'} {what}" if count else ""
        mixed = "; labels stand in runs, so examples are mixed" if self.shards_at_once > 1 else ""
        if self.rates is not None:
            mixed += "; the rate of positives changed from {:.2%} to {:.2%} over the file".format(*self.rates)
        return f"{passes}, minibatches of {self.batch_size}, {rate} (from a look at {self.chosen_on:,} examples){mixed}"

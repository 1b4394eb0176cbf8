"""The progress and the result of a training, and the staleness of its gradients as the servers observed it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data import Batch
from paceline.models.base import SparseModel
from paceline.models.metrics import ClickEvaluation, Evaluation, find_useless
from paceline.models.progressive import ProgressiveLoss
from paceline.models.proximal.solver import BlockPass
from paceline.models.softmax import ClassEvaluation, label_counts
from paceline.ps import Client
from paceline.tables.staleness import HISTOGRAM_SIZE
from paceline.training.bad_data import BadData


@dataclass(frozen=True)
class TrainingState:
    """The progress of a training."""

    task: str
    fraction: float | None
    """Finished fraction of the whole work, including evaluation; None while the amount of work is unknown."""
    epoch: int | None
    """The pass of the next shard, from 1."""
    examples: int
    """Examples that this task processed. The following figures are for this task too."""
    weight: float
    loss: float
    num_bytes: int
    num_workers: int
    seconds: float
    is_taking_snapshot: bool = False
    progressive: Sequence[ProgressiveLoss] = ()
    """The mean losses before learning in the first pass. Losses that may still change are left out."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training. Seconds count from the first leased shard to the last applied update."""

    model: SparseModel
    settings: dict[str, Any]
    examples: int
    seconds: float
    examples_per_s: float
    train_loss: float
    """The mean loss. Each minibatch's loss is measured before its update."""
    num_features: int
    evaluation: Evaluation | None
    staleness: dict[str, Any]
    bad_lines: BadData
    lost_workers: int
    bytes: int
    progressive: Sequence[ProgressiveLoss] = ()
    validation: dict[str, Any] | None = None
    """The metrics on the validation files after each pass, and the best pass; None if there is no such file."""
    block_passes: Sequence[BlockPass] = ()

    def as_json(self) -> dict[str, Any]:
        found = self.evaluation
        return {
            **(dict.fromkeys(self.model.evaluation.names()) if found is None else found.as_json()),
            "eval_examples": None if found is None else found.examples,
            f"train_{self.model.loss_name.replace(' ', '_')}": json_number(self.train_loss),
            "examples": self.examples,
            "seconds": self.seconds,
            "examples_per_s": self.examples_per_s,
            "num_features": self.num_features,
            "staleness": self.staleness,
            "bad_lines": self.bad_lines.count,
            "lost_workers": self.lost_workers,
            "bytes": self.bytes,
            "settings": self.settings,
            "progressive": [loss.as_json() for loss in self.progressive],
            "validation": self.validation,
            "block_passes": [msgspec.to_builtins(block_pass) for block_pass in self.block_passes],
        }


def mean_loss(progress: Mapping[str, float]) -> float:
    loss, weight = progress.get("loss", 0.0), progress.get("weight", 0.0)
    return loss / weight if weight else 0.0


def json_number(value: float) -> float | None:
    """Return a number for JSON, which has neither infinity nor NaN: these become None."""
    return float(value) if math.isfinite(value) else None


def summarize_staleness(histograms: Sequence[Sequence[int]], num_dropped: int = 0) -> dict[str, Any]:
    total = np.sum(np.array(histograms, np.int64), axis=0)
    count = int(total.sum())
    seen = np.flatnonzero(total)
    last = int(seen[-1]) if count else 0
    return {
        "mean": float((total * np.arange(len(total))).sum() / count) if count else 0.0,
        "max": last,
        "histogram": total[: last + 1].tolist(),
        "dropped": num_dropped,
    }


def judge_losses(model: SparseModel, progress: Mapping[str, Any], sample: Batch | None) -> str | None:
    """Return a reason to doubt that the model has learned anything, or None. `sample` shows the labels' shares."""
    if issubclass(model.evaluation, ClickEvaluation):
        examples, positives = int(progress["examples"]), int(progress.get("positives", 0))
        return find_useless(progress["loss"] / examples, (examples - positives, positives))
    if issubclass(model.evaluation, ClassEvaluation) and sample is not None:
        return find_useless(mean_loss(progress), label_counts(sample.labels))
    return None


class ObservedStaleness:
    """The staleness of pushes to a model's tables since this object's creation, as counted by the servers."""

    def __init__(self, client: Client, model: SparseModel) -> None:
        self._client = client
        self._tables = [table.name for table in model.tables]
        self._before, self._dropped_before = self._counts()

    def summary(self) -> dict[str, Any]:
        counts, num_dropped = self._counts()
        return summarize_staleness([(counts - self._before).tolist()], num_dropped - self._dropped_before)

    def _counts(self) -> tuple[npt.NDArray[np.int64], int]:
        counts, num_dropped = np.zeros(HISTOGRAM_SIZE, np.int64), 0
        for server in self._client.statistics():
            for name in self._tables:
                if name in server.tables:
                    counts += np.array(server.tables[name].staleness, np.int64)
                    num_dropped += server.tables[name].dropped
        return counts, num_dropped

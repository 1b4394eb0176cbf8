"""Weights of examples in training: weights of classes, and sampling of negatives.

A weight multiplies an example's loss and gradient. It is the product of its class's weight and its row's weight
(:attr:`Batch.weights`). If training uses only a random fraction of the negatives, the weight of each is divided by the
fraction. With these weights, the expected sums equal the sums over all examples, so predictions need no correction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data import Batch, Dataset
from paceline.data.batch import rebatch
from paceline.errors import UsageError
from paceline.protocol.jobs import Lease

BALANCED = "balanced"
_WEIGHED_AT_ONCE = 4096


class Weighting(msgspec.Struct, frozen=True, kw_only=True):
    """Class weights, and the fraction of negatives to train on.

    Class weights multiply the weights that the examples have in the data (1 without a weight column). The weights of
    the negatives that remain are divided by `keep_negatives`.
    """

    classes: dict[str, float] = {}
    keep_negatives: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.keep_negatives <= 1:
            raise UsageError(f"--keep-negatives {self.keep_negatives:g}: expected a fraction above 0 and at most 1")
        for label, weight in self.classes.items():
            if not 0 <= weight < float("inf"):
                raise UsageError(f"--class-weight {label}:{weight:g}: expected a finite weight of 0 or more")
        if len(self.classes) > 1 and not any(self.classes.values()):
            raise UsageError("--class-weight: all labels have the weight 0. Pass a weight above 0 for one label")

    @property
    def is_plain(self) -> bool:
        return not self.classes and self.keep_negatives == 1.0

    def read(self, dataset: Dataset, lease: Lease, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Yield the minibatches of a shard, each with the number of examples read for it."""
        if self.is_plain:
            for batch in dataset.read(lease.file, lease.shard, batch_size):
                yield batch, batch.num_examples
        else:
            blocks = dataset.read(lease.file, lease.shard, max(batch_size, _WEIGHED_AT_ONCE))
            yield from self.apply(blocks, lease, batch_size)

    def apply(self, batches: Iterable[Batch], lease: Lease, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Yield a shard's kept examples in batches, each with the number of examples read for it.

        This number includes the dropped examples before each kept one, and in the last batch also those after it. The
        choice of negatives depends only on shard and pass.
        """
        generator = np.random.default_rng((lease.epoch, lease.file, lease.shard))
        num_read = num_reported = 0
        ends = np.empty(0, np.int64)  # for each kept example not yet in a batch: the number of examples read so far

        def drawn() -> Iterator[Batch]:
            nonlocal num_read, ends
            for batch in batches:
                drawn_batch, rows = self._drawn(batch, generator)
                ends = np.concatenate([ends, num_read + rows + 1])
                num_read += batch.num_examples
                yield drawn_batch

        former: Batch | None = None
        for batch in rebatch(drawn(), batch_size):
            if former is not None:
                end = int(ends[former.num_examples - 1])
                ends = ends[former.num_examples :]
                yield former, end - num_reported
                num_reported = end
            former = batch
        if num_read:  # the last batch also counts dropped examples at the end
            yield former or Batch.concatenate([]), num_read - num_reported

    def weighted(self, batch: Batch) -> Batch:
        if not self.classes:
            return batch
        weights = np.ones(batch.num_examples, np.float32) if batch.weights is None else batch.weights.copy()
        for label, weight in self.classes.items():
            weights[batch.labels == np.float32(label)] *= np.float32(weight)
        return dataclasses.replace(batch, weights=weights)

    def _drawn(self, batch: Batch, generator: np.random.Generator) -> tuple[Batch, npt.NDArray[np.int64]]:
        batch = self.weighted(batch)
        if self.keep_negatives == 1:
            return batch, np.arange(batch.num_examples)
        is_negative = batch.labels == 0
        rows = np.flatnonzero(~is_negative | (generator.random(batch.num_examples) < self.keep_negatives))
        weights = np.ones(batch.num_examples, np.float32) if batch.weights is None else batch.weights.copy()
        weights[is_negative] /= np.float32(self.keep_negatives)
        chosen = batch.take(rows)
        return dataclasses.replace(chosen, weights=weights[rows]), rows


def parse_class_weights(text: str) -> dict[str, float] | str:
    if text == BALANCED:
        return text
    found: dict[str, float] = {}
    for part in text.split(","):
        label, colon, weight = part.partition(":")
        try:
            name = f"{np.float32(label):g}" if abs(float(label)) < 1e6 else str(int(label))
            if not colon or name in found:
                raise ValueError
            found[name] = float(weight)
        except ValueError:
            raise UsageError(
                f"--class-weight {text}: expected balanced, or the weight of each label as in 0:1,1:5"
            ) from None
    return found


def balance(counts: Mapping[float, int]) -> dict[str, float]:
    """Return weights by label, so that all labels have the same total weight, given the labels' counts."""
    total, num_labels = sum(counts.values()), len(counts)
    return {f"{label:.9g}": total / (num_labels * count) for label, count in counts.items()}

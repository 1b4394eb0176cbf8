"""Progressive validation: measure the loss of every example before learning from it, as Vowpal Wabbit does.

Examples of the first pass are new to the model, so their mean loss estimates the loss on new data without a hold-out
set (Blum, Kalai and Langford, "Beating the hold-out", COLT 1999). Losses of later passes do not estimate the loss on
new data.

For every k, each worker sums the losses of its own examples from number 2^(k-1) to number 2^k. These sums only
increase, as required for the counters of a job. The sums of all workers for numbers up to k cover the first 2^k
examples of each worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_FIRST: Final = 6
"""The first sums cover 2^6 examples. Smaller sums would be wrong, because examples are counted by whole minibatches."""
_PREFIX: Final = "first pass "
_BELOW: Final = " below 0"


class ExampleSums(NamedTuple):
    """Weighted sums over examples."""

    weights: float
    labels: float
    predictions: float | None
    """The sum of the predictions; None if each prediction has several numbers."""
    num_pairs: int


@dataclass(slots=True)
class FirstPass:
    """One worker's sums over its first pass. The worker sends `counters` to the scheduler with its other counters."""

    counters: dict[str, float] = field(default_factory=dict)
    _num_examples: int = 0
    _doubling: int = _FIRST

    def add(self, num_examples: int, loss: float, sums: ExampleSums) -> None:
        """Add a minibatch of `num_examples` examples, with the sum of its losses before learning."""
        while self._num_examples >= 1 << self._doubling:
            self._doubling += 1
        self._num_examples += num_examples
        if self._name("workers") not in self.counters:
            self.counters[self._name("workers")] = 1
        self._add("examples", num_examples)
        self._add("loss", loss)
        self._add("weights", sums.weights)
        self._add("labels", sums.labels)
        self._add("pairs", sums.num_pairs)
        if sums.predictions is not None:
            self._add("predictions", sums.predictions)

    def _add(self, quantity: str, amount: float) -> None:
        name = self._name(quantity if amount >= 0 else quantity + _BELOW)  # a counter may only increase
        self.counters[name] = self.counters.get(name, 0.0) + abs(amount)

    def _name(self, quantity: str) -> str:
        return f"{_PREFIX}{self._doubling} {quantity}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveLoss:
    """Weighted mean loss of the first `examples` examples; each loss is measured before learning from the example."""

    examples: int
    loss: float
    """The mean loss since the start."""
    loss_since_last: float
    """The mean loss since the previous line. The following fields are means since the previous line too."""
    label: float
    prediction: float | None
    features: float
    """Features per example, without the bias."""

    def as_json(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in self.__slots__}

    def line(self) -> str:
        prediction = "-" if self.prediction is None else f"{self.prediction:.4f}"
        figures = f"{self.loss:10.4f} {self.loss_since_last:10.4f} {self.examples:13,} {self.label:10.4f}"
        return f"{figures} {prediction:>10} {self.features:10.1f}"


HEADING: Final = f"{'loss':>10} {'since last':>10} {'examples':>13} {'label':>10} {'prediction':>10} {'features':>10}"


def progressive_losses(counters: Mapping[str, float], num_workers: int = 0) -> list[ProgressiveLoss]:
    """Return the mean losses in the order of the examples, given the sums of all workers' counters.

    With `num_workers`, include only the sums that this number of workers have completed; these sums are final.
    """
    sums = _by_doubling(counters)
    if num_workers:
        last_common = max((at for at, part in sums.items() if part["workers"] >= num_workers), default=_FIRST)
        sums = {at: part for at, part in sums.items() if at < last_common}
    found: list[ProgressiveLoss] = []
    num_examples, loss, weight = 0, 0.0, 0.0
    for _, part in sorted(sums.items()):
        count, weights = part["examples"], part.get("weights") or 1.0
        num_examples += int(count)
        loss += part["loss"]
        weight += weights
        found.append(
            ProgressiveLoss(
                examples=num_examples,
                loss=loss / weight,
                loss_since_last=part["loss"] / weights,
                label=part["labels"] / weights,
                prediction=part["predictions"] / weights if "predictions" in part else None,
                features=part["pairs"] / count,
            )
        )
    return found


def _by_doubling(counters: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Return the sums of each range of examples, from one power of two to the next."""
    found: dict[int, dict[str, float]] = {}
    for name, value in counters.items():
        if name.startswith(_PREFIX):
            doubling, quantity = name.removeprefix(_PREFIX).split(" ", 1)
            sign = -1 if quantity.endswith(_BELOW) else 1
            sums, quantity = found.setdefault(int(doubling), {}), quantity.removesuffix(_BELOW)
            sums[quantity] = sums.get(quantity, 0.0) + sign * value
    return {doubling: sums for doubling, sums in found.items() if sums.get("examples")}

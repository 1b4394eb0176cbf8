"""Progressive validation: the loss of every example before it is learned from, as Vowpal Wabbit prints it.

What is not learned yet is as good as held out, so the mean of these losses in the first pass estimates the loss on new
data, and no data is set aside for it (Blum, Kalai and Langford, "Beating the hold-out", COLT 1999). Later passes see
examples again, and their losses say nothing of the kind.

Each worker sums over the examples that it sees between its 2^(k-1)-th and its 2^k-th, for every k: sums that only rise,
as counters of a job do. The sums of all workers up to k are those of the first 2^k examples of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_FIRST: Final = 6
"""Examples are counted in minibatches, so the first sums are those of 2^6."""
_PREFIX: Final = "first pass "
_BELOW: Final = " below 0"


class ExampleSums(NamedTuple):
    """Sums over examples, each times how often it counts."""

    weights: float
    labels: float
    predictions: float | None
    """None where a prediction is no number."""
    num_pairs: int
    """Pairs of a feature and its value."""


@dataclass(slots=True)
class FirstPass:
    """One worker's sums over its first pass. `counters` go to the scheduler with its other ones."""

    counters: dict[str, float] = field(default_factory=dict)
    _num_examples: int = 0
    _doubling: int = _FIRST

    def add(self, num_examples: int, loss: float, sums: ExampleSums) -> None:
        """Add a minibatch, which stands for so many examples, and the sum of its losses before it is learned from."""
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

    def _add(self, what: str, amount: float) -> None:
        name = self._name(what if amount >= 0 else what + _BELOW)  # a counter only rises
        self.counters[name] = self.counters.get(name, 0.0) + abs(amount)

    def _name(self, what: str) -> str:
        return f"{_PREFIX}{self._doubling} {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveLoss:
    """The mean loss before learning, up to some example of the first pass; examples count as often as they weigh."""

    examples: int
    loss: float
    """Since the start."""
    loss_since_last: float
    """Since the line before; means that follow are of the same examples."""
    label: float
    prediction: float | None
    features: float
    """Of an example, without the bias."""

    def as_json(self) -> dict[str, float | None]:
        """Return the fields, by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def line(self) -> str:
        """Return the figures under those of :data:`HEADING`."""
        prediction = "-" if self.prediction is None else f"{self.prediction:.4f}"
        figures = f"{self.loss:10.4f} {self.loss_since_last:10.4f} {self.examples:13,} {self.label:10.4f}"
        return f"{figures} {prediction:>10} {self.features:10.1f}"


HEADING: Final = f"{'loss':>10} {'since last':>10} {'examples':>13} {'label':>10} {'prediction':>10} {'features':>10}"


def progressive_losses(counters: Mapping[str, float], num_workers: int = 0) -> list[ProgressiveLoss]:
    """Return what all workers' counters say, in the order of examples.

    With `num_workers`, of those examples alone that so many workers are through with: that does not change any more.
    """
    sums = _by_doubling(counters)
    if num_workers:
        begun_by_all = max((at for at, each in sums.items() if each["workers"] >= num_workers), default=_FIRST)
        sums = {at: each for at, each in sums.items() if at < begun_by_all}
    found: list[ProgressiveLoss] = []
    num_examples, loss, weight = 0, 0.0, 0.0
    for _, each in sorted(sums.items()):
        count, weights = each["examples"], each.get("weights") or 1.0
        num_examples += int(count)
        loss += each["loss"]
        weight += weights
        found.append(
            ProgressiveLoss(
                examples=num_examples,
                loss=loss / weight,
                loss_since_last=each["loss"] / weights,
                label=each["labels"] / weights,
                prediction=each["predictions"] / weights if "predictions" in each else None,
                features=each["pairs"] / count,
            )
        )
    return found


def _by_doubling(counters: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Return the sums between each number of examples, a power of two, and the one before."""
    found: dict[int, dict[str, float]] = {}
    for name, value in counters.items():
        if name.startswith(_PREFIX):
            doubling, what = name.removeprefix(_PREFIX).split(" ", 1)
            sign = -1 if what.endswith(_BELOW) else 1
            sums, what = found.setdefault(int(doubling), {}), what.removesuffix(_BELOW)
            sums[what] = sums.get(what, 0.0) + sign * value
    return {doubling: sums for doubling, sums in found.items() if sums.get("examples")}

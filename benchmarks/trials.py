"""Compare the two loops that try settings on a sample: a kernel for logistic regression, and minibatches.

In ``python benchmarks/trials.py [--runs 5]``, both loops try eight update rules of a logistic regression, in turns,
with one thread per core. Each trial has four passes over the same examples and the same held-out examples. The program
prints a line per sample: examples, features, the median seconds of both loops, their ratio, and the held-out losses of
the first rule.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paceline.data.batch import Batch
from paceline.data.sampling import ExampleSample
from paceline.environment import num_cores
from paceline.models.logistic import SparseLogisticRegression
from paceline.ps import FTRL
from paceline.training.tuning.choices import suggested_alpha, suggested_batch_size
from paceline.training.tuning.model_trial import ModelTrial
from paceline.training.tuning.trial import HeldOutLosses, SampleTrial, held_out_splits

_PASSES = 4  # so few passes that neither loop stops a trial early
_SAMPLES = (
    (1_000, 10, 200),
    (5_000, 20, 2_000),
    (30_000, 20, 50_000),
    (200_000, 20, 100_000),
    (200_000, 20, 1_000_000),
)
"""Number of examples, features per example, and number of different features."""


def _make_sample(num_examples: int, per_example: int, num_features: int) -> ExampleSample:
    random = np.random.default_rng(0)
    keys = (random.random((num_examples, per_example)) ** 4 * num_features).astype(np.uint64)
    weights = random.normal(0, 0.5, num_features)
    rates = 1 / (1 + np.exp(1 - weights[keys.astype(np.int64)].sum(1)))
    labels = (random.random(num_examples) < rates).astype(np.float32)
    batch = Batch(labels, np.arange(0, keys.size + 1, per_example), keys.reshape(-1))
    return ExampleSample(batch, np.arange(0, num_examples, 256), num_examples, is_whole=True)


def _measure(run: Callable[[], list[HeldOutLosses]]) -> tuple[float, float]:
    start = time.perf_counter()
    losses = run()
    return time.perf_counter() - start, losses[0].mean


def _compare(num_examples: int, per_example: int, num_features: int, runs: int) -> None:
    sample = _make_sample(num_examples, per_example, num_features)
    batch_size = suggested_batch_size(num_examples)
    model = SparseLogisticRegression().starting_from(sample.batch.labels, None)
    rules = [FTRL(alpha=suggested_alpha(sample, 0.05 * 1.5**i), l1=1.0) for i in range(8)]

    def by_kernel() -> list[HeldOutLosses]:
        splits = list(held_out_splits(sample.batch, is_mixed=True))
        trial = SampleTrial(sample.batch, model.offset, batch_size, splits)
        with ThreadPoolExecutor(num_cores()) as pool:
            return [tried.losses for tried in pool.map(lambda rule: trial.run(rule, max_passes=_PASSES), rules)]

    def by_minibatches() -> list[HeldOutLosses]:
        trial = ModelTrial(model, sample, batch_size, is_mixed=True, passes=_PASSES, seconds=1e6)
        return [tried.losses for tried in trial.run_all([(model, rule) for rule in rules])]

    found = [(_measure(by_kernel), _measure(by_minibatches)) for _ in range(runs + 1)][1:]  # the first call compiles
    kernel_s, minibatches_s = (statistics.median(pair[i][0] for pair in found) for i in range(2))
    print(
        f"{num_examples:,} examples, {num_features:,} features: kernel {kernel_s:.3f} s, "
        f"minibatches {minibatches_s:.3f} s, ratio {minibatches_s / kernel_s:.1f}; "
        f"losses {found[0][0][1]:.4f}, {found[0][1][1]:.4f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for shape in _SAMPLES:
        _compare(*shape, runs)


if __name__ == "__main__":
    main()

"""Compare the delayed block proximal gradient solver with scikit-learn's liblinear on the same L1 objective and rows.

    pip install scikit-learn
    python benchmarks/proximal_blocks.py [--workers 2] [--servers 1] [--max-delay 0] [--rows 40000] [FILE ...]

The default files are a9a, agaricus and Criteo in the test data (PACELINE_TEST_DATA). The first `--rows` rows of each
file are used. Both solvers minimize Σ log loss + λ Σ|w|. liblinear also penalizes the intercept. A large
`intercept_scaling` makes this penalty small. Afterwards the intercept is fitted again for both solvers, and the
objective is computed without a penalty on it. Paceline's time is from the first byte read to the last pass, on
processes of this machine. liblinear's time is only that of `fit`, with the data already in memory.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import Batch, open_dataset
from paceline.models.proximal.rules import ProximalBlocks
from paceline.protocol import Sequential
from paceline.training.driver import train_locally
from paceline.training.options import PassOptions, TrainOptions

FOLDER = Path(os.environ.get("PACELINE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
FILES = ("a9a/a9a", "agaricus/agaricus.txt.train", "criteo/train.tsv.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, default=[FOLDER / name for name in FILES])
    parser.add_argument("--rows", type=int, default=40_000, help="rows of each file; 0: all")
    parser.add_argument("--l1", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    defaults = ProximalBlocks()
    parser.add_argument("--max-delay", type=int, default=defaults.max_delay)
    parser.add_argument("--block-ratio", type=float, default=defaults.block_ratio)
    parser.add_argument("--tolerance", type=float, default=defaults.tolerance)
    parser.add_argument("--liblinear-tolerance", type=float, default=1e-4, help="scikit-learn's default")
    arguments = parser.parse_args()
    blocks = ProximalBlocks(
        l1=arguments.l1,
        max_delay=arguments.max_delay,
        block_ratio=arguments.block_ratio,
        tolerance=arguments.tolerance,
    )
    with tempfile.TemporaryDirectory(prefix="paceline-blocks-") as name:
        for source in arguments.files:
            file = first_rows(source, Path(name) / source.name.removesuffix(".gz"), arguments.rows)
            objective_value, seconds, passes = solve(file, blocks, arguments.servers, arguments.workers)
            peer_value, fit_seconds = fit(file, arguments.l1, arguments.liblinear_tolerance)
            print(
                f"{source.name}: objective {objective_value:.6f} in {seconds:.1f} s ({passes} passes), "
                f"liblinear {peer_value:.6f} in {fit_seconds:.1f} s, "
                f"relative difference {(objective_value - peer_value) / peer_value:+.1e}",
                flush=True,
            )


def first_rows(source: Path, target: Path, num_rows: int) -> Path:
    """Return a file with the first rows of a text file."""
    with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as lines, target.open("w") as out:
        out.writelines(itertools.islice(lines, num_rows or None))
    return target


def solve(file: Path, blocks: ProximalBlocks, servers: int, workers: int) -> tuple[float, float, int]:
    """Return objective, seconds and number of passes."""
    options = TrainOptions(data=[file], epochs=1, passes=PassOptions(blocks=blocks), numeric_scale="none")
    result = train_locally(options, servers=servers, workers=workers, consistency=Sequential(), warn=print)
    last = result.block_passes[-1]
    return last.objective, result.seconds, last.number


def fit(file: Path, l1: float, tolerance: float) -> tuple[float, float]:
    """Return objective and seconds of scikit-learn's liblinear."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    with open_dataset([file]) as dataset:
        batch = Batch.concatenate([part.copy() for part in dataset.batches(8192)])
    keys, columns = np.unique(batch.keys, return_inverse=True)
    values = np.ones(len(columns)) if batch.values is None else batch.values.astype(np.float64)
    matrix = csr_matrix((values, columns, batch.indptr), shape=(batch.num_examples, len(keys)))
    solver = LogisticRegression(
        penalty="l1", C=1 / l1, solver="liblinear", tol=tolerance, max_iter=1000, intercept_scaling=10.0
    )
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns that `penalty` is deprecated
        solver.fit(matrix, batch.labels)
    seconds = time.perf_counter() - start
    return objective(matrix @ solver.coef_[0], solver.coef_[0], batch.labels, l1), seconds


def objective(margins: Any, weights: Any, labels: Any, l1: float) -> float:
    """Return the objective with the best intercept."""
    intercept = 0.0
    for _ in range(50):  # Newton's method
        p = 1 / (1 + np.exp(-margins - intercept))
        intercept -= (p - labels).sum() / max((p * (1 - p)).sum(), 1e-12)
    losses = np.logaddexp(0, -(2 * labels - 1) * (margins + intercept))
    return float(losses.sum() + l1 * np.abs(weights).sum())


if __name__ == "__main__":
    main()

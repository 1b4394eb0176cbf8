"""The demo: a click log with a known true model, trained under three kinds of consistency.

    python examples/demo.py [--rows 1000000]

It writes a Criteo-like log of a million rows and another of 100,000 to evaluate on, trains a sparse logistic
regression on 2 servers and 2 workers under each consistency, and prints one table. Since the true model is known,
so is the best AUC that any model can reach.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console

from paceline.data import ClickLogSpec, write_click_log
from paceline.launch.train import TrainOptions
from paceline.launch.training_run import run_training
from paceline.observe import ResultRow, results_table
from paceline.protocol import Accept, BoundedDelay, Consistency, Eventual, Sequential

EPOCHS = 1


def main() -> None:
    """Generate, train three times, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows to train on")
    rows = parser.parse_args().rows
    console = Console()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        log, held_out = Path(folder) / "train.tsv", Path(folder) / "eval.tsv"
        console.print(f"Writing a click log of {rows:,} rows with a known true model ...")
        truth = write_click_log(log, ClickLogSpec(rows=rows), eval_path=held_out)
        results = []
        consistencies: list[Consistency] = [Sequential(), BoundedDelay(tau=4), Eventual()]
        for consistency in consistencies:
            console.print(f"Training under {consistency} consistency, 2 servers, 2 workers ...")
            result = run_training(
                TrainOptions(data=[log], evaluation=[held_out], epochs=EPOCHS),
                servers=2,
                workers=2,
                consistency=consistency,
                stale=Accept(),
            )
            assert result.evaluation is not None
            results.append(
                ResultRow(
                    consistency=str(consistency),
                    seconds=result.seconds,
                    examples_per_s=result.examples_per_s,
                    log_loss=result.evaluation.log_loss,
                    auc=result.evaluation.auc,
                    best_auc=truth.best_auc,
                    staleness_mean=result.staleness["mean"],
                    staleness_max=result.staleness["max"],
                )
            )
    console.print()
    console.print(results_table(results))
    console.print(
        f"Log loss and AUC are on {truth.examples:,} rows that were not trained on; "
        f"the best possible log loss is {truth.best_log_loss:.4f}. {time.perf_counter() - began:.0f} s in all."
    )


if __name__ == "__main__":
    main()

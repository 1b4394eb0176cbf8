"""Train on a click log under three consistencies, and a PyTorch script under three strategies. Print two tables.

    python examples/demo.py [--rows 1000000]

The first part writes a Criteo-like log of a million rows, and another log of 100,000 rows for the evaluation. It trains
a sparse logistic regression with 2 servers and 2 workers under each consistency. A known model generates the labels, so
the best possible AUC is known. The second part runs the PyTorch script `digits.py` with `paceline run`. The script is
the same under all strategies.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.data import ClickLogSpec, write_click_log
from paceline.models.metrics import ClickEvaluation
from paceline.observe.table import format_rate
from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from paceline.ps.messages import ClusterSettings
from paceline.training.driver import run_training
from paceline.training.options import TrainOptions

EPOCHS = 1
DIGITS = Path(__file__).with_name("digits.py")
BATCH_SIZE = 32
TWO_PROCESSES = ("--nproc-per-node", "2")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "one-device": (),
    "all-reduce": TWO_PROCESSES,
    "parameter-server": (*TWO_PROCESSES, "--servers", "1", "--consistency", "bounded:4"),
}


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the click log to train on")
    rows = parser.parse_args().rows
    console = Console()
    began = time.perf_counter()
    compare_consistencies(console, rows)
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        console.print("For the second part, PyTorch under three strategies: pip install 'paceline\\[demo]'")
    else:
        console.print()
        compare_strategies(console)
    console.print(f"{time.perf_counter() - began:.0f} s in all.")


def compare_consistencies(console: Console, rows: int) -> None:
    """Write a click log, train on it three times, and print the table."""
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        log, held_out = Path(folder) / "train.tsv", Path(folder) / "eval.tsv"
        console.print(f"Writing a click log of {rows:,} rows with a known true model ...")
        truth = write_click_log(log, ClickLogSpec(rows=rows), eval_path=held_out)
        rows_shown: list[dict[str, str]] = []
        consistencies: list[Consistency] = [Sequential(), BoundedDelay(tau=4), Eventual()]
        for consistency in consistencies:
            console.print(f"Training under {consistency} consistency, 2 servers, 2 workers ...")
            result = run_training(
                TrainOptions(data=[log], evaluation=[held_out], epochs=EPOCHS),
                ClusterSettings(num_servers=2, num_workers=2, consistency=str(consistency)),
            )
            assert isinstance(result.evaluation, ClickEvaluation)
            found, staleness = result.evaluation, result.staleness
            rows_shown.append(
                {
                    "consistency": str(consistency),
                    "seconds": f"{result.seconds:.1f}",
                    "examples/s": format_rate(result.examples_per_s).removesuffix("/s"),
                    "log\nloss": f"{found.log_loss:.4f}",
                    "AUC": f"{found.auc:.4f}",
                    "best\nAUC": f"{truth.best_auc:.4f}",
                    "staleness\nmean/max": f"{staleness['mean']:.2f} / {staleness['max']}",
                }
            )
    console.print()
    console.print(make_table(rows_shown))
    console.print(
        f"Log loss and AUC are on {truth.examples:,} rows that were not trained on; "
        f"the best possible log loss is {truth.best_log_loss:.4f}."
    )


def compare_strategies(console: Console) -> None:
    """Train on scikit-learn's digits under three strategies, and print the table."""
    rows: list[dict[str, str]] = []
    for strategy, launch in STRATEGIES.items():
        processes = 2 if launch else 1
        console.print(f"Training a PyTorch model of digits under {' '.join([strategy, *launch])} ...")
        # One thread per process; the total batch size is the same under every strategy.
        arguments = ["run", "--strategy", strategy, "--threads", "1", *launch, str(DIGITS)]
        arguments += ["--batch-size", str(BATCH_SIZE // processes), "--json"]
        finished = subprocess.run([sys.executable, "-m", "paceline", *arguments], stdout=subprocess.PIPE, text=True)
        if finished.returncode:
            sys.exit(f"demo.py: {DIGITS.name} under {strategy} ended with status {finished.returncode}")
        found = json.loads(finished.stdout.removeprefix("[rank 0] "))
        rows.append(
            {
                "strategy": strategy,
                "seconds": f"{found['seconds']:.1f}",
                "examples/s": format_rate(found["examples_per_s"]).removesuffix("/s"),
                "test accuracy": f"{found['accuracy']:.1%}",
            }
        )
    console.print()
    console.print(make_table(rows))
    console.print(
        "Accuracy is on 449 images that were not trained on. A model of this size gains nothing from a second process; "
        "the table shows one script under three architectures."
    )


def make_table(rows: list[dict[str, str]]) -> Table:
    """Return a table with names in the first column and numbers in the other columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    for row in rows:
        table.add_row(*row.values())
    return table


if __name__ == "__main__":
    main()

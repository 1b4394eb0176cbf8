"""Compare Paceline with Vowpal Wabbit: one pass of FTRL logistic regression over the same click log, read as text.

    pip install 'paceline[bench]'
    python benchmarks/vowpal_wabbit.py [--data train.tsv[.gz]] [--runs 5] [--json]

Both programs read text of the same rows. Paceline reads a Criteo TSV. Vowpal Wabbit reads its own format. The rows are
converted to it in advance, with the same transformation of integers. Paceline's time is from the first byte read to the
last update applied, with 1 server and 1 worker. Vowpal Wabbit's time is from opening the file to the end of the pass,
without starting its process and without writing the model. Runs alternate, and the results are medians.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from paceline.data import ClickLogSpec, write_click_log
from paceline.models.metrics import ClickEvaluation, evaluate
from paceline.protocol import BoundedDelay
from paceline.training.driver import train_locally
from paceline.training.options import TrainOptions

TRAIN_SHARE = 0.8
VW = """
import sys, time, vowpalwabbit
start = time.perf_counter()
work = vowpalwabbit.Workspace(
    f"--ftrl --ftrl_alpha 0.05 --ftrl_beta 1 --l1 1 -b {sys.argv[1]} --loss_function logistic --quiet -d {sys.argv[2]}"
)
print(time.perf_counter() - start)
with open(sys.argv[3]) as held_out, open(sys.argv[4], "w") as out:
    for line in held_out:
        out.write(f"{line.split(' ', 1)[0]} {work.predict(line)}\\n")
work.finish()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="Criteo TSV; default: the test data's sample, else a generated log")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bits", type=int, default=22, help="size of Vowpal Wabbit's weight table")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-vw-") as name:
        folder = Path(name)
        rows = split(arguments.data or find_data(folder), folder)
        paceline_rates: list[float] = []
        vw_rates: list[float] = []
        for _ in range(arguments.runs):
            result = train_locally(
                TrainOptions(data=[folder / "train.tsv"], evaluation=[folder / "eval.tsv"], epochs=1, adapt="no"),
                servers=1,
                workers=1,
                consistency=BoundedDelay(tau=4),
            )
            paceline_rates.append(result.examples / result.seconds)
            vw_rates.append(rows / run_vw(folder, arguments.bits))
        assert isinstance(result.evaluation, ClickEvaluation)
        labels, margins = np.loadtxt(folder / "predictions.txt", unpack=True)
        vw = evaluate((labels > 0).astype(np.float32), 1.0 / (1.0 + np.exp(-margins)))
    report = [
        {"peer": "paceline", "rows_per_s": statistics.median(paceline_rates), "min": min(paceline_rates),
         "max": max(paceline_rates), "auc": result.evaluation.auc, "log_loss": result.evaluation.log_loss},
        {"peer": "vowpal_wabbit", "rows_per_s": statistics.median(vw_rates), "min": min(vw_rates),
         "max": max(vw_rates), "auc": vw.auc, "log_loss": vw.log_loss},
    ]  # fmt: skip
    for line in report:
        if arguments.json:
            print(json.dumps({**line, "rows": rows}))
        else:
            print(
                f"{line['peer']:14} {line['rows_per_s']:10,.0f} rows/s ({line['min']:,.0f} to {line['max']:,.0f}), "
                f"AUC {line['auc']:.4f}, log loss {line['log_loss']:.4f}, one pass over {rows:,} rows"
            )
    if not arguments.json:
        print(f"ratio of medians {statistics.median(paceline_rates) / statistics.median(vw_rates):.2f}")


def find_data(folder: Path) -> Path:
    """Return the test data's sample, or a generated log."""
    shared = Path(os.environ.get("PACELINE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    sample = shared / "criteo" / "train.tsv.gz"
    if sample.exists():
        return sample
    path = folder / "generated.tsv"
    write_click_log(path, ClickLogSpec(rows=140_000))
    return path


def split(data: Path, folder: Path) -> int:
    """Write 80% of the rows for training and the rest for evaluation, in both formats. Return the first number."""
    with gzip.open(data, "rt") if data.suffix == ".gz" else open(data) as text:
        lines = text.readlines()
    rows = int(len(lines) * TRAIN_SHARE)
    for name, part in (("train", lines[:rows]), ("eval", lines[rows:])):
        (folder / f"{name}.tsv").write_text("".join(part))
        with open(folder / f"{name}.vw", "w") as out:
            out.writelines(vw_lines(part))
    return rows


def vw_lines(lines: list[str]) -> Iterator[str]:
    """Yield Criteo lines in Vowpal Wabbit's format. An integer x is the category ⌊ln(x)²⌋ + 10, as in Paceline."""
    for line in lines:
        fields = line.rstrip("\n").split("\t")
        names = []
        for i, text in enumerate(fields[1:14]):
            if text:
                x = int(text)
                text = str(math.floor(math.log(x) ** 2) + 10 if x > 2 else x)
            names.append(f"i{i}_{text}")
        names += [f"c{i}_{text}" for i, text in enumerate(fields[14:])]
        yield f"{1 if fields[0] == '1' else -1} | {' '.join(names)}\n"


def run_vw(folder: Path, bits: int) -> float:
    """Run one pass of Vowpal Wabbit and return its seconds."""
    files = [str(folder / name) for name in ("train.vw", "eval.vw", "predictions.txt")]
    done = subprocess.run([sys.executable, "-c", VW, str(bits), *files], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0])


if __name__ == "__main__":
    main()

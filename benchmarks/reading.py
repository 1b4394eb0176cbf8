"""Reading and training: rows per second from text, and from what `paceline convert` makes of it.

    python benchmarks/reading.py [--data train.tsv[.gz]] [--runs 5] [--epochs 10] [--json]

`parse` and `read` are one process that reads the text, and the converted file, in minibatches of 256; `convert` is the
conversion; `train` is logistic regression on 1 server and 1 worker, from the first byte read to the last update
applied, over so many passes (`train, text`: of which the later ones are read from the cache). Medians; quote them with
`uptime` beside them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.data import ClickLogSpec, open_dataset, write_click_log
from paceline.launch import prepare_kernels
from paceline.launch.train.converting import convert_data, look_at_sources
from paceline.launch.train.options import TrainOptions
from paceline.launch.train.train import train_locally
from paceline.protocol import BoundedDelay

_BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="any data file; default: a sample of Criteo, or a made-up log")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10, help="passes of a training")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prepare_kernels()
    with tempfile.TemporaryDirectory(prefix="paceline-reading-") as name:
        folder = Path(name)
        text, converted = find_text(arguments.data, folder), folder / "data.paceline"
        measured: list[tuple[str, Callable[[], float]]] = [
            ("parse", lambda: read(text)),
            ("convert", lambda: convert(text, converted)),
            ("read", lambda: read(converted)),
            ("train, text", lambda: train(text, arguments.epochs)),
            ("train, converted", lambda: train(converted, arguments.epochs)),
        ]
        rates: dict[str, list[float]] = {what: [] for what, _ in measured}
        for _ in range(arguments.runs):
            for what, measure in measured:
                rates[what].append(measure())
    for what, found in rates.items():
        line = {"what": what, "rows_per_s": statistics.median(found), "min": min(found), "max": max(found)}
        if arguments.json:
            print(json.dumps(line))
        else:
            print(f"{what:17} {line['rows_per_s']:12,.0f} rows/s ({line['min']:,.0f} to {line['max']:,.0f})")


def find_text(data: Path | None, folder: Path) -> Path:
    """Return the data as a plain file: the given one, the test data's sample, or a generated log."""
    shared = Path(os.environ.get("PACELINE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if data is None and (shared / "criteo" / "train.tsv.gz").exists():
        data = shared / "criteo" / "train.tsv.gz"
    path = folder / "text"
    if data is None:
        write_click_log(path, ClickLogSpec(rows=140_000))
        return path
    if data.suffix != ".gz":
        return data
    with gzip.open(data) as packed, open(path, "wb") as out:
        shutil.copyfileobj(packed, out)
    return path


def read(path: Path) -> float:
    with open_dataset(path) as dataset:
        start = time.perf_counter()
        rows = sum(batch.num_examples for batch in dataset.batches(_BATCH))
        return rows / (time.perf_counter() - start)


def convert(text: Path, out: Path) -> float:
    look = look_at_sources([str(text)], out, format=None, columns=None, label=None, weight=None)
    done = convert_data([str(text)], out, look)
    return done.num_examples / done.seconds


def train(path: Path, epochs: int) -> float:
    result = train_locally(
        TrainOptions(data=[str(path)], epochs=epochs, adapt="no"),
        servers=1,
        workers=1,
        consistency=BoundedDelay(tau=4),
    )
    return result.examples / result.seconds


if __name__ == "__main__":
    main()

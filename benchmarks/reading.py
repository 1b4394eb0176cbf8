"""Measure rows per second of reading and training, from text and from the output of `paceline convert`.

    python benchmarks/reading.py [--data train.tsv[.gz]] [--runs 5] [--epochs 10] [--json]

There are five cases. `parse` reads the text in one process, in minibatches of 256, and `read` reads the converted file
in the same way. `convert` is the conversion. `train` is logistic regression with 1 server and 1 worker and `--epochs`
passes, from the first byte read to the last update applied. In `train, text`, later passes read the cache. Results
are medians. They depend on other programs on the machine, so note its load (`uptime`).

    python benchmarks/reading.py --stream 100000000

This command trains logistic regression for one pass over this number of rows. The data are a converted log of at most a
million generated rows. As many links to this file as necessary are read. *memory* is the maximum of the worker's
memory, without the pages of the mapped file, in the first and in the last tenth of the training. If both are about
equal, the worker does not keep the data in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from paceline.data import ClickLogSpec, open_dataset, write_click_log
from paceline.launch import prepare_kernels
from paceline.protocol import BoundedDelay
from paceline.training.driver import train_locally
from paceline.training.files.converting import convert_data, sample_sources
from paceline.training.options import TrainOptions

_BATCH = 256
_MAX_ROWS_PER_FILE = 1_000_000
_SAMPLE_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="any data file; default: a sample of Criteo, or a generated log")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10, help="passes of `train`")
    parser.add_argument("--stream", type=int, metavar="ROWS", help="only train one pass over this number of rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prepare_kernels()
    if arguments.stream is not None:
        done = stream(arguments.stream)
        print(
            json.dumps(done)
            if arguments.json
            else f"{done['rows']:,} rows in {done['seconds']:,.0f} s ({done['rows_per_s']:,.0f} rows/s), memory of "
            f"the worker {done['first_megabytes']:,.0f} MB in the first tenth, "
            f"{done['last_megabytes']:,.0f} MB in the last"
        )
        return
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
        rates: dict[str, list[float]] = {label: [] for label, _ in measured}
        for _ in range(arguments.runs):
            for label, measure in measured:
                rates[label].append(measure())
    for label, found in rates.items():
        line = {"what": label, "rows_per_s": statistics.median(found), "min": min(found), "max": max(found)}
        if arguments.json:
            print(json.dumps(line))
        else:
            print(f"{label:17} {line['rows_per_s']:12,.0f} rows/s ({line['min']:,.0f} to {line['max']:,.0f})")


def find_text(data: Path | None, folder: Path) -> Path:
    """Return an uncompressed file: the given one, the sample of the test data, or a generated log."""
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
    sample = sample_sources([str(text)], out, format=None)
    done = convert_data([str(text)], out, sample)
    return done.num_examples / done.seconds


def train(path: Path, epochs: int) -> float:
    result = train_locally(
        TrainOptions(data=[str(path)], epochs=epochs, adapt="no"),
        servers=1,
        workers=1,
        consistency=BoundedDelay(tau=4),
    )
    return result.examples / result.seconds


def stream(num_rows: int) -> dict[str, float]:
    """Train one pass. Return rows, seconds, rate, and the worker's memory in the first and last tenth."""
    samples: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_S):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if '"role": "worker"' in " ".join(child.cmdline()):
                        memory = child.memory_info()
                        samples.append((memory.rss - memory.shared) / 1e6)

    with tempfile.TemporaryDirectory(prefix="paceline-reading-") as name:
        folder, rows = Path(name), min(num_rows, _MAX_ROWS_PER_FILE)
        write_click_log(folder / "text", ClickLogSpec(rows=rows))
        convert(folder / "text", folder / "0.paceline")
        paths = [folder / f"{number}.paceline" for number in range(-(-num_rows // rows))]
        for path in paths[1:]:
            path.symlink_to(folder / "0.paceline")
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            result = train_locally(
                TrainOptions(data=[str(path) for path in paths], epochs=1, adapt="no"),
                servers=1,
                workers=1,
                consistency=BoundedDelay(tau=4),
            )
        finally:
            ended.set()
            watcher.join()
    samples = samples[
        -max(1, round(result.seconds / _SAMPLE_S)) :
    ]  # earlier samples are from the start of the processes
    tenth = -(-len(samples) // 10)
    return {
        "rows": result.examples,
        "seconds": result.seconds,
        "rows_per_s": result.examples_per_s,
        "first_megabytes": max(samples[:tenth]),
        "last_megabytes": max(samples[-tenth:]),
    }


if __name__ == "__main__":
    main()

"""Measure bytes, seconds and AUC of a training with each filter, and with chains of filters.

    python benchmarks/filters.py [--data train.tsv[.gz]] [--rows 200000] [--epochs 4] [--workers 1] [--runs 1]
                                 [--filters CHAIN ...] [--consistency bounded:4] [--mbit 1000 100] [--json]

The training is logistic regression by FTRL on four fifths of a Criteo log, with 1 server, over loopback. The AUC is for
the last fifth. Bytes are the traffic between all workers and servers in both directions, in the first pass and on
average in later passes. Those of the later passes are the difference between a training of all passes and a training of
one pass. Seconds are the time of a training of all passes, as the median of `runs`. On loopback, sending takes almost
no time. So these seconds show the cost of a filter, not its benefit.

`--mbit` repeats each training between hosts: the scheduler and the server on one host, the workers on another, with
links of this speed (Mbit/s). The hosts are network namespaces, like those of ``hosts.py``. This needs root, iproute2
and the kernel's tbf.

A chain may have a second chain for pulled values, after a slash: ``key-caching,quantize:1/quantize:4``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hosts import NETWORK, network  # type: ignore[import-not-found]  # a module of this folder

from paceline.data import ClickLogSpec, write_click_log
from paceline.models.metrics import ClickEvaluation
from paceline.protocol import parse_consistency
from paceline.training.driver import train_locally
from paceline.training.options import TrafficFilters, TrainOptions
from paceline.training.results import TrainResult
from paceline.transport.security.authentication import make_token

TRAIN_SHARE = 0.8
NONE = "none"
CHAINS = (
    NONE,
    "key-caching",
    "delta-keys",
    "key-numbers",
    "compress",
    "zstd",
    "float16",
    "bfloat16",
    "quantize:8",
    "quantize:4",
    "quantize:2/quantize:4",
    "quantize:1/quantize:4",
    "top-k:0.5",
    "random-k:0.5",
    "random-skip:0.5",
    "significant:1",
    "kkt",
    "key-caching,key-numbers",
    "key-caching,key-numbers,quantize:8",
    "key-caching,key-numbers,quantize:8,zstd",
    "key-caching,key-numbers,quantize:4",
    "key-caching,key-numbers,quantize:4,zstd",
    "key-caching,key-numbers,quantize:1,zstd/quantize:4,zstd",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="Criteo TSV; default: a generated log")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the generated log")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--filters", nargs="+", help="chains to measure in addition to none")
    parser.add_argument("--consistency", default="bounded:4")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--mbit", type=int, nargs="+", default=[], help="also measure links of these speeds, in Mbit/s")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.epochs < 2:
        parser.error(
            f"--epochs {arguments.epochs}: expected 2 or more, because first and later passes are measured separately"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-filters-") as name:
        folder = Path(name)
        split(arguments.data or generate(folder, arguments.rows), folder)
        report: list[dict[str, Any]] = []
        for chain in (NONE, *arguments.filters) if arguments.filters else CHAINS:
            report.append(measure(folder, chain, arguments))
            print_line(report[-1], report[0], arguments.json, is_first=len(report) == 1)


def measure(folder: Path, chain: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return bytes, seconds and AUC of a training with a chain of filters."""

    pushed, _, pulled = chain.partition("/")

    def run(epochs: int) -> TrainResult:
        return train_locally(
            TrainOptions(
                data=[folder / "train.tsv"],
                evaluation=[folder / "eval.tsv"],
                format="criteo",
                epochs=epochs,
                filters=TrafficFilters(pushed=pushed, pulled=pulled or None),
            ),
            servers=1,
            workers=arguments.workers,
            consistency=parse_consistency(arguments.consistency),
        )

    first = run(1)
    results = [run(arguments.epochs) for _ in range(arguments.runs)]
    aucs = [result.evaluation.auc for result in results if isinstance(result.evaluation, ClickEvaluation)]
    total = statistics.median(result.bytes for result in results)
    links = {
        f"seconds_at_{mbit}_mbit": statistics.median(
            train_between_hosts(folder, chain, mbit, arguments) for _ in range(arguments.runs)
        )
        for mbit in arguments.mbit
    }
    return {
        "filters": chain,
        "bytes": total,
        "first_pass_bytes": first.bytes,
        "later_pass_bytes": (total - first.bytes) / (arguments.epochs - 1),
        "seconds": statistics.median(result.seconds for result in results),
        "auc": statistics.median(aucs),
        **links,
    }


def train_between_hosts(folder: Path, chain: str, mbit: int, arguments: argparse.Namespace) -> float:
    """Return the seconds of a training with the server on one host and the workers on another."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(make_token())
    where = ["--scheduler", f"{NETWORK}.1:7337", "--token-file", str(token)]
    with network(2, f"{mbit}Mbit") as names:

        def command(host: int, *words: object) -> list[str]:
            return ["ip", "netns", "exec", names[host], sys.executable, "-m", "paceline", *map(str, words)]

        numbers = ["--servers", "1", "--workers", str(arguments.workers), "--consistency", arguments.consistency]
        commands = [
            command(0, "scheduler", "--host", f"{NETWORK}.1", "--token-file", token, *numbers),
            command(0, "server", "--host", f"{NETWORK}.1", *where),
            *(command(1, "worker", *where) for _ in range(arguments.workers)),
        ]
        processes = [
            subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in commands
        ]
        try:
            pushed, _, pulled = chain.partition("/")
            options = ["--epochs", arguments.epochs, "--format", "criteo", "--filters", pushed, "--json", "--quiet"]
            options += ["--pull-filters", pulled] if pulled else []
            trained = command(1, "train", folder / "train.tsv", *where, *options)
            report = subprocess.run(trained, check=True, capture_output=True, text=True, timeout=600).stdout
        finally:
            processes[0].send_signal(signal.SIGINT)  # this ends the cluster
            for process in processes:
                process.wait(60)
    seconds: float = json.loads(report)["seconds"]
    return seconds


def print_line(found: dict[str, Any], plain: dict[str, Any], as_json: bool, *, is_first: bool) -> None:
    """Print a line with the ratios to the result `plain`, which has no filters."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    if is_first:
        heads = f"{'MB':>8} {'×':>6} {'1st pass':>9} {'×':>6} {'later':>8} {'×':>6} {'s':>6} {'AUC':>8} {'−':>9}"
        links = [name.removeprefix("seconds_at_").replace("_", " ") for name in found if name.startswith("seconds_at_")]
        print(f"{'filters':60} {heads}" + "".join(f" {f's, {link}':>14} {'×':>5}" for link in links))
    cells = ""
    for name, width in (("bytes", 8), ("first_pass_bytes", 9), ("later_pass_bytes", 8)):
        cells += f" {found[name] / 1e6:{width}.1f} {plain[name] / found[name]:6.1f}"
    cells += f" {found['seconds']:6.2f} {found['auc']:8.5f} {plain['auc'] - found['auc']:+9.5f}"
    for name in found:
        if name.startswith("seconds_at_"):
            cells += f" {found[name]:14.2f} {plain[name] / found[name]:5.1f}"
    print(f"{found['filters']:60}{cells}", flush=True)


def generate(folder: Path, rows: int) -> Path:
    """Write a log of clicks."""
    data = folder / "log.tsv"
    write_click_log(data, ClickLogSpec(rows=rows))
    return data


def split(data: Path, folder: Path) -> None:
    """Write the first rows for training and the remaining rows for evaluation."""
    with gzip.open(data) if data.suffix == ".gz" else data.open("rb") as file:
        lines = file.readlines()
    at = int(len(lines) * TRAIN_SHARE)
    (folder / "train.tsv").write_bytes(b"".join(lines[:at]))
    (folder / "eval.tsv").write_bytes(b"".join(lines[at:]))


if __name__ == "__main__":
    main()

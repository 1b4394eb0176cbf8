"""Compare factorization machines of several programs on the same features of the same rows.

    pip install 'paceline[torch]' myfm xlearn 'setuptools<81'
    python benchmarks/factorization.py day1.tsv day2.tsv [--peers myfm,xlearn,torch] [--json]

`paceline train --model lr` and `fm` run with their defaults. The peers get the features of Paceline, with consecutive
numbers as keys. Each installed peer runs with several settings. A program without access to the test rows cannot choose
the best of them. The peers are

- myFM: a Bayesian model, trained by Markov chain Monte Carlo like libFM;
- xLearn: AdaGrad, with rows scaled to length 1;
- a factorization machine in PyTorch, with Adam.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from paceline.data import Batch, open_dataset
from paceline.launch import prepare_kernels
from paceline.models.metrics import auc

Reals = npt.NDArray[np.float64]
Settings = Mapping[str, Any]
XLEARN = """
import json, sys, xlearn
settings = json.loads(sys.argv[1])
model = xlearn.create_fm()
model.setTrain("train.txt"), model.setTest("test.txt"), model.setSigmoid(), model.disableEarlyStop(), model.setQuiet()
model.fit({"task": "binary", "opt": "adagrad", "nthread": 1, **settings}, "model")
model.predict("model", "predicted")
"""


class Rows(NamedTuple):
    """Examples: `x` is a CSR matrix of their features, and `labels` are 0 and 1."""

    x: Any
    labels: Reals


def read_rows(paths: list[Path]) -> list[Rows]:
    """Read files with Paceline's parser, and number the features of all files in the order of their keys."""
    found = [read_batch(path) for path in paths]
    unique, ids = np.unique(np.concatenate([batch.keys for batch in found]), return_inverse=True)
    rows, start = [], 0
    for batch in found:
        num_pairs = len(batch.keys)
        values = np.ones(num_pairs) if batch.values is None else batch.values.astype(np.float64)
        shape = batch.num_examples, len(unique)
        x = sp.csr_matrix((values, ids[start : start + num_pairs], batch.indptr), shape)
        rows.append(Rows(x, batch.labels.astype(np.float64)))
        start += num_pairs
    return rows


def read_batch(path: Path) -> Batch:
    """Read all examples of a file."""
    batches, shard = [], 0
    with open_dataset([path]) as dataset:
        while shard < (dataset.num_shards(0) or dataset.ended(0) or shard + 1):
            batches += [batch.copy() for batch in dataset.read(0, shard, 4096)]
            shard += 1
    return Batch.concatenate(batches)


def without_rare(train: Rows, test: Rows, least: int) -> tuple[Rows, Rows]:
    """Return the rows without features that occur in fewer than `least` training rows."""
    kept = np.flatnonzero(np.bincount(train.x.indices, minlength=train.x.shape[1]) >= least)
    return Rows(train.x[:, kept], train.labels), Rows(test.x[:, kept], test.labels)


def run_myfm(train: Rows, test: Rows, settings: Settings) -> Reals:
    """Return P(1) of the test rows by a Bayesian factorization machine. If the rank is 0, it is a probit regression."""
    import myfm  # type: ignore[import-not-found, unused-ignore]

    train, test = without_rare(train, test, settings["min_count"])
    model = myfm.MyFMClassifier(rank=settings["rank"], random_seed=0)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        model.fit(train.x, train.labels, n_iter=settings["iterations"], n_kept_samples=settings["iterations"] * 3 // 4)
    predicted: Reals = model.predict_proba(test.x)
    return predicted


def run_xlearn(train: Rows, test: Rows, settings: Settings) -> Reals:
    """Return P(1) of the test rows by xLearn, in a child process, because xLearn exits if it fails."""
    with tempfile.TemporaryDirectory(prefix="paceline-xlearn-") as folder:
        for rows, name in ((train, "train.txt"), (test, "test.txt")):
            with Path(folder, name).open("w") as file:
                for row, label in enumerate(rows.labels):
                    pairs = slice(rows.x.indptr[row], rows.x.indptr[row + 1])
                    columns, values = rows.x.indices[pairs], rows.x.data[pairs]
                    words = " ".join(f"{key}:{value:.6g}" for key, value in zip(columns, values, strict=True))
                    file.write(f"{int(label)} {words}\n")
        command = [sys.executable, "-c", XLEARN, json.dumps(dict(settings))]
        environment = {"USER": "user", **os.environ}  # xLearn exits if there is no user name
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
        return np.loadtxt(Path(folder, "predicted"))


def run_torch(train: Rows, test: Rows, settings: Settings) -> Reals:
    """Return P(1) of the test rows by a factorization machine with Adam. Only a minibatch's rows are penalized."""
    import torch

    train, test = without_rare(train, test, settings["min_count"])
    torch.manual_seed(0)
    num_features, dim = train.x.shape[1], settings["dim"]
    weights, factors = torch.nn.Embedding(num_features, 1), torch.nn.Embedding(num_features, dim)
    torch.nn.init.zeros_(weights.weight)
    torch.nn.init.normal_(factors.weight, std=0.01)
    rate = train.labels.mean()
    bias = torch.nn.Parameter(torch.tensor([np.log(rate / (1 - rate))], dtype=torch.float32))
    optimizer = torch.optim.Adam([*weights.parameters(), *factors.parameters(), bias], lr=settings["lr"])

    def margins(part: Any) -> tuple[Any, Any]:
        keys, values = torch.from_numpy(part.indices.astype(np.int64)), torch.from_numpy(part.data).float()
        rows = torch.from_numpy(np.repeat(np.arange(part.shape[0]), np.diff(part.indptr)))
        zeros = torch.zeros(part.shape[0], dim)
        scaled = factors(keys) * values[:, None]
        pairs = (zeros.index_add(0, rows, scaled).square() - zeros.index_add(0, rows, scaled.square())).sum(1) / 2
        linear = torch.zeros(part.shape[0]).index_add(0, rows, weights(keys)[:, 0] * values)
        return bias + linear + pairs, (weights(keys).square().sum(), factors(keys).square().sum())

    size = 512
    for _ in range(settings["epochs"]):
        for start in range(0, train.x.shape[0], size):
            part, labels = train.x[start : start + size], torch.from_numpy(train.labels[start : start + size]).float()
            out, squares = margins(part)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(out, labels)
            loss = loss + (settings["l2"] * squares[0] + settings["factor_l2"] * squares[1]) / len(labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        parts = [margins(test.x[start : start + 4096])[0] for start in range(0, test.x.shape[0], 4096)]
    predicted: Reals = torch.sigmoid(torch.cat(parts)).double().numpy()
    return predicted


PEERS: dict[str, tuple[Callable[[Rows, Rows, Settings], Reals], tuple[Settings, ...]]] = {
    "myfm": (
        run_myfm,
        tuple(
            {"rank": rank, "iterations": iterations, "min_count": least}
            for rank, iterations, least in ((0, 100, 1), (2, 200, 1), (4, 200, 4), (8, 100, 1))
        ),
    ),
    "xlearn": (
        run_xlearn,
        tuple(
            {"k": k, "lr": lr, "lambda": penalty, "epoch": epochs}
            for k, lr, penalty, epochs in (
                (4, 0.2, 2e-5, 5),
                (4, 0.5, 2e-4, 5),
                (8, 0.2, 2e-5, 12),
                (8, 0.3, 1e-3, 6),
                (16, 0.2, 2e-5, 16),
            )
        ),
    ),
    "torch": (
        run_torch,
        tuple(
            {"dim": 8, "lr": 0.001, "l2": l2, "factor_l2": factor_l2, "epochs": epochs, "min_count": 10}
            for l2, factor_l2, epochs in ((1e-3, 1e-2, 1), (3e-3, 3e-2, 2), (1e-3, 0.1, 2))
        ),
    ),
}
"""Each peer's function and settings: the best settings found on the Criteo sample."""


def train_paceline(train: Path, test: Path, model: str) -> dict[str, Any]:
    """Return the JSON output of ``paceline train``."""
    command = [sys.executable, "-m", "paceline", "train", str(train), "--eval", str(test), "--model", model, "--json"]
    done = subprocess.run([*command, "--workers", "1"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def run_all(train: Path, test: Path, peers: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the result of each model of Paceline and of each setting of the peers."""
    for model in ("lr", "fm"):
        report = train_paceline(train, test, model)
        yield {
            "name": f"paceline {model}",
            "auc": report["auc"],
            "log_loss": report["log_loss"],
            "settings": report["settings"],
        }
    prepare_kernels()
    rows = read_rows([train, test])
    for name in peers:
        if find_spec(name) is None:
            print(f"{name} is not installed: left out", file=sys.stderr)
            continue
        run, tried = PEERS[name]
        for settings in tried:
            start = time.perf_counter()
            p = np.clip(run(rows[0], rows[1], settings), 1e-7, 1 - 1e-7)
            y = rows[1].labels
            loss = float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())
            yield {
                "name": name, "auc": float(auc(y.astype(np.float32), p.astype(np.float32))), "log_loss": loss,
                "seconds": time.perf_counter() - start, "settings": dict(settings),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"names from {', '.join(PEERS)}; default: all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",") if arguments.peers else []
    if set(peers) - set(PEERS):
        parser.error(f"--peers {arguments.peers}: expected names from {', '.join(PEERS)}")
    for row in run_all(arguments.train, arguments.test, peers):
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            given = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
            print(f"{row['name']:12} AUC {row['auc']:.4f}  log loss {row['log_loss']:.4f}  {given}", flush=True)


if __name__ == "__main__":
    main()

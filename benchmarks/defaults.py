"""Compare the defaults of `paceline train` with tuned peers, on generated data.

    pip install 'paceline[sklearn,bench]'
    python benchmarks/defaults.py [names...] [--peers peers.json] [--json] [-- --workers 4 --consistency eventual]
    python benchmarks/defaults.py [names...] --model fm [--json] [-- ...]

A known model generates each data set, with 20,000 test rows or more. `paceline train` runs with its defaults and with
the options after `--`. The peer is the best setting **on the test rows** of two programs:

- scikit-learn's logistic regression, with 7 L2 penalties, and on small data 7 L1 penalties. Numbers are standardized,
  divided by their root mean square, or replaced by logarithms.
- Vowpal Wabbit with 3 settings, if it is installed.

A program without access to the test rows cannot choose this setting. The file `--peers` stores the peers' results.
`--model` (fm, ffm, deepfm, dcn) trains this model and a logistic regression, and prints the difference, without a peer.
If the model needs columns, numbers without names are written as columns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

Reals = npt.NDArray[np.floating[Any]]
VW = """
import sys, vowpalwabbit
train = f"{sys.argv[1]} --passes {sys.argv[2]} -c -k --holdout_off --quiet -d train.vw -f vw.model"
vowpalwabbit.Workspace(train).finish()
vowpalwabbit.Workspace("-t --quiet -i vw.model -d test.vw -p scores.txt").finish()
"""
LOGISTIC = "--loss_function logistic"
VW_SETTINGS = ((LOGISTIC, 1), (LOGISTIC, 8), (f"{LOGISTIC} --ftrl", 4))
PENALTIES = 10.0 ** np.arange(-4, 3)
SMALL = 1_500_000  # number of pairs (feature, value); with more pairs, L1 penalties are not tried
TEST_ROWS = 20_000
ALLOWED = 0.003


@dataclass
class Table:
    """Rows with labels. The features are a matrix `x`, or the columns `numbers` and `categories`."""

    labels: npt.NDArray[np.int64]
    x: Any = None
    numbers: Mapping[str, Reals] = field(default_factory=dict)
    categories: dict[str, npt.NDArray[np.str_]] = field(default_factory=dict)

    def take(self, rows: Any) -> Table:
        """Return the selected rows."""
        return Table(
            self.labels[rows],
            None if self.x is None else self.x[rows],
            {name: column[rows] for name, column in self.numbers.items()},
            {name: column[rows] for name, column in self.categories.items()},
        )

    def dense(self) -> Reals:
        """Return the numbers of all rows as columns. If there are none, return a column of zeros."""
        columns = list(self.numbers.values()) or [np.zeros(len(self.labels))]
        return np.column_stack(columns) if self.x is None else np.asarray(self.x, np.float64)

    def with_columns(self) -> Table:
        """Return the table with a column for each number of a dense `x`."""
        if self.x is None or sp.issparse(self.x):
            return self
        return Table(self.labels, None, {f"x{at}": column for at, column in enumerate(self.x.T)})

    def write(self, stem: Path) -> Path:
        """Write a CSV file if there are columns, otherwise a libsvm file. Return its path."""
        if self.x is not None:
            path = stem.with_suffix(".libsvm")
            dump_svmlight_file(self.x, self.labels, str(path), zero_based=False)
            return path
        path = stem.with_suffix(".csv")
        cells: dict[str, list[str]] = {"label": self.labels.astype(str).tolist()}
        cells |= {name: [f"{value:.6g}" for value in column] for name, column in self.numbers.items()}
        cells |= {name: column.tolist() for name, column in self.categories.items()}
        rows = (",".join(row) for row in zip(*cells.values(), strict=True))
        path.write_text("\n".join([",".join(cells), *rows]) + "\n")
        return path


Generator = Callable[[np.random.Generator, int], Table]
SETS: dict[str, tuple[int, int, Generator]] = {}


def data_set(rows: int, test: int = TEST_ROWS) -> Callable[[Generator], Generator]:
    """Register a generator under its name, with its numbers of training and test rows."""

    def enter(generator: Generator) -> Generator:
        SETS[generator.__name__.replace("_", "-")] = (rows, test, generator)
        return generator

    return enter


def draw(rng: np.random.Generator, margins: Reals, *, rate: float = 0.35, strength: float = 1.5) -> Any:
    """Draw labels from margins, scaled to a standard deviation of `strength`. About the fraction `rate` is 1."""
    margins = (margins - margins.mean()) / margins.std() * strength
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-margins - middle))).mean() < rate else (low, middle)
    return (rng.random(len(margins)) < 1 / (1 + np.exp(-margins - low))).astype(np.int64)


@data_set(500)
def dense_small(rng: np.random.Generator, n: int) -> Table:
    x = rng.standard_normal((n, 10))
    return Table(draw(rng, x @ rng.standard_normal(10)), x)


@data_set(20_000)
def dense_unscaled(rng: np.random.Generator, n: int) -> Table:
    x = rng.standard_normal((n, 20))
    labels = draw(rng, x @ rng.standard_normal(20))
    return Table(labels, x * 10.0 ** rng.uniform(-3, 4, 20) + 10.0 ** rng.uniform(-2, 3, 20))


@data_set(20_000)
def dense_correlated(rng: np.random.Generator, n: int) -> Table:
    factors = rng.standard_normal((n, 8))
    x = factors @ rng.standard_normal((8, 100)) + 0.3 * rng.standard_normal((n, 100))
    return Table(draw(rng, x @ rng.standard_normal(100)), x)


@data_set(420)
def small_and_wide(rng: np.random.Generator, n: int) -> Table:
    x = rng.standard_normal((n, 200))
    return Table(draw(rng, x @ (rng.standard_normal(200) * (rng.random(200) < 0.2)), strength=2.5), x)


@data_set(2_000)
def few_of_many(rng: np.random.Generator, n: int) -> Table:
    x = rng.standard_normal((n, 500))
    return Table(draw(rng, x[:, :6] @ rng.standard_normal(6), strength=2.0), x)


@data_set(80)
def far_wider_than_long(rng: np.random.Generator, n: int) -> Table:
    factors = rng.standard_normal((n, 5))
    x = factors @ rng.standard_normal((5, 1000)) + 2 * rng.standard_normal((n, 1000))
    return Table(draw(rng, factors @ rng.standard_normal(5), rate=0.5, strength=3.0), x)


@data_set(300)
def separable_small(rng: np.random.Generator, n: int) -> Table:
    x = rng.standard_normal((n, 15))
    return Table((x @ rng.standard_normal(15) > 0).astype(np.int64), x)


@data_set(20_000)
def heavy_tails(rng: np.random.Generator, n: int) -> Table:
    logs = rng.standard_normal((n, 20))
    return Table(draw(rng, logs @ rng.standard_normal(20)), np.exp(1.5 * logs))


def text(rng: np.random.Generator, n: int, words: int = 30_000, length: float = 60.0) -> Any:
    """Return counts of words whose frequencies follow Zipf's law (CSR matrix)."""
    shares = 1.0 / np.arange(1, words + 1) ** 1.05
    sizes = rng.poisson(length, n) + 1
    drawn = rng.choice(words, sizes.sum(), p=shares / shares.sum())
    x = sp.csr_matrix((np.ones(len(drawn)), (np.repeat(np.arange(n), sizes), drawn)), (n, words))
    x.sum_duplicates()
    return x


@data_set(20_000)
def text_tfidf(rng: np.random.Generator, n: int) -> Table:
    x = text(rng, n)
    x = x @ sp.diags(np.log(n / (1 + np.bincount(x.indices, minlength=x.shape[1]))).clip(0.1))
    x = (sp.diags(1 / np.sqrt(x.multiply(x).sum(axis=1).A1)) @ x).tocsr()
    return Table(draw(rng, x @ rng.standard_normal(x.shape[1])), x)


@data_set(20_000)
def text_counts(rng: np.random.Generator, n: int) -> Table:
    x = text(rng, n)
    return Table(draw(rng, x @ (rng.standard_normal(x.shape[1]) * (rng.random(x.shape[1]) < 0.1))), x)


@data_set(50_000)
def sparse_binary(rng: np.random.Generator, n: int) -> Table:
    x = (sp.random(n, 300, 0.04, "csr", random_state=rng) > 0).astype(np.float64)
    return Table(draw(rng, x @ rng.standard_normal(300), rate=0.03, strength=2.0), x)


def categories(rng: np.random.Generator, n: int, sizes: tuple[int, ...]) -> tuple[dict[str, Any], Reals]:
    """Return columns of categories, and each row's sum of the effects of its values."""
    columns, margins = {}, np.zeros(n)
    for at, size in enumerate(sizes):
        shares = 1.0 / np.arange(1, size + 1) ** 0.9
        drawn = rng.choice(size, n, p=shares / shares.sum())
        names = np.array([f"v{value:x}" for value in rng.permutation(size)])
        columns[f"c{at}"] = names[drawn]
        margins += rng.standard_normal(size)[drawn]
    return columns, margins


@data_set(2_000)
def categories_small(rng: np.random.Generator, n: int) -> Table:
    columns, margins = categories(rng, n, (3, 8, 20, 50, 200))
    return Table(draw(rng, margins), categories=columns)


@data_set(100_000)
def categories_many(rng: np.random.Generator, n: int) -> Table:
    columns, margins = categories(rng, n, (2, 7, 24, 100, 1_000, 20_000))
    return Table(draw(rng, margins, rate=0.2), categories=columns)


@data_set(150_000, test=200_000)
def rare_positives(rng: np.random.Generator, n: int) -> Table:
    columns, margins = categories(rng, n, (5, 30, 300))
    amount = rng.lognormal(3.0, 1.0, n)
    return Table(draw(rng, margins + np.log(amount), rate=0.002, strength=2.0), None, {"amount": amount}, columns)


@data_set(30_000)
def mixed_columns(rng: np.random.Generator, n: int) -> Table:
    columns, margins = categories(rng, n, (4, 12, 60))
    age, income, score = rng.integers(18, 80, n) * 1.0, rng.lognormal(10, 0.8, n), rng.standard_normal(n)
    margins = margins + 0.05 * age + 1.5 * np.log(income) + score
    return Table(draw(rng, margins), None, {"age": age, "income": income, "score": score}, columns)


@data_set(10_000)
def heavy_tails_linear(rng: np.random.Generator, n: int) -> Table:
    amounts = rng.lognormal(0, 1.3, (n, 6))
    numbers = {f"amount{at}": amounts[:, at] for at in range(6)}
    margins = (amounts @ np.array([0.5, -0.4, 0.3, -0.2, 0.4, 0.1])).clip(-12, 12)
    return Table(draw(rng, margins, strength=2.0), None, numbers)


@data_set(3_000)
def few_valued_counts(rng: np.random.Generator, n: int) -> Table:
    numbers = {f"n{at}": rng.poisson(3 + at, n) * 1.0 for at in range(8)}
    weights = rng.standard_normal(8)
    margins = np.sum([weight * column for weight, column in zip(weights, numbers.values(), strict=True)], axis=0)
    return Table(draw(rng, margins), None, numbers)


@data_set(20_000)
def codes_with_missing(rng: np.random.Generator, n: int) -> Table:
    columns, margins = categories(rng, n, (300, 40))
    codes = {name: np.unique(column, return_inverse=True)[1] + 100_000 for name, column in columns.items()}
    is_present = rng.random(n) > 0.01
    written = {
        f"{name}_id": np.where(is_present, np.char.add(code.astype(str), ".0"), "") for name, code in codes.items()
    }
    return Table(draw(rng, margins), None, {"score": rng.standard_normal(n)}, written)


@data_set(20_000)
def bent_ages(rng: np.random.Generator, n: int) -> Table:
    age = rng.integers(18, 90, n)
    noise = {f"x{at}": rng.standard_normal(n) for at in range(4)}
    return Table(draw(rng, 0.003 * (age - 50.0) ** 2), None, noise, {"age": age.astype(str)})


@data_set(60_000)
def drifting(rng: np.random.Generator, n: int) -> Table:
    x = (sp.random(n, 2_000, 0.01, "csr", random_state=rng) > 0).astype(np.float64)
    first, last = rng.standard_normal((2, 2_000))
    share = np.clip(np.arange(n) / (n - TEST_ROWS), 0, 1)  # the drift ends before the test rows
    return Table(draw(rng, (1 - share) * (x @ first) + share * (x @ last)), x)


@data_set(40_000)
def sorted_by_label(rng: np.random.Generator, n: int) -> Table:
    table = mixed_columns(rng, n)
    train, test = np.arange(n - TEST_ROWS), np.arange(n - TEST_ROWS, n)
    return table.take(np.concatenate([train[np.argsort(table.labels[train], kind="stable")], test]))


@data_set(20_000)
def copies(rng: np.random.Generator, n: int) -> Table:
    columns, margins = categories(rng, n, (10, 100, 1_000, 5_000))
    table = Table(draw(rng, margins), categories=columns)
    train = rng.integers(0, (n - TEST_ROWS) // 5, n - TEST_ROWS)  # about five copies of each row
    return table.take(np.concatenate([train, np.arange(n - TEST_ROWS, n)]))


def pair_sums(rng: np.random.Generator, codes: list[npt.NDArray[np.int64]]) -> Reals:
    """Return each row's sum of inner products over all pairs of columns. Every code has 3 random factors."""
    factors = [rng.standard_normal((int(column.max()) + 1, 3))[column] for column in codes]
    return np.asarray((np.sum(factors, axis=0) ** 2 - np.sum(np.square(factors), axis=0)).sum(axis=1))


def pairs(rng: np.random.Generator, n: int, sizes: tuple[int, ...], share: float) -> Table:
    """Return categories. Pairs of values explain `share` of the margins' variance. Single values explain the rest."""
    columns, margins = categories(rng, n, sizes)
    together = pair_sums(rng, [np.unique(column, return_inverse=True)[1] for column in columns.values()])
    margins = np.sqrt(1 - share) * margins / margins.std() + np.sqrt(share) * together / together.std()
    return Table(draw(rng, margins), categories=columns)


@data_set(2_000)
def pairs_small(rng: np.random.Generator, n: int) -> Table:
    return pairs(rng, n, (5, 8, 12, 20), 0.4)


@data_set(20_000)
def pairs_strong(rng: np.random.Generator, n: int) -> Table:
    return pairs(rng, n, (10, 20, 50, 100, 500), 0.4)


@data_set(60_000)
def pairs_weak(rng: np.random.Generator, n: int) -> Table:
    return pairs(rng, n, (10, 20, 50, 100, 500, 3_000), 0.1)


@data_set(45_000)
def pairs_alone(rng: np.random.Generator, n: int) -> Table:
    users, items = rng.integers(0, 300, n), rng.integers(0, 200, n)
    columns = {"user": np.char.add("u", users.astype(str)), "item": np.char.add("i", items.astype(str))}
    return Table(draw(rng, pair_sums(rng, [users, items]), rate=0.5, strength=1.2), categories=columns)


@data_set(2_000)
def dense_pairs(rng: np.random.Generator, n: int) -> Table:
    x, factors = rng.standard_normal((n, 10)), rng.standard_normal((10, 2))
    margins, together = x @ rng.standard_normal(10), ((x @ factors) ** 2 - x**2 @ factors**2).sum(axis=1)
    return Table(draw(rng, np.sqrt(0.6) * margins / margins.std() + np.sqrt(0.4) * together / together.std()), x)


def real(rng: np.random.Generator, data: Any) -> Table:
    order = rng.permutation(len(data.target))
    return Table(
        data.target[order].astype(np.int64), None, {f"x{at}": column[order] for at, column in enumerate(data.data.T)}
    )


@data_set(426, test=143)
def breast_cancer(rng: np.random.Generator, n: int) -> Table:
    return real(rng, load_breast_cancer())


@data_set(1_347, test=450)
def digits_above_4(rng: np.random.Generator, n: int) -> Table:
    table = real(rng, load_digits())
    return Table((table.labels > 4).astype(np.int64), None, table.numbers)


def split(name: str) -> tuple[Table, Table]:
    """Generate a data set and return its training and test rows."""
    rows, test, generator = SETS[name]
    table = generator(np.random.default_rng(sum(name.encode())), rows + test)
    return table.take(np.arange(rows)), table.take(np.arange(rows, rows + test))


def signed_logs(x: Reals) -> Reals:
    """Return sign(x) log(1 + |x|)."""
    return np.copysign(np.log1p(np.abs(x)), x)


def designs(train: Table, test: Table) -> Iterator[tuple[Any, Any]]:
    """Yield the matrices that an experienced user of scikit-learn would try."""
    if train.x is not None and sp.issparse(train.x):
        scale = np.sqrt(train.x.multiply(train.x).mean(axis=0).A1)
        yield train.x, test.x
        yield tuple((table.x @ sp.diags(1 / np.where(scale > 0, scale, 1))).tocsr() for table in (train, test))
        return
    one_hot = OneHotEncoder(handle_unknown="ignore")
    parts: tuple[list[Any], list[Any]] = [], []
    if train.categories:
        one_hot.fit(np.column_stack(list(train.categories.values())))
        for table, part in zip((train, test), parts, strict=True):
            part.append(one_hot.transform(np.column_stack(list(table.categories.values()))))
    dense = [table.dense() for table in (train, test)]
    for transform in (np.positive, signed_logs) if train.numbers else (np.positive,):
        numbers = [transform(matrix) for matrix in dense]
        mean, scale = numbers[0].mean(axis=0), numbers[0].std(axis=0)
        numbers = [(matrix - mean) / np.where(scale > 0, scale, 1) for matrix in numbers]
        if train.categories:
            yield tuple(sp.hstack([*part, matrix]).tocsr() for part, matrix in zip(parts, numbers, strict=True))
        else:
            yield numbers[0], numbers[1]


def best_peer(train: Table, test: Table, folder: Path) -> tuple[str, float]:
    """Return the best peer on the test rows, and its AUC."""
    found: list[tuple[float, str]] = []
    for at, (x, x_test) in enumerate(designs(train, test)):
        pairs = x.nnz if sp.issparse(x) else x.size
        for ratio in (0.0, 1.0) if pairs <= SMALL else (0.0,):
            for c in PENALTIES:
                solver = "liblinear" if ratio or pairs > 20 * len(train.labels) else "lbfgs"
                model = LogisticRegression(C=c, l1_ratio=ratio, solver=solver, max_iter=300)
                auc = roc_auc_score(test.labels, model.fit(x, train.labels).decision_function(x_test))
                found.append((float(auc), f"scikit-learn, design {at}, {'L1' if ratio else 'L2'}, C={c:g}"))
    found += vowpal_wabbit(train, test, folder)
    auc, name = max(found)
    return name, auc


def vowpal_wabbit(train: Table, test: Table, folder: Path) -> Iterator[tuple[float, str]]:
    """Yield the AUC and name of each Vowpal Wabbit setting, if it is installed."""
    try:
        import vowpalwabbit  # noqa: F401
    except ImportError:
        return
    for table, name in ((train, "train.vw"), (test, "test.vw")):
        (folder / name).write_text("".join(vw_lines(table)))
    for options, passes in VW_SETTINGS:
        command = [sys.executable, "-c", VW, f"-b 22 {options}", str(passes)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        yield float(roc_auc_score(test.labels, np.loadtxt(folder / "scores.txt"))), f"vw {options} --passes {passes}"


def vw_lines(table: Table) -> Iterator[str]:
    x = None if table.x is None else sp.csr_matrix(table.x)
    for row, label in enumerate(table.labels):
        pairs = slice(0, 0) if x is None else slice(x.indptr[row], x.indptr[row + 1])
        words = (
            []
            if x is None
            else [f"{key}:{value:.6g}" for key, value in zip(x.indices[pairs], x.data[pairs], strict=True)]
        )
        words += [f"{name}:{column[row]:.6g}" for name, column in table.numbers.items()]
        words += [f"{name}={column[row]}" for name, column in table.categories.items()]
        yield f"{1 if label else -1} | {' '.join(words)}\n"


def train_with_defaults(train: Path, test: Path, options: list[str]) -> dict[str, Any]:
    """Run `paceline train` and return its JSON output."""
    command = [sys.executable, "-m", "paceline", "train", str(train), "--eval", str(test), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def compare_with_lr(name: str, model: str, options: list[str]) -> dict[str, Any]:
    """Train a model and a logistic regression. Return the model's scores, and how much better they are."""
    with tempfile.TemporaryDirectory(prefix="paceline-defaults-") as folder:
        tables = [table if model == "fm" else table.with_columns() for table in split(name)]
        train, test = (table.write(Path(folder, stem)) for table, stem in zip(tables, ("train", "test"), strict=True))
        if model != "fm" and train.suffix != ".csv":
            return {"name": name, "rows": len(tables[0].labels), "left_out": f"{model} needs columns"}
        linear, result = (train_with_defaults(train, test, ["--model", kind, *options]) for kind in ("lr", model))
    return {
        "name": name, "rows": len(tables[0].labels), "model": model, "auc": result["auc"],
        "auc_gain": result["auc"] - linear["auc"], "log_loss": result["log_loss"],
        "log_loss_gain": linear["log_loss"] - result["log_loss"], "settings": result["settings"],
    }  # fmt: skip


def compare_models(names: list[str], model: str, options: list[str], *, as_json: bool) -> None:
    """Print the comparison of a model with logistic regression."""
    for name in names:
        row = compare_with_lr(name, model, options)
        if as_json:
            print(json.dumps(row), flush=True)
        elif "left_out" in row:
            print("{name:20} {rows:7,} rows  left out: {left_out}".format(**row), flush=True)
        else:
            found = row["settings"]
            given = ", ".join(
                f"{setting} {found[setting]:.3g}" for setting in found if setting.startswith(("factor", "tower"))
            )
            print(
                "{name:20} {rows:7,} rows  {model}  AUC {auc:.4f} ({auc_gain:+.4f})  log loss {log_loss:.4f} "
                "({log_loss_gain:+.4f})  {epochs} passes, ".format(**row, epochs=found["epochs"])
                + given,
                flush=True,
            )


def main() -> None:
    own_arguments, options = sys.argv[1:], []
    if "--" in own_arguments:
        options = own_arguments[own_arguments.index("--") + 1 :]
        own_arguments = own_arguments[: own_arguments.index("--")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"data sets: {', '.join(SETS)}; default: all")
    parser.add_argument("--peers", type=Path, default=Path("peers.json"), help="cache of the peers' results")
    parser.add_argument("--model", choices=("fm", "ffm", "deepfm", "dcn"), help="compare it with logistic regression")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(own_arguments)
    warnings.simplefilter("ignore")
    if arguments.model is not None:
        compare_models(arguments.names or list(SETS), arguments.model, options, as_json=arguments.json)
        return
    peers = json.loads(arguments.peers.read_text()) if arguments.peers.exists() else {}
    worse = []
    for name in arguments.names or SETS:
        with tempfile.TemporaryDirectory(prefix="paceline-defaults-") as folder:
            train, test = split(name)
            if name not in peers:
                peers[name] = best_peer(train, test, Path(folder))
                arguments.peers.write_text(json.dumps(peers, indent=1))
            paths = [table.write(Path(folder, stem)) for table, stem in ((train, "train"), (test, "test"))]
            result = train_with_defaults(paths[0], paths[1], options)
        peer, auc = peers[name]
        row = {
            "name": name, "rows": len(train.labels), "auc": result["auc"], "less_peer": result["auc"] - auc,
            "calibration": result["calibration"], "epochs": result["settings"]["epochs"],
            "alpha": result["settings"].get("alpha"), "l1": result["settings"].get("l1"),
            "seconds": result["seconds"], "peer": peer,
        }  # fmt: skip
        worse += [name] if row["less_peer"] < -ALLOWED else []
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                "{name:20} {rows:7,} rows  AUC {auc:.4f} ({less_peer:+.4f})  calibration {calibration:.3f}  "
                "{epochs:2} passes, alpha {alpha:.3g}, L1 {l1:g}, {seconds:5.1f} s  peer: {peer}".format(**row),
                flush=True,
            )
    if not arguments.json:
        print(f"worse than the peer by more than {ALLOWED}: {', '.join(worse) or 'none'}")


if __name__ == "__main__":
    main()

"""The estimators conform to scikit-learn. They train like ``paceline train``, in this process and on a cluster."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.errors import UsageError

pytest.importorskip("sklearn")

from scipy import sparse
from scipy.special import logsumexp
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

from paceline.inference.export import export_model
from paceline.inference.merging import merge_models
from paceline.sklearn import FactorizationMachine, LinearRegression, LogisticRegression, PoissonRegressor

pytestmark = pytest.mark.usefixtures("warm_clusters")


class Column(list[Any]):
    """A column with a dtype, like a column of pandas."""

    dtype: Any

    def __init__(self, values: Any, dtype: str) -> None:
        super().__init__(values)
        self.dtype = np.dtype(dtype)


class Frame:
    """A minimal DataFrame."""

    def __init__(self, **columns: Column) -> None:
        self._columns = columns
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]


def examples(num_rows: int = 2000, num_features: int = 300) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return sparse examples whose classes depend on their features."""
    random = np.random.default_rng(1)
    X = sparse.random_array((num_rows, num_features), density=0.05, rng=random, format="csr")
    margins = X @ random.normal(0, 3, num_features)
    return X, np.where(random.random(num_rows) < 1 / (1 + np.exp(-margins)), "yes", "no")


def pairs(num_rows: int = 3000) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return sparse examples of two categories. The class depends only on the pair of categories."""
    random = np.random.default_rng(2)
    categories = random.integers(0, 6, (num_rows, 2))
    features = (np.repeat(np.arange(num_rows), 2), (categories + np.array([0, 6])).reshape(-1))
    is_likely = categories.sum(axis=1) % 2 == 0
    y = np.where(random.random(num_rows) < np.where(is_likely, 0.8, 0.2), "yes", "no")
    return sparse.csr_array((np.ones(2 * num_rows), features), (num_rows, 12)), y


EXCEPTIONS = dict.fromkeys(
    ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data"),
    "what is chosen by a look at the examples depends on how many rows there are",
)


GIVEN: dict[str, Any] = {"factor_lr": 0.1, "factor_l2": 0.5, "factor_min_count": 300}
"""Settings of factors. If they are given, no trial runs, which would take a second or two."""


@pytest.mark.parametrize(
    "estimator",
    [
        LogisticRegression(epochs=4),
        pytest.param(FactorizationMachine(**GIVEN, epochs=4, l1=0.0), marks=pytest.mark.thorough),
        pytest.param(LinearRegression(epochs=8), marks=pytest.mark.thorough),
        pytest.param(PoissonRegressor(epochs=8), marks=pytest.mark.thorough),
        pytest.param(LogisticRegression(), marks=pytest.mark.thorough),  # without epochs, it tries several settings
    ],
)
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator: Any) -> None:
    failed = [
        (check["check_name"], check["exception"])
        for check in check_estimator(estimator, on_skip=None, on_fail=None, expected_failed_checks=EXCEPTIONS)
        if check["status"] not in ("passed", "skipped", "xfail")
    ]
    assert failed == []


def test_sparse_and_dense_examples_give_the_same_model() -> None:
    X, y = examples(800)
    model = LogisticRegression(l1=0.1, random_state=1, epochs=8).fit(X, y)
    assert model.classes_.tolist() == ["no", "yes"]
    assert roc_auc_score(y, model.predict_proba(X)[:, 1]) > 0.8
    dense = LogisticRegression(l1=0.1, random_state=1, epochs=8).fit(X.toarray(), y)
    np.testing.assert_array_equal(dense.decision_function(X), model.decision_function(X))
    np.testing.assert_allclose(X @ model.coef_[0] + model.intercept_, model.decision_function(X), atol=1e-5)
    np.testing.assert_array_equal(model.predict(X) == "yes", model.decision_function(X) > 0)


def test_classification_with_several_classes(tmp_path: Path) -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = LogisticRegression(random_state=0).fit(X, names)
    assert model.score(X, names) > 0.95
    margins, probabilities = model.decision_function(X), model.predict_proba(X)
    assert margins.shape == (150, 3)
    assert (model.coef_.shape, model.intercept_.shape) == ((3, 4), (3,))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    np.testing.assert_allclose(np.log(probabilities), margins)
    logits = X @ model.coef_.T + model.intercept_
    np.testing.assert_allclose(logits - logsumexp(logits, axis=1, keepdims=True), margins, atol=1e-4)
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(X)).all()
    model.save(tmp_path / "model")
    np.testing.assert_allclose(paceline.load(tmp_path / "model").predict(X), probabilities, atol=1e-6)
    weights = {"setosa": 1, "versicolor": 9, "virginica": 1}
    heavy = LogisticRegression(random_state=0, class_weight=weights, epochs=8).fit(X, names)
    assert (heavy.predict(X) == "versicolor").sum() > (model.predict(X) == "versicolor").sum()
    again = LogisticRegression(epochs=8).partial_fit(X[::2], names[::2], classes=names[::50])
    copy = pickle.loads(pickle.dumps(again.partial_fit(X[1::2], names[1::2])))
    np.testing.assert_array_equal(copy.predict_proba(X), again.predict_proba(X))


def test_regression_of_quantities_and_counts(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    X = random.normal(0, [1, 10, 100], (2000, 3))
    margins = X @ [0.3, 0.02, 0.003] + 1
    for kind, y in (
        (LinearRegression, 1e6 * margins + random.normal(0, 1e4, 2000)),
        (PoissonRegressor, np.exp(margins)),
    ):
        model = kind(random_state=0, epochs=20).fit(X, y)
        assert model.score(X, y) > 0.99
        margin = X @ model.coef_ + model.intercept_
        expected = model.predict(X) if kind is LinearRegression else np.log(model.predict(X))
        np.testing.assert_allclose(margin, expected, rtol=1e-3, atol=1e-3)
        model.save(tmp_path / kind.__name__)
        np.testing.assert_allclose(paceline.load(tmp_path / kind.__name__).predict(X), model.predict(X), rtol=1e-5)
        weighted = kind(random_state=0, epochs=2).fit(X, y, sample_weight=np.where(margins > 1, 9.0, 1.0))
        assert weighted.predict(X)[margins > 1.5].sum() != model.predict(X)[margins > 1.5].sum()
        assert kind().partial_fit(X[:1000], y[:1000]).partial_fit(X[1000:], y[1000:]).score(X, y) > 0.8


@pytest.mark.parametrize(
    ("kind", "y", "message"),
    [
        (LinearRegression, ["a", "b", "c"], "could not convert|expected numbers"),
        (LinearRegression, [1.0, 2.0, 1e39], "beyond float32"),
        (PoissonRegressor, [1.0, 2.0, -1.0], "y has -1"),
        (PoissonRegressor, [0, 0, 0], "no count above 0"),
    ],
)
def test_invalid_targets_are_refused(kind: type[Any], y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind().fit(np.eye(3), y)


def test_a_pickled_model_continues_training_like_the_original() -> None:
    X, y = examples()
    model = LogisticRegression().partial_fit(X[:1000], y[:1000], classes=["no", "yes"])
    copy = pickle.loads(pickle.dumps(model))
    for estimator in (model, copy):
        estimator.partial_fit(X[1000:], y[1000:])
    np.testing.assert_array_equal(copy.decision_function(X), model.decision_function(X))
    assert roc_auc_score(y, model.decision_function(X)) > 0.75
    assert not hasattr(clone(model), "classes_")


def test_weights_of_examples() -> None:
    X, y = examples(200)
    twice = np.where(y == "yes", 2.0, 1.0)
    plain, weighted = (LogisticRegression(random_state=0).fit(X, y, sample_weight=weights) for weights in (None, twice))
    risen = np.mean(weighted.decision_function(X)) - np.mean(plain.decision_function(X))
    assert 0.3 < risen / np.log(2) < 2
    frame = Frame(city=Column(["a", "b"] * 10, "O"))
    model = LogisticRegression(l1=0.0, epochs=50).fit(frame, [0, 1] * 10, sample_weight=[1.0, 3.0] * 10)
    assert model.predict(frame).tolist() == [0, 1] * 10
    with pytest.raises(UsageError, match="sample_weight is not supported on a cluster"):
        LogisticRegression(workers=1).fit(X, y, sample_weight=twice)


def test_searching_parameters() -> None:
    X, y = examples(600)
    model = LogisticRegression(random_state=1, epochs=4)
    search = GridSearchCV(model, {"l1": [0.1, 1000.0]}, scoring="roc_auc", cv=3).fit(X, y)
    assert search.best_params_ == {"l1": 0.1}


def test_non_numeric_columns_are_hashed(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    city = [f"city {number}" for number in random.integers(0, 9, 1000)]
    size = random.random(1000)
    y = (np.array(city) < "city 4").astype(int)
    frame = Frame(city=Column(city, "O"), size=Column(size, "f8"))
    model = LogisticRegression(l1=0.0, random_state=1).fit(frame, y)
    assert model.score(frame, y) == 1.0
    assert model.feature_names_in_.tolist() == ["city", "size"]
    with pytest.raises(UsageError, match="no column city"):
        model.predict(Frame(size=Column(size, "f8")))
    with pytest.raises(UsageError, match="X is a ndarray: expected a DataFrame"):
        model.predict(np.zeros((3, 2)))
    with pytest.raises(AttributeError, match="were hashed"):
        model.coef_  # noqa: B018
    model.save(tmp_path / "model")
    loaded = paceline.load(tmp_path / "model").predict(frame)
    np.testing.assert_allclose(loaded, model.predict_proba(frame)[:, 1], atol=1e-6)


def test_tables_of_arrow() -> None:
    arrow = pytest.importorskip("pyarrow")
    random = np.random.default_rng(0)
    size, city = random.normal(size=400), np.array(["a", "b", "c"])[random.integers(0, 3, 400)]
    y = (size + (city == "b") + 0.3 * random.logistic(size=400) > 0.4).astype(int)
    table = arrow.table(
        {"size": size, "city": city, "is_large": size > 0, "when": arrow.array(range(400), arrow.date32())}
    )
    with pytest.warns(UserWarning, match="columns of times are left out: when"):
        model = LogisticRegression(random_state=0).fit(table, arrow.chunked_array([y]))
    assert model.feature_names_in_.tolist() == ["city", "size", "is_large"]
    assert model.score(table, y) > 0.8
    frame = Frame(size=Column(size, "f8"), city=Column(city, "O"), is_large=Column(size > 0, "b1"))
    same = LogisticRegression(random_state=0).fit(frame, y)
    np.testing.assert_array_equal(model.predict_proba(table), same.predict_proba(frame))
    numbers = table.select(["size", "is_large"])
    model = LogisticRegression(random_state=0).fit(numbers, y)
    assert model.feature_names_in_.tolist() == ["size", "is_large"]
    assert model.coef_.shape == (1, 2)
    assert model.score(numbers, y) > 0.7


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (
            np.array([["b", "1"]] * 4),
            "X or y holds the text 'b': expected numbers",
        ),
        ([["a"]] * 4, "X or y holds the text 'a': expected numbers"),
        ({"a": [1, 2, 3, 4]}, "X is a dict: expected an array, a sparse matrix or a DataFrame"),
    ],
)
def test_non_numeric_examples_are_rejected(X: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LogisticRegression().fit(X, [0, 1, 0, 1])
    model = LogisticRegression().fit([[0.0], [1.0]] * 8, [0, 1] * 8)
    with pytest.raises(UsageError, match=message):
        model.predict(X)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_frames_of_packages(package: str) -> None:
    frames = pytest.importorskip(package)
    columns = {"city": ["a", "b"] * 50, "size": [0.5] * 100}
    y = [1, 0] * 50
    assert LogisticRegression(l1=0.0).fit(frames.DataFrame(columns), y).score(frames.DataFrame(columns), y) == 1.0


def test_a_saved_model_predicts_as_the_estimator(tmp_path: Path) -> None:
    X, y = examples(500)
    model = LogisticRegression().fit(X, y)
    model.save(tmp_path / "model")
    loaded = paceline.load(tmp_path / "model").predict(X)
    np.testing.assert_allclose(loaded, model.predict_proba(X)[:, 1], atol=1e-6)


def test_training_on_a_local_cluster() -> None:
    X, y = examples(600)  # the examples form one shard, so both trainings have the same minibatches
    local = LogisticRegression(l1=0.1, epochs=1, shuffle=False).fit(X, y)
    clustered = LogisticRegression(l1=0.1, epochs=1, shuffle=False, workers=1, consistency="sequential").fit(X, y)
    np.testing.assert_allclose(clustered.decision_function(X), local.decision_function(X), atol=1e-4)
    with pytest.raises(UsageError, match="partial_fit trains in this process"):
        clustered.partial_fit(X, y)
    numbers = np.arange(600) % 7 * 1000.125
    clustered = LinearRegression(epochs=1, shuffle=False, workers=1, consistency="sequential").fit(X, numbers)
    local = LinearRegression(epochs=1, shuffle=False).fit(X, numbers)
    np.testing.assert_allclose(clustered.predict(X), local.predict(X), rtol=1e-4)


def test_a_factorization_machine_learns_effects_of_pairs() -> None:
    X, y = pairs()
    linear, machine = (
        model.fit(X[:2000], y[:2000])
        for model in (
            LogisticRegression(l1=0.0, random_state=0, epochs=8),
            FactorizationMachine(l1=0.0, random_state=0, epochs=10, **GIVEN),
        )
    )
    unseen = X[2000:].toarray(), y[2000:]
    assert linear.score(*unseen) < 0.55
    assert machine.score(*unseen) > 0.75  # the true probabilities reach 0.8
    settings = {**GIVEN, "factor_min_count": 1 << 20, "epochs": 8}
    without = FactorizationMachine(l1=0.0, random_state=0, **settings).fit(X[:2000], y[:2000])
    assert without.score(*unseen) < 0.55


def test_a_factorization_machine_depends_on_seed_and_settings_only() -> None:
    X, y = pairs(1000)
    settings: dict[str, Any] = {"dim": 3, "factor_lr": 0.1, "factor_l2": 0.0, "factor_min_count": 1, "l1": 0.0}
    settings["epochs"] = 4
    model = FactorizationMachine(random_state=0, **settings).fit(X, y)
    assert {name: clone(model).get_params()[name] for name in settings} == settings
    np.testing.assert_array_equal(clone(model).fit(X, y).decision_function(X), model.decision_function(X))
    for other in ({"dim": 4}, {"factor_lr": 0.2}, {"factor_l2": 1.0}, {"factor_min_count": 9}):
        changed = FactorizationMachine(random_state=0, **{**settings, **other}).fit(X, y)
        assert np.abs(changed.decision_function(X) - model.decision_function(X)).max() > 1e-4
    first, second = (FactorizationMachine(random_state=seed, shuffle=False, **settings).fit(X, y) for seed in (0, 1))
    assert not np.array_equal(first.decision_function(X), second.decision_function(X))


def test_a_factorization_machine_can_be_pickled_saved_and_trained_further(tmp_path: Path) -> None:
    X, y = pairs()
    model = FactorizationMachine(l1=0.0, lr=0.05, random_state=0, **GIVEN)
    for _ in range(4):
        model.partial_fit(X[:1500], y[:1500], classes=["no", "yes"])
    copy = pickle.loads(pickle.dumps(model))
    for estimator in (model, copy):
        estimator.partial_fit(X[1500:], y[1500:])
    np.testing.assert_array_equal(copy.decision_function(X), model.decision_function(X))
    assert model.score(X, y) > 0.75
    model.save(tmp_path / "model")
    loaded = paceline.load(tmp_path / "model").predict(X)
    np.testing.assert_allclose(loaded, model.predict_proba(X)[:, 1], atol=1e-6)


def test_exported_weights_predict_as_the_factorization_machine(tmp_path: Path) -> None:
    """The test computes the formula of the documentation with scaled values."""
    random = np.random.default_rng(4)
    X = random.normal(40, 15, (800, 3)) * [1, 10, 100]
    y = (X[:, 0] * X[:, 1] + random.normal(0, 5000, 800)) > 20_000
    model = FactorizationMachine(
        epochs=4, batch_size=16, l1=0.0, factor_min_count=10, random_state=0, dim=4, numeric_scale="standard"
    ).fit(X, y)
    model.save(tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "w.npz")
    arrays = np.load(tmp_path / "w.npz")
    for part in ("fm", "fm factors", "fm counts", "scaling"):
        assert arrays[f"{part}.keys"].tolist() == [0, 1, 2]
    scaled = (X - arrays["scaling.means"]) / arrays["scaling.scales"]
    v = arrays["fm factors.values"]
    pairs_of_features = (np.square(scaled @ v) - np.square(scaled) @ np.square(v)).sum(axis=1) / 2
    margins = arrays["fm.bias"] + scaled @ arrays["fm.values"][:, 0] + pairs_of_features
    np.testing.assert_allclose(margins, model.decision_function(X), rtol=1e-4, atol=1e-4)


def test_a_factorization_machine_of_a_frame(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    site, hour = random.integers(0, 4, (2, 2000))
    y = ((site + hour) % 2).tolist()
    frame = Frame(
        site=Column([f"site {number}" for number in site], "O"),
        hour=Column([f"{number} o'clock" for number in hour], "O"),
        size=Column(random.random(2000), "f8"),
    )
    model = FactorizationMachine(l1=0.0, epochs=10, random_state=0, **GIVEN).fit(frame, y)
    assert model.score(frame, y) == 1.0
    model.save(tmp_path / "model")
    loaded = paceline.load(tmp_path / "model").predict(frame)
    np.testing.assert_allclose(loaded, model.predict_proba(frame)[:, 1], atol=1e-6)


def test_training_a_factorization_machine_on_a_cluster(tmp_path: Path) -> None:
    X, y = pairs()
    model = FactorizationMachine(l1=0.0, epochs=8, random_state=0, workers=1, **GIVEN).fit(X, y)
    assert model.score(X, y) > 0.75
    model.save(tmp_path / "model")
    loaded = paceline.load(tmp_path / "model").predict(X)
    np.testing.assert_allclose(loaded, model.predict_proba(X)[:, 1], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "The 'epochs' parameter of LogisticRegression must be"),
        ({"batch_size": 2.5}, "The 'batch_size' parameter"),
        ({"update": "bfgs"}, "The 'update' parameter"),
        ({"lr": float("nan")}, "The 'lr' parameter"),
        ({"l1": -1}, "The 'l1' parameter"),
        ({"workers": 0}, "The 'workers' parameter"),
        ({"update": "sgd", "l1": 1.0}, "l1=1.0 is for update='ftrl', but update is 'sgd'"),
        ({"update": "adam", "beta": 1.0}, "beta=1.0 is for update='ftrl', but update is 'adam'"),
        ({"consistency": "often"}, "'often'"),
        ({"class_weight": "even"}, "The 'class_weight' parameter"),
        ({"class_weight": {"maybe": 2.0, "no": 1.0}}, "expected weights of the classes ['no', 'yes']"),
        ({"class_weight": {"no": -1.0}}, "class_weight={'no': -1.0}: expected finite weights"),
        ({"class_weight": {"no": 0.0, "yes": 0.0}}, "expected finite weights"),
        ({"workers": 1, "consistency": "often"}, "'often'"),
        ({"scheduler": "127.0.0.1:9"}, "PACELINE_SCHEDULER"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    X, y = examples(50)
    with pytest.raises(UsageError) as raised:
        LogisticRegression(**settings).fit(X, y)
    assert message in str(raised.value)


def test_invalid_classes_are_refused() -> None:
    X, y = examples(50)
    with pytest.raises(UsageError, match="y has one class"):
        LogisticRegression().fit(X, ["a"] * 50)
    with pytest.raises(UsageError, match="y has 3 classes"):
        FactorizationMachine().fit(X, np.arange(50) % 3)
    with pytest.raises(UsageError, match="needs all classes"):
        LogisticRegression().partial_fit(X, y)
    model = LogisticRegression().partial_fit(X, y, classes=["yes", "no"])
    with pytest.raises(UsageError, match="y has 'maybe': expected one of the classes"):
        model.partial_fit(X, ["maybe"] * 50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "The 'dim' parameter of FactorizationMachine must be"),
        ({"factor_lr": -1.0}, "The 'factor_lr' parameter"),
        ({"factor_min_count": -1}, "The 'factor_min_count' parameter"),
    ],
)
def test_invalid_settings_of_factors_are_refused(settings: dict[str, Any], message: str) -> None:
    X, y = examples(50)
    with pytest.raises(UsageError) as raised:
        FactorizationMachine(**settings).fit(X, y)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", [LogisticRegression, FactorizationMachine])
def test_weights_of_classes(kind: type[Any]) -> None:
    X, y = examples(400)
    keep = (y == "no") | (np.arange(400) % 8 == 0)
    X, y = X[keep], y[keep]
    counts = {name: int((y == name).sum()) for name in ("no", "yes")}
    named = {name: len(y) / (2 * count) for name, count in counts.items()}
    settings: dict[str, Any] = {"random_state": 0, "epochs": 2, **(GIVEN if kind is FactorizationMachine else {})}
    plain, balanced, by_class, by_example = (
        kind(**settings, class_weight=weights).fit(X, y, sample_weight=estimator).decision_function(X)
        for weights, estimator in (
            (None, None),
            ("balanced", None),
            (named, None),
            (None, [named[name] for name in y]),
        )
    )
    np.testing.assert_array_equal(balanced, by_class)
    np.testing.assert_allclose(balanced, by_example, atol=1e-6)
    assert balanced.mean() - plain.mean() > 0.3


def test_weights_of_classes_on_a_cluster_and_with_partial_fit() -> None:
    X, y = examples(600)
    settings: dict[str, Any] = {"l1": 0.1, "epochs": 1, "shuffle": False, "class_weight": {"no": 4.0, "yes": 1.0}}
    local = LogisticRegression(**settings).fit(X, y)
    clustered = LogisticRegression(**settings, workers=1, consistency="sequential").fit(X, y)
    np.testing.assert_allclose(clustered.decision_function(X), local.decision_function(X), atol=1e-4)
    part = LogisticRegression(**settings).partial_fit(X, y, classes=["no", "yes"])
    assert (
        part.decision_function(X).mean()
        < LogisticRegression().partial_fit(X, y, classes=["no", "yes"]).decision_function(X).mean()
    )
    with pytest.raises(UsageError, match="which partial_fit does not have"):
        LogisticRegression(class_weight="balanced").partial_fit(X, y, classes=["no", "yes"])


def test_nan_is_a_missing_value_and_infinity_is_refused() -> None:
    X, y = examples(50, 10)
    dense = X.toarray()
    dense[7, 3] = 0.0
    expected = LogisticRegression(epochs=1, random_state=1).fit(dense, y).decision_function(dense)
    dense[7, 3] = np.nan
    np.testing.assert_array_equal(
        LogisticRegression(epochs=1, random_state=1).fit(dense, y).decision_function(dense), expected
    )
    dense[7, 3] = np.inf
    with pytest.raises(UsageError, match=r"X has inf in row 7, column 3: .*float32"):
        LogisticRegression().fit(dense, y)
    frame = pytest.importorskip("pandas").DataFrame({"age": [1.0, np.nan, 2.0, 3.0] * 10})
    assert LogisticRegression(epochs=1).fit(frame, [0, 1, 0, 1] * 10).predict(frame).shape == (40,)


def test_the_words_of_a_text_column_are_features() -> None:
    texts = [f"{'cheap pills' if row % 2 else 'meeting agenda'} {row}" for row in range(200)]
    labels = [row % 2 for row in range(200)]
    model = LogisticRegression(epochs=4).fit(Frame(text=Column(texts, "O"), n=Column(range(200), "i8")), labels)
    new = Frame(text=Column(["pills pills", "the agenda"], "O"), n=Column([5, 5], "i8"))
    assert model.predict(new).tolist() == [1, 0]


def test_columns_of_times_are_left_out() -> None:
    frame = Frame(city=Column(["a", "b"] * 10, "O"), when=Column(range(20), "M8[s]"))
    with pytest.warns(UserWarning, match="columns of times are left out: when"):
        model = LogisticRegression(l1=0.0, epochs=20).fit(frame, [0, 1] * 10)
    assert model.feature_names_in_.tolist() == ["city"]
    assert model.score(frame, [0, 1] * 10) == 1.0


def test_nonlinear_effects_of_arrays_are_learned(tmp_path: Path) -> None:
    """Bins have no coefficients. A linear model needs an explicit option."""
    random = np.random.default_rng(2)
    X = random.normal(size=(3000, 2))
    y = random.random(3000) < 1 / (1 + np.exp(3 - 3 * X[:, 0] ** 2 - X[:, 1]))
    model = LogisticRegression(random_state=0).fit(X[:1500], y[:1500])
    linear = LogisticRegression(random_state=0, numeric_scale="standard").fit(X[:1500], y[:1500])
    found, without = (roc_auc_score(y[1500:], estimator.predict_proba(X[1500:])[:, 1]) for estimator in (model, linear))
    assert found > without + 0.15
    assert linear.coef_.shape == (1, 2)
    with pytest.raises(AttributeError, match="numeric_scale='standard'"):
        model.coef_  # noqa: B018
    expected = model.predict_proba(X)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), expected)
    model.save(tmp_path / "model")
    np.testing.assert_allclose(paceline.load(tmp_path / "model").predict(X), expected[:, 1], rtol=1e-5)
    export_model(tmp_path / "model", tmp_path / "w.npz")
    arrays = np.load(tmp_path / "w.npz")
    assert set(arrays["scaling.edge_keys"]) == {0}
    assert np.isin(arrays["lr.keys"], [1, *arrays["scaling.bin_keys"]]).all()
    linear.save(tmp_path / "linear")
    with pytest.raises(UsageError, match="different logarithms or bins"):
        merge_models([tmp_path / "model", tmp_path / "linear"], tmp_path / "merged")
    merge_models([tmp_path / "model", tmp_path / "model"], tmp_path / "merged")
    np.testing.assert_allclose(paceline.load(tmp_path / "merged").predict(X), expected[:, 1], rtol=1e-3)


def test_the_mean_of_the_predictions_is_right() -> None:
    """The offset is corrected like in ``paceline train``. Without the correction, the predictions are 14% too high."""
    random = np.random.default_rng(0)
    X = random.normal(size=(12_000, 20))
    margins = X @ random.normal(size=20) * 0.4 - 3
    y = (random.random(12_000) < 1 / (1 + np.exp(-margins))).astype(int)
    model = LogisticRegression(random_state=0).fit(X[:6000], y[:6000])
    for part in (slice(6000), slice(6000, None)):
        assert model.predict_proba(X[part])[:, 1].mean() == pytest.approx(y[part].mean(), rel=0.05)

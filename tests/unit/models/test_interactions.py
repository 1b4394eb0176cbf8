"""Interactions: which columns are crossed, the kernel against a loop in Python, and how models keep them."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from paceline.data import Batch, Columns
from paceline.errors import DataError, UsageError
from paceline.kernels.features.interactions import cross_keys
from paceline.kernels.hashing import field_of, name_seed
from paceline.models.base import KeyScratch
from paceline.models.features.interactions import Interactions
from paceline.models.registry import make_model, read_model_settings

COLUMNS = Columns("y", ("a", "b", "c"), ("x", "z"))


def crosses_of(text: str) -> list[str]:
    found = Interactions(text=text).of_columns("csv", COLUMNS)
    assert found.layout is not None
    return ["^".join(found.layout.names[number] for number in cross) for cross in found.crosses]


@pytest.mark.parametrize(
    ("text", "crosses"),
    [
        ("a:b", ["a^b"]),
        ("b:a,a:b", ["a^b"]),
        ("a:*", ["a^b", "a^c", "a^x", "a^z"]),
        ("x:a,c:b:a", ["a^x", "a^b^c"]),
        ("a:b:*", ["a^b^c", "a^b^x", "a^b^z"]),
        ("*:*", ["a^b", "a^c", "a^x", "a^z", "b^c", "b^x", "b^z", "c^x", "c^z", "x^z"]),
    ],
)
def test_columns_of_interactions(text: str, crosses: list[str]) -> None:
    assert crosses_of(text) == crosses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "expected two or three columns"),
        ("a:b:c:x", "'a:b:c:x' is invalid"),
        ("a:,b:c", "'a:' is invalid"),
        ("a:d", "unknown column 'd'; the columns are a, b, c, x, z"),
        ("a:a", "'a:a' crosses a column with itself"),
        ("*:d", "unknown column 'd'"),
    ],
)
def test_data_without_crosses(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("*", r"\*")):
        crosses_of(text)
    with pytest.raises(UsageError, match="libsvm has no columns to cross"):
        Interactions(text="a:b").of_columns("libsvm", None)
    with pytest.raises(UsageError, match="jsonl has no columns to cross"):
        # no pair occurs in the rows
        Interactions(text="a:b").of_columns("jsonl", Columns("y", ("a", "b"), is_open=True))
    for alone in ("a:*", "*:*", "*:*:*"):
        with pytest.raises(UsageError, match=r"too few columns to cross: a$"):
            Interactions(text=alone).of_columns("csv", Columns("y", ("a",)))
    many = Columns("y", tuple(f"c{i}" for i in range(200)))
    with pytest.raises(UsageError, match="more than 10,000 crosses"):
        Interactions(text="*:*").of_columns("csv", many)


def rows(*, has_values: bool, seed: int = 3) -> Batch:
    """Return random rows like the rows of a csv file. Some numbers are missing."""
    random, labels = np.random.default_rng(seed), np.zeros(50, np.float32)
    numeric = [name_seed(name) for name in COLUMNS.numeric]
    keys: list[int] = []
    values: list[float] = []
    indptr = [0]
    for _ in labels:
        present = [key for key in numeric if has_values and random.random() < 0.7]
        keys += [*random.integers(0, 2**63, 3).tolist(), *present]
        values += [1.0, 1.0, 1.0, *random.normal(size=len(present))]
        indptr.append(len(keys))
    given = np.array(values, np.float32) if has_values else None
    return Batch(labels, np.array(indptr), np.array(keys, np.uint64), given, np.ones(50, np.float32))


@pytest.mark.parametrize("has_values", [True, False])
def test_the_kernel_equals_a_loop_in_python(has_values: bool) -> None:
    interactions = Interactions(text="a:b,c:x,x:z,a:b:z,b:c:a").of_columns("csv", COLUMNS)
    batch = rows(has_values=has_values)
    crossed = interactions.apply(batch)
    numbers = {name_seed(name): number for number, name in enumerate(COLUMNS.numeric, 3)}
    for row in range(batch.num_examples):
        own = slice(*batch.indptr[row : row + 2])
        pairs = list(
            zip(batch.keys[own].tolist(), [1.0] * 5 if batch.values is None else batch.values[own], strict=False)
        )
        known_pairs = dict(enumerate(pairs[:3])) | {numbers[key]: (key, value) for key, value in pairs[3:]}
        expected = list(pairs)
        for cross in interactions.crosses:
            if all(column in known_pairs for column in cross):
                key, value = known_pairs[cross[0]]
                for column in cross[1:]:
                    key = int(cross_keys(np.uint64(key), np.uint64(known_pairs[column][0])))
                    value = np.float32(value) * np.float32(known_pairs[column][1])
                expected.append((key, value))
        found = slice(*crossed.indptr[row : row + 2])
        assert crossed.keys[found].tolist() == [key for key, _ in expected]
        if crossed.values is not None:
            np.testing.assert_array_equal(crossed.values[found], np.array([value for _, value in expected], np.float32))
    assert (crossed.values is None) == (batch.values is None)
    assert crossed.weights is batch.weights
    of = dict(interactions.parts_of(batch))
    assert set(of) == set(crossed.keys.tolist()) - set(batch.keys.tolist())
    assert all(set(parts) <= set(batch.keys.tolist()) for parts in of.values())


FIELDS = ("ad", "user", "", "device", "display")


@pytest.mark.parametrize(
    ("text", "crosses"),
    [
        ("ad:user", [(0, 1)]),
        ("user:user", [(1, 1)]),
        ("ad:d", [(0, 3), (0, 4)]),  # first letters of names, like -q ad of Vowpal Wabbit
        ("(no name):user:u", [(1, 1, 2)]),
        ("*:ad", [(0, 1), (0, 2), (0, 3), (0, 4)]),
    ],
)
def test_fields_of_interactions(text: str, crosses: list[tuple[int, ...]]) -> None:
    assert list(Interactions(text=text).of_columns("vw", None, FIELDS).crosses) == crosses
    with pytest.raises(UsageError, match=r"unknown column 'x'; the columns are ad, user, \(no name\), device, display"):
        _ = Interactions(text="ad:x").of_columns("vw", None, FIELDS)


@pytest.mark.parametrize("has_values", [True, False])
def test_fields_with_several_features(has_values: bool) -> None:
    """A row gets all pairs and triples. Within a field, each set of features is crossed once."""
    interactions = Interactions(text="ad:user,user:user,ad:user:user,device:ad:user,ad:ad:ad").of_columns(
        "vw", None, FIELDS
    )
    random = np.random.default_rng(1)
    lengths = random.integers(0, 9, 40)
    numbers = random.integers(0, 6, lengths.sum())  # field 5 is unknown
    names = (*FIELDS, "other")
    keys = random.integers(1, 2**63, len(numbers)).astype(np.uint64)
    values = random.normal(size=len(keys)).astype(np.float32) if has_values else None
    fields = np.array([field_of(names[number]) for number in numbers], np.uint32)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    batch = Batch(np.zeros(40, np.float32), indptr, keys, values, None, fields)
    crossed = interactions.apply(batch)
    ones = np.ones(len(keys), np.float32)
    for row in range(40):
        pairs = range(indptr[row], indptr[row + 1])
        expected = [(int(keys[i]), float((ones if values is None else values)[i])) for i in pairs]
        for cross in interactions.crosses:
            chosen = {
                tuple(sorted(permutation, key=lambda i: (numbers[i], keys[i])))
                for permutation in itertools.permutations(pairs, len(cross))
                if tuple(sorted(numbers[list(permutation)])) == cross
            }
            for first, *remaining in chosen:
                key, value = keys[first], (ones if values is None else values)[first]
                for other in remaining:
                    key = np.uint64(cross_keys(key, keys[other]))
                    value = value * (ones if values is None else values)[other]
                expected.append((int(key), float(value)))
        own = slice(*crossed.indptr[row : row + 2])
        found = (np.ones(len(crossed.keys)) if crossed.values is None else crossed.values)[own].tolist()
        pairs_found = sorted(zip(crossed.keys[own].tolist(), found, strict=True))
        assert [key for key, _ in pairs_found] == [key for key, _ in sorted(expected)]
        assert [value for _, value in pairs_found] == pytest.approx([value for _, value in sorted(expected)], rel=1e-5)
        assert crossed.keys[own][: len(pairs)].tolist() == keys[list(pairs)].tolist()
    of = dict(interactions.parts_of(batch))
    assert set(of) == set(crossed.keys.tolist()) - set(keys.tolist())
    many = Batch(np.zeros(1, np.float32), np.array([0, 3000]), np.arange(3000, dtype=np.uint64), None, None)
    many.fields = np.full(3000, field_of("ad"), np.uint32)
    with pytest.raises(DataError, match=r"makes 4,495,504,000 features of 1 rows. Cross fewer fields"):
        interactions.apply(many)


def test_the_key_depends_on_the_order_of_columns() -> None:
    assert cross_keys(np.uint64(3), np.uint64(5)) != cross_keys(np.uint64(5), np.uint64(3))
    assert cross_keys(np.uint64(3), np.uint64(5)) == cross_keys(np.uint64(3), np.uint64(5))


@pytest.mark.parametrize("name", ["lr", "fm", "regression", "poisson"])
def test_a_model_stores_the_interactions(name: str) -> None:
    model = make_model(name, interactions=Interactions(text="a:x").of_columns("csv", COLUMNS))
    assert read_model_settings(json.loads(json.dumps(model.describe()))) == model.with_defaults()
    batch = rows(has_values=True)
    minibatch = model.prepare(batch, KeyScratch())
    assert len(minibatch.keys[0]) > len(np.unique(batch.keys)) + 1  # the bias
    assert "interactions" not in make_model(name).describe()

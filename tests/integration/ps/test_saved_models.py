"""Tables on disk: loaded values equal the saved values, and a failed save changes nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as safetensors

from paceline.errors import ModelError, TableMismatchError, UsageError
from paceline.ps import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Client,
    DenseTable,
    Momentum,
    SparseTable,
    Uniform,
    UpdateRule,
    load_tables,
    read_model,
    save_tables,
)
from paceline.storage import durable_io, parts
from paceline.storage.directory_lock import DirectoryLock
from paceline.storage.format import digest_of
from paceline.storage.model_directory import save_model

from .harness import Cluster, Floats, Keys, floats, random_keys

RULES: list[UpdateRule] = [SGD(lr=0.1), Momentum(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1), FTRL(alpha=0.3, l1=0.1)]
SIZE = 1300
KEYS = random_keys(np.random.default_rng(1), 500)


def declare(client: Client, rule: UpdateRule) -> tuple[SparseTable, SparseTable, DenseTable]:
    start = Uniform(low=-1, high=1)
    return (
        client.sparse_table("narrow", update=rule, initializer=start, seed=1),
        client.sparse_table("wide", dim=6, update=rule, initializer=start, seed=2),
        client.dense_table("dense", size=SIZE, update=rule, initializer=start, seed=3),
    )


def train(client: Client, rule: UpdateRule, steps: range) -> None:
    narrow, wide, dense = declare(client, rule)
    for step in steps:
        random = np.random.default_rng(step)
        keys = random.choice(KEYS, 200, replace=False)
        narrow.push(keys, random.standard_normal(200, np.float32))
        wide.push(keys, random.standard_normal((200, 6), np.float32))
        dense.push(random.standard_normal(SIZE // 2, np.float32), start=step)


def values(client: Client, rule: UpdateRule) -> list[Floats]:
    narrow, wide, dense = declare(client, rule)
    return [narrow.pull(KEYS), wide.pull(KEYS), dense.pull()]


def same(one: list[Floats], other: list[Floats]) -> bool:
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=[pytest.mark.thorough] * (not isinstance(rule, Adam | FTRL)), id=type(rule).__name__)
        for rule in RULES
    ],
)
def test_training_from_a_saved_model_equals_uninterrupted_training(rule: UpdateRule, tmp_path: Path) -> None:
    with Cluster(servers=3) as cluster:
        client = cluster.connect()
        train(client, rule, range(5))
        client.save(tmp_path / "model", note="five steps", auc=0.75)
        saved = values(client, rule)
        rows = [len(table) for table in declare(client, rule)[:2]]
        train(client, rule, range(5, 10))
        expected = values(client, rule)
    for servers in (2, 1):
        with Cluster(servers=servers) as cluster:
            client = cluster.connect()
            assert client.load(tmp_path / "model") == {"note": "five steps", "auc": 0.75}
            assert same(values(client, rule), saved)
            assert [len(table) for table in declare(client, rule)[:2]] == rows
            train(client, rule, range(5, 10))
            assert same(values(client, rule), expected)


def test_a_model_has_the_current_hyperparameters(tmp_path: Path) -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=Adam(lr=0.1))
        table.push(KEYS, np.ones(len(KEYS), np.float32))
        for lr in (0.5, 0.25):
            table.set_update(Adam(lr=lr))
        assert table.spec.update["lr"] == 0.25
        assert client.tables() == [table.spec]
        client.save(tmp_path)
        table.push(KEYS, np.ones(len(KEYS), np.float32))
        expected = table.pull(KEYS)
    assert read_model(tmp_path).table("w").spec == table.spec
    with Cluster(servers=3) as cluster:
        client = cluster.connect()
        client.load(tmp_path)
        table = client.sparse_table("w", update=Adam(lr=0.25))
        table.push(KEYS, np.ones(len(KEYS), np.float32))
        assert same([table.pull(KEYS)], [expected])


def test_a_model_without_a_cluster(tmp_path: Path) -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        train(client, RULES[2], range(3))
        client.save(tmp_path)
        expected = values(client, RULES[2])
    model = read_model(tmp_path)
    assert [table.spec.name for table in model.manifest.tables] == ["narrow", "wide", "dense"]
    store = model.load_store("wide")
    found = np.empty((len(KEYS), 6), np.float32)
    store.pull(KEYS, found)
    assert np.array_equal(found, expected[1])  # keys without a push have the values of their initializer
    assert len(store) == model.table("wide").rows
    elements = np.empty(SIZE, np.float32)
    for keys, records in model.records(model.table("dense")):
        assert records.shape == (len(keys), 2)  # value and accumulator
        elements[keys.astype(np.int64)] = records[:, 0]
    assert np.array_equal(elements, expected[2])
    with pytest.raises(ModelError, match=f"the model in {tmp_path} has no table 'net'"):
        model.table("net")


def test_selected_tables_and_empty_tables(tmp_path: Path) -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        train(client, RULES[0], range(1))
        client.sparse_table("empty", update=SGD(lr=1.0))
        save_tables(client, tmp_path / "all")
        save_tables(client, tmp_path / "some", ["wide", "empty"])
        expected = values(client, RULES[0])
    assert [table.rows for table in read_model(tmp_path / "some").manifest.tables] == [200, 0]
    with Cluster() as cluster:
        client = cluster.connect()
        load_tables(client, tmp_path / "all", ["dense"])
        assert [spec.name for spec in client.tables()] == ["dense"]
        client.load(tmp_path / "some")
        found = values(client, RULES[0])
        assert same(found[1:], expected[1:])
        assert not same(found[:1], expected[:1])
        assert len(client.sparse_table("empty", update=SGD(lr=1.0))) == 0


def test_a_table_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        train(client, RULES[3], range(3))
        client.save(tmp_path)
        expected = values(client, RULES[3])
    assert len(read_model(tmp_path).table("wide").parts) > 5
    with Cluster(servers=3) as cluster:
        client = cluster.connect()
        client.load(tmp_path)
        assert same(values(client, RULES[3]), expected)


def one_table(client: Client, value: float) -> SparseTable:
    table = client.sparse_table("w", update=SGD(lr=1.0))
    table.push(KEYS, np.full(len(KEYS), -value, np.float32) - table.pull(KEYS).ravel() * -1).wait()
    assert (table.pull(KEYS) == value).all()
    return table


def loaded(folder: Path) -> set[float]:
    """Check all files of a model; return its values."""
    model = read_model(folder)
    return {float(value) for _, records in model.records(model.table("w")) for value in records[:, 0]}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_replaces_the_previous_model(tmp_path: Path) -> None:
    (tmp_path / "table0-00000.0123abcd.safetensors").write_bytes(b"of a save that was killed")
    (tmp_path / ".manifest.json.0123abcd").write_bytes(b"too")
    with Cluster() as cluster:
        client = cluster.connect()
        one_table(client, 1)
        client.save(tmp_path, generation=1)
        first = files(tmp_path)
        (tmp_path / "embeddings.safetensors").write_bytes(b"somebody's")
        (tmp_path / "notes.txt").write_text("mine")
        one_table(client, 2)
        client.save(tmp_path, generation=2)
    assert len(first) == 2
    assert loaded(tmp_path) == {2.0}
    assert read_model(tmp_path).manifest.model == {"generation": 2}
    assert files(tmp_path)[0] == "embeddings.safetensors"
    assert len(files(tmp_path)) == 4
    assert not set(first) & set(files(tmp_path)) - {"manifest.json"}


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FAILURES: dict[str, tuple[BaseException, type[BaseException], str]] = {
    "no space": (NO_SPACE, ModelError, "no space left to save the model in .* unchanged"),
    "read-only": (
        OSError(errno.EROFS, "Read-only file system"),
        ModelError,
        "cannot save the model in .*: Read-only file system",
    ),
    "Ctrl-C": (KeyboardInterrupt("by the user"), KeyboardInterrupt, "by the user"),
}
_SELDOM = (("over a model", "read-only"), ("new", "no space"), ("new", "Ctrl-C"))


def fails_at(step: int, calls: Iterator[int], function: Any, failure: BaseException) -> Any:
    """Return an `os.write` or `os.replace` that fails at the call with number `step`, counted over both."""

    def attempt(target: Any, data: Any) -> Any:
        is_write = function.__name__ == "write"
        if is_write and bytes(data).startswith(b"process"):  # the lock
            return function(target, data)
        if next(calls) == step:
            if is_write:
                function(target, data[: len(data) // 2])
            raise failure
        return function(target, data)

    return attempt


@pytest.mark.parametrize(
    ("exists", "failure", "kind", "message"),
    [
        pytest.param(exists, *failure, id=f"{place}-{name}", marks=[pytest.mark.thorough] * ((place, name) in _SELDOM))
        for exists, place in ((True, "over a model"), (False, "new"))
        for name, failure in FAILURES.items()
    ],
)
def test_a_failing_save_leaves_the_old_model_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exists: bool,
    failure: BaseException,
    kind: type[BaseException],
    message: str,
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2500)
    write, replace = os.write, os.replace
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        for step in range(5) if failure is NO_SPACE else (0, 3, 4):
            root = tmp_path / str(step)
            root.mkdir()
            folder = root / "a" / "model"
            one_table(client, 1)
            if exists:
                client.save(folder)
                before = {path: path.read_bytes() for path in folder.iterdir()}
            one_table(client, 2)
            with monkeypatch.context() as patch:
                calls = itertools.count()
                patch.setattr(os, "write", fails_at(step, calls, write, failure))
                patch.setattr(os, "replace", fails_at(step, calls, replace, failure))
                with pytest.raises(kind, match=message):
                    client.save(folder)
            assert next(calls) == step + 1
            if exists:
                assert {path: path.read_bytes() for path in folder.iterdir()} == before
                assert loaded(folder) == {1.0}
            else:
                assert not list(root.iterdir())
            client.save(folder)
            assert loaded(folder) == {2.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    with Cluster() as cluster:
        client = cluster.connect()
        one_table(client, 1)
        client.save(folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A model of one table in a single file."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loaded(folder)
    with Cluster() as cluster, pytest.raises(ModelError, match=message):
        cluster.connect().load(folder)


def part_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


@pytest.mark.parametrize("at", [0, 100, -1])
def test_a_damaged_file(model: Path, at: int) -> None:
    data = bytearray(part_of(model).read_bytes())
    data[at] ^= 1
    part_of(model).write_bytes(data)
    refused(model, rf"{part_of(model)} is damaged: its SHA-256 is [0-9a-f]{{16}}…, its manifest records")


def test_a_truncated_and_a_missing_file(model: Path) -> None:
    part = part_of(model)
    part.write_bytes(part.read_bytes()[:-10])
    refused(model, r"is truncated or was changed: it has \d+ bytes, but its manifest records \d+ \(SHA-256")
    part.unlink()
    refused(model, f"cannot read {part}, a part of the model: No such file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3, "paceline": "9.0"}, "has format version 3, but this Paceline reads 2. Use Paceline 9.0"),
        ({"format": "other"}, "manifest.json is not a manifest of a Paceline model"),
        ({"tables": 3}, "manifest.json is damaged: Expected `array`, got `int`"),
    ],
)
def test_a_foreign_manifest(model: Path, change: dict[str, object], message: str) -> None:
    manifest = json.loads((model / "manifest.json").read_text())
    (model / "manifest.json").write_text(json.dumps({**manifest, **change}))
    refused(model, message)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]"])
def test_an_invalid_manifest(model: Path, text: bytes) -> None:
    (model / "manifest.json").write_bytes(text)
    refused(model, "manifest.json is (damaged|not a manifest of a Paceline model)")


def test_a_manifest_with_other_contents(model: Path) -> None:
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["tables"][0]["spec"]["dim"] = 2
    (model / "manifest.json").write_text(json.dumps(manifest))
    refused(model, r"manifest.json is damaged: table0-.* has records of 1 float32, table sparse\(dim=2, .* has others")


def test_a_damaged_manifest(model: Path) -> None:
    text = (model / "manifest.json").read_text()
    (model / "manifest.json").write_text(text.replace('"lr": 1.0', '"lr": 2.0'))
    refused(model, "manifest.json is damaged: its SHA-256 is [0-9a-f]{16}…, it records")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../secret"}, "file"),
        ({"file": "/etc/passwd"}, "file"),
        ({"file": ".."}, "file"),
        ({"file": "."}, "file"),
        ({"rows": [-1]}, "rows"),
        ({"num_bytes": -1}, "num_bytes"),
        ({"sha256": ""}, "sha256"),
    ],
)
def test_a_forged_manifest(model: Path, change: dict[str, object], message: str) -> None:
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["tables"][0]["uses"][0]["part"].update(change)
    (model / "manifest.json").write_text(json.dumps(manifest))
    refused(model, f"manifest.json is damaged: .*{message}")


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_only_regular_files_are_read(model: Path, kind: str) -> None:
    part = part_of(model)
    part.unlink()
    {"pipe": lambda: os.mkfifo(part), "device": lambda: part.symlink_to("/dev/zero"), "directory": part.mkdir}[kind]()
    refused(model, "is not a regular file")


def test_files_without_tensors(model: Path) -> None:
    for data in (b"", b"nothing of that kind", safetensors({"keys": np.zeros(3)}), safetensors({"x": np.zeros(3)})):
        part_of(model).write_bytes(data)
        manifest = json.loads((model / "manifest.json").read_text())
        part = manifest["tables"][0]["uses"][0]["part"]
        part.update(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), rows=[0])
        manifest["sha256"] = digest_of({key: value for key, value in manifest.items() if key != "sha256"})
        (model / "manifest.json").write_text(json.dumps(manifest))
        refused(model, "is not a safetensors file|differs from its manifest")


def test_two_saves_into_one_directory(tmp_path: Path) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        one_table(client, 1)
        client.save(tmp_path / "model")
        lock = DirectoryLock.take(tmp_path / "model")
        before = files(tmp_path / "model")
        one_table(client, 2)
        with pytest.raises(UsageError, match=r"in use by another run \(process \d+ on .*[Uu]se another directory"):
            client.save(tmp_path / "model")
        assert files(tmp_path / "model") == before
        lock.release()
        assert loaded(tmp_path / "model") == {1.0}
        client.save(tmp_path / "model")
        assert loaded(tmp_path / "model") == {2.0}
        assert len(files(tmp_path / "model")) == 2  # the lock is removed


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_directories_without_support_for_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The save succeeds on a file system that cannot sync directories."""
    fail_syncs(monkeypatch, number)
    with Cluster() as cluster:
        client = cluster.connect()
        one_table(client, 2)
        client.save(tmp_path / "model")
    assert loaded(tmp_path / "model") == {2.0}


@pytest.mark.parametrize("num_synced", [0, 1])
def test_an_unsynced_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_synced: int) -> None:
    """The save fails if a rename, of the files or of the manifest, may not be on the disk."""

    with Cluster() as cluster:
        client = cluster.connect()
        one_table(client, 1)
        client.save(tmp_path / "model")
        one_table(client, 2)
        fail_syncs(monkeypatch, errno.EIO, num_synced)
        expected = (
            r"is saved in .*, but may not survive a crash .*: Input"
            if num_synced
            else r"cannot save the model in .*model: Input"
        )
        with pytest.raises(ModelError, match=expected):
            client.save(tmp_path / "model")
        with pytest.raises(ModelError, match=r"cannot save the model in .*new: Input"):
            client.save(tmp_path / "new")
        with pytest.raises(OSError, match="Input"):
            durable_io.make_directory(tmp_path / "a" / "b")
    assert loaded(tmp_path / "model") == {2.0 if num_synced else 1.0}


def fail_syncs(monkeypatch: pytest.MonkeyPatch, number: int, num_synced: int = 0) -> None:
    """Make all syncs of directories fail except the first ones."""
    fsync, left = os.fsync, iter(range(num_synced))

    def attempt(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode) and next(left, None) is None:
            raise OSError(number, os.strerror(number))
        fsync(file)

    monkeypatch.setattr(os, "fsync", attempt)


def test_new_directories_are_synced_into_the_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable_io, "sync_directory", synced.append)
    assert durable_io.make_directory(tmp_path / "a" / "b") == [tmp_path / "a" / "b", tmp_path / "a"]
    assert synced == [tmp_path / "a", tmp_path]
    assert durable_io.make_directory(tmp_path / "a" / "b") == []


def test_a_directory_without_a_model_is_reported(tmp_path: Path) -> None:
    refused(tmp_path, "holds no model: .*manifest.json")
    refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file, but a Paceline model is a directory")


def test_foreign_files_are_not_overwritten(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "my app"}')
    with Cluster() as cluster:
        client = cluster.connect()
        one_table(client, 3)
        for folder, message in [
            ("file", "cannot save a model as .*file: a file has that name"),
            ("file/below", "cannot save the model in .*below: Not a directory"),
            ("full", "cannot save a model in .*full: it contains other files"),
            ("web", "manifest.json is not a manifest of a Paceline model"),
        ]:
            with pytest.raises(ModelError, match=message):
                client.save(tmp_path / folder)
        with pytest.raises(UsageError, match="cannot be encoded as JSON"):
            client.save(tmp_path / "new", failing=object())
    assert (tmp_path / "file").read_text() == "x"
    assert files(tmp_path) == ["file", "full", "model", "web"]
    assert files(tmp_path / "full") == ["thesis.tex"]
    assert files(tmp_path / "web") == ["manifest.json"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "fm",
            "torch checkpoint",
            "cannot save a PyTorch checkpoint in .*: it holds a click model, which would be lost",
        ),
        (
            None,
            "torch checkpoint",
            "cannot save a PyTorch checkpoint in .*: it holds a click model, which would be lost",
        ),
        (
            "torch checkpoint",
            "lr",
            "cannot save a click model in .*: it holds a PyTorch checkpoint, which would be lost",
        ),
        ("lr", "fm", None),
        ("torch checkpoint", "torch checkpoint", None),
    ],
)
def test_a_checkpoint_and_a_click_model_do_not_replace_one_another(
    before: str | None, after: str, message: str | None, tmp_path: Path
) -> None:
    save_model(tmp_path, [], {} if before is None else {"kind": before})
    with contextlib.nullcontext() if message is None else pytest.raises(ModelError, match=message):
        save_model(tmp_path, [], {"kind": after})
    assert read_model(tmp_path).manifest.model.get("kind") == (after if message is None else before)


def test_a_model_of_other_tables_is_rejected(model: Path) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=0.5))
        table.push([1], floats(1)).wait()
        with pytest.raises(TableMismatchError, match=r"table 'w' was declared as .*lr=1.0.*exists as .*lr=0.5"):
            client.load(model)
        assert len(table) == 1


def test_loading_overwrites_existing_rows(model: Path) -> None:
    keys: Keys = np.array([5], np.uint64)
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(KEYS[:10], np.ones(10, np.float32))
        table.push(keys, floats(4))
        client.load(model)
        assert (table.pull(KEYS) == 1).all()
        assert table.pull(keys) == (1 if 5 in KEYS else -4)

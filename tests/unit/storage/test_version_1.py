"""What Paceline 0.1 wrote, written here by hand as it did: it is read, gone on from, and replaced."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from paceline.errors import ModelError
from paceline.protocol.buckets import bucket_set
from paceline.storage.format import PartUse, SnapshotManifest, StoredTable
from paceline.storage.model_directory import read_model, save_model
from paceline.storage.parts import PartBuffer, write_part
from paceline.storage.snapshot_directory import SnapshotDirectory, folder_name, read_buckets, read_newest
from paceline.tables.spec import TableSpec
from paceline.tables.types import Floats, Keys

SPEC: dict[str, Any] = {
    "name": "wörter", "kind": "sparse", "dim": 2, "size": 0,
    "update": {"kind": "SGD", "lr": 0.1, "weight_decay": 0.0},
    "initializer": {"kind": "Uniform", "low": -1, "high": 1}, "seed": 2**63 - 1,
}  # fmt: skip
KEYS: Keys = np.array([3, 2**64 - 1, 7, 11], np.uint64)
RECORDS: Floats = np.arange(8, dtype=np.float32).reshape(4, 2)


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_model(folder: Path) -> dict[str, Any]:
    """Write a model of a table in two parts and of a file of tensors; return its manifest's fields."""
    parts = []
    for number, rows in enumerate((slice(0, 3), slice(3, 4))):
        file = f"table0-{number:05d}.0123abcd.safetensors"
        data = save({"keys": KEYS[rows], "records": RECORDS[rows]})
        parts.append({"file": file, "rows": len(KEYS[rows]), **write_file(folder / file, data)})
    tensors = {"file": "tensors-model.0123abcd.safetensors"}
    tensors |= write_file(folder / tensors["file"], save({"weight": RECORDS}))
    fields = {
        "format": "paceline-model",
        "version": 1,
        "paceline": "0.1.0",
        "tables": [{"spec": SPEC, "rows": 4, "parts": parts}],
        "tensors": {"model": tensors},
        "model": {"kind": "lr", "auc": 0.1 + 0.2},
    }
    write_fields(folder, fields)
    return fields


def write_snapshot(directory: Path, number: int, *parts: dict[str, Any]) -> None:
    fields = {
        "format": "paceline-snapshot",
        "version": 1,
        "paceline": "0.1.0",
        "number": number,
        "full": number == 1,
        "iteration": 12,
        "tables": [{
            "spec": SPEC, "rows": 4, "num_buckets": 512,
            "uses": [{"part": part, "buckets": used} for part, used in zip(parts, ([5], [9]), strict=True)],
        }],
        "account": {
            "files": [3, None],
            "done": [{"epoch": 1, "file": 0, "shards": "BQ=="}],
            "progress": {"examples": 12.0, "loss": 1e-07},
        },
        "training": {"files": [["ä", 1]], "rate": 0.1 + 0.2},
    }  # fmt: skip
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).replace("1e-07", "1e-7")
    write_fields(directory / folder_name(number), {**fields, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def write_snapshot_part(directory: Path, number: int, *buckets: int) -> dict[str, Any]:
    """Write a part of two rows for each bucket."""
    rows = slice(0, 2 * len(buckets))
    file = f"{folder_name(number)}/s0-r0-t1-00000.safetensors"
    written = write_file(directory / file, save({"keys": KEYS[rows], "records": RECORDS[rows] + number}))
    return {"file": file, "table": SPEC["name"], "buckets": buckets, "rows": [2] * len(buckets), "words": 2, **written}


def write_fields(folder: Path, fields: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False))


def test_a_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = read_model(tmp_path)
    assert model.manifest.paceline == "0.1.0"
    assert model.manifest.model == {"kind": "lr", "auc": 0.1 + 0.2}
    assert model.read(model.manifest.tensors["model"]) == save({"weight": RECORDS})
    table = model.table("wörter")
    assert (table.rows, table.spec.seed) == (4, 2**63 - 1)
    keys, records = map(np.concatenate, zip(*model.records(table), strict=True))
    np.testing.assert_array_equal(keys, KEYS)
    np.testing.assert_array_equal(records, RECORDS)
    store = model.load_store("wörter")
    found = np.empty((4, 2), np.float32)
    store.pull(KEYS, found)
    np.testing.assert_array_equal(found, RECORDS)

    save_model(tmp_path, [(table.spec, model.records(table))], {"kind": "lr"})  # in its place
    again = read_model(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", *again.manifest.files}
    ((keys, records),) = again.records(again.table("wörter"))
    np.testing.assert_array_equal(keys, KEYS)
    np.testing.assert_array_equal(records, RECORDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../secret"}, "is damaged: .*file"),
        ({"rows": -1}, "is damaged: .*rows"),
        ({"rows": 40}, "is damaged: .*cannot hold 40 rows of 2 words"),
        (
            {"rows": 2},
            "differs from its manifest, .* 2 rows of 2 float32 for table .wörter.: take another",
        ),
        ({"sha256": "0" * 64}, "is damaged: its SHA-256"),
    ],
)
def test_a_model_that_was_made_up(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    fields = write_model(tmp_path)
    fields["tables"][0]["parts"][0].update(change)
    write_fields(tmp_path, fields)
    with pytest.raises(ModelError, match=message):
        list(read_model(tmp_path).records(read_model(tmp_path).table("wörter")))


def test_snapshots(tmp_path: Path) -> None:
    """They are read, and a new one may refer to their parts."""
    first = write_snapshot_part(tmp_path, 1, 5, 9)
    write_snapshot(tmp_path, 1, first, first)
    second = write_snapshot_part(tmp_path, 2, 9)
    write_snapshot(tmp_path, 2, first, second)
    manifest = read_newest(tmp_path).manifest
    assert (manifest.number, manifest.full, manifest.iteration) == (2, False, 12)
    assert manifest.training == {"files": [["ä", 1]], "rate": 0.1 + 0.2}
    assert manifest.account is not None
    assert [each.shards for each in manifest.account.done] == [b"\x05"]
    (table,) = manifest.tables
    found = {}
    for use in table.uses:
        for bucket, _, records in read_buckets(tmp_path, use.part, bucket_set(use.buckets)):
            found[bucket] = records.tolist()
    assert found == {5: (RECORDS[:2] + 1).tolist(), 9: (RECORDS[:2] + 2).tolist()}

    snapshots = SnapshotDirectory(tmp_path, keep=1)
    assert snapshots.next_number() == 3
    snapshots.make(3)
    gathered = PartBuffer(64)
    gathered.begin(2)
    gathered.add(KEYS[:2], RECORDS[:2], 9)
    part = write_part(tmp_path, f"{folder_name(3)}/s0-r0-t1-00000.safetensors", SPEC["name"], gathered)
    uses = table.uses[0], PartUse(part=part, buckets=(9,))
    spec = TableSpec(**SPEC)
    snapshots.commit(
        SnapshotManifest(number=3, full=False, iteration=None, tables=(StoredTable(spec=spec, rows=4, uses=uses),))
    )
    snapshots.close()
    assert read_newest(tmp_path).manifest.number == 3
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        first["file"], f"{folder_name(3)}/manifest.json", part.file,
    ]  # fmt: skip


def test_a_damaged_manifest_of_a_snapshot(tmp_path: Path) -> None:
    part = write_snapshot_part(tmp_path, 1, 5, 9)
    write_snapshot(tmp_path, 1, part, part)
    path = tmp_path / folder_name(1) / "manifest.json"
    path.write_text(path.read_text().replace('"rate": 0.3', '"rate": 0.4'))
    with pytest.raises(ModelError, match=r"manifest.json is damaged: its SHA-256 is .*, it records"):
        read_newest(tmp_path)

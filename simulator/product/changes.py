"""Requests other than pushes with which simulated workers change tables, and the effect on the model of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paceline.protocol.buckets import buckets_in
from paceline.ps import Client
from paceline.ps.client.records import write_records
from paceline.ps.client.snapshot_loading import SnapshotLoading
from paceline.storage.format import PartUse, SnapshotManifest, StoredTable
from paceline.storage.parts import PartBuffer, write_part
from paceline.storage.snapshot_directory import Snapshot
from paceline.tables.bucket_arrays import buckets_of_keys
from paceline.tables.part import Selection
from paceline.tables.rules import Adagrad
from simulator.product.state import SharedState
from simulator.product.truth import CHANGED, Change, Floats, Keys, Mirror


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A request that changes a table: `send` sends it to the servers, and `change` applies it to the model."""

    keys: Keys
    rows: Floats
    change: Change
    send: Callable[[], int | None]
    """Sends the request, and returns the number of erased rows."""
    may_overtake: bool = False
    """Whether the request may be sent while pushes to other keys are in flight."""


def draw_request(
    state: SharedState, client: Client, table: Any, mirror: Mirror, slot: int, pending: Sequence[Keys]
) -> ChangeRequest | None:
    """Return a random request for the worker's own keys; None if no keys are left or the disk fails.

    `pending` are the keys of pushes in flight. A write may overtake these pushes, so it has other keys.
    """
    random, plan = state.world.random, mirror.plan
    kinds = ["write"] if plan.kind == "dense" else ["write", "erase"]
    if plan is CHANGED:
        kinds += ["set update", "begin pass", "erase unseen"]
        if not state.settings.is_sequential:  # a load would wait for a fill, which waits for this worker
            kinds.append("load")
    kind = random.choice(kinds)
    numbers, keys = np.random.default_rng(random.getrandbits(32)), plan.keys_of(slot)
    if kind == "write":
        keys = np.setdiff1d(keys, np.concatenate([keys[:0], *pending]))
    if kind in ("write", "erase"):
        keys = keys[numbers.random(len(keys)) < 0.5]
        if not len(keys):
            return None
    records = numbers.random((len(keys), table.spec.record_words), np.float32)
    no_rows = records[:, :0]
    match kind:
        case "write":
            return ChangeRequest(keys, records, _write, partial(write_records, client, table.spec, keys, records), True)
        case "erase":
            return ChangeRequest(keys, no_rows, _erase, partial(table.erase, keys))
        case "set update":
            rule = Adagrad(lr=random.random())
            return ChangeRequest(
                keys, no_rows, lambda part, selection, rows: part.set_update(rule), partial(table.set_update, rule)
            )
        case "begin pass":
            number = mirror.part.pass_number + 1
            return ChangeRequest(
                keys, no_rows, lambda part, selection, rows: part.begin_pass(number, number - 1),
                partial(table.begin_pass, number),
            )  # fmt: skip
        case "erase unseen":
            passes = random.choice((1, 2))
            return ChangeRequest(keys, no_rows, partial(_erase_unseen, passes), partial(table.erase_unseen, passes))
    try:
        snapshot = _write_snapshot(state, table, mirror, keys, records)
    except OSError:
        return None
    return ChangeRequest(keys, records, _load, partial(_load_snapshot, client, snapshot))


def push(part: Any, selection: Selection, rows: Floats) -> None:
    """Apply a push to the model."""
    part.reserve(selection)
    part.push(selection, rows)


def _write(part: Any, selection: Selection, rows: Floats) -> None:
    part.write_records(selection.key_array(), rows)


def _erase(part: Any, selection: Selection, rows: Floats) -> int:
    erased: int = part.erase(selection.key_array())
    return erased


def _erase_unseen(passes: int, part: Any, selection: Selection, rows: Floats) -> int:
    buckets = buckets_in(buckets_of_keys(selection.key_array()))
    return sum(part.erase(part.unseen_keys(bucket, passes).copy()) for bucket in buckets)


def _load(part: Any, selection: Selection, rows: Floats) -> None:
    for bucket in buckets_in(buckets_of_keys(selection.key_array())):
        chosen, records = part.restrict(selection, rows, 1 << bucket)
        keys = chosen.key_array()
        part.load_bucket(bucket, keys, records.reshape(len(keys), -1))


def _write_snapshot(state: SharedState, table: Any, mirror: Mirror, keys: Keys, records: Floats) -> Snapshot:
    """Write a snapshot of one table with these rows. Raises OSError if the disk fails."""
    directory = state.disk.new_directory()
    directory.mkdir(parents=True)
    gathered = PartBuffer(records.nbytes + keys.nbytes)
    gathered.begin(records.shape[1])
    for bucket in buckets_in(buckets_of_keys(keys)):
        chosen, rows = mirror.part.restrict(Selection(keys), records.reshape(-1), 1 << bucket)
        gathered.add(chosen.key_array(), rows.reshape(-1, records.shape[1]), bucket)
    part = write_part(directory, "part.safetensors", table.name, gathered)
    stored = StoredTable(spec=table.spec, rows=len(keys), uses=(PartUse(part=part, buckets=part.buckets),))
    return Snapshot(directory, SnapshotManifest(number=1, full=True, iteration=None, tables=(stored,)))


def _load_snapshot(client: Client, snapshot: Snapshot) -> None:
    loading = SnapshotLoading(client, snapshot, client.servers.timeout_s, lambda: None)
    while not loading.load():
        loading.pause("servers join, leave or die")

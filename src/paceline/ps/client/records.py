"""Complete records of a table, values and state: reading, writing, and saving and loading models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import PeerError
from paceline.kernels.dedup import split
from paceline.observe.work import track
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.bounds import Natural
from paceline.protocol.buckets import bucket_set
from paceline.ps import messages
from paceline.ps.client.connection import ServerConnection
from paceline.ps.client.table import TableClient
from paceline.ps.messages import TableSpec
from paceline.storage.format import ModelManifest
from paceline.storage.model_directory import SavedModel, read_model, save_model
from paceline.tables.bucket_arrays import buckets_of_keys, dense_buckets
from paceline.tables.types import Floats, Keys

Positions: TypeAlias = npt.NDArray[np.int64]


def save_tables(
    client: TableClient, directory: str | os.PathLike[str], names: Iterable[str] | None = None, **model: Any
) -> ModelManifest:
    """Write tables (default: all) of a cluster to a directory atomically, in place of a model there.

    `model` is stored in the manifest. Raises ModelError without space or permission; the old model is then unchanged.
    Pushes during the save may or may not be included.
    """
    wanted = None if names is None else set(names)
    specs = (spec for spec in client.tables() if wanted is None or spec.name in wanted)
    buckets = range(NUM_BUCKETS)
    tables = (
        (spec, read_records(client, spec, track(buckets, f"saving table {spec.name}", NUM_BUCKETS))) for spec in specs
    )
    return save_model(directory, tables, model)


def load_tables(
    client: TableClient, directory: str | os.PathLike[str], names: Iterable[str] | None = None
) -> SavedModel:
    """Load tables of a saved model (default: all) with their state into a cluster with any number of servers.

    Raises ModelError for a damaged model, TableMismatchError if the cluster has a table with other settings.
    """
    model = read_model(directory)
    wanted = None if names is None else set(names)
    for table in model.manifest.tables:
        if wanted is not None and table.spec.name not in wanted:
            continue
        client.open_table(table.spec)
        for keys, records in model.records(table):
            write_records(client, table.spec, keys, records)
    return model


def read_records(
    client: TableClient, spec: TableSpec, buckets: Iterable[int] = range(NUM_BUCKETS)
) -> Iterator[tuple[Keys, Floats]]:
    """Yield a table's keys (uint64 [n]) and records (float32 [n, words]) for each non-empty bucket of `buckets`.

    A record is the values of a key, then the state of the table's update rule. Pushes during the call may or may not be
    included.
    """
    handle = client.open_table(spec)
    client.flush()
    for bucket in buckets:
        with client.servers.lock:
            rows, body = client.servers.retry(partial(_read_bucket, client, handle.number, bucket))
        if len(body) != rows * (8 + 4 * spec.record_words):
            raise PeerError(
                f"bucket {bucket} of table {spec.name!r} has {len(body)} bytes for {rows} rows of "
                f"{spec.record_words} float32: run servers and clients of the same version"
            )
        if rows:
            keys = np.frombuffer(body, np.uint64, rows)
            yield keys, np.frombuffer(body, np.float32, offset=8 * rows).reshape(rows, -1)


def _read_bucket(client: TableClient, number: int, bucket: int) -> tuple[int, memoryview]:
    return client.servers.owner_of(bucket).call(messages.ReadBucket(table=number, bucket=bucket), Natural)


def write_records(client: TableClient, spec: TableSpec, keys: Keys, records: Floats) -> None:
    """Set the complete records (float32 [n, words]) of `keys` (uint64 [n]) on their servers."""
    number = client.open_table(spec).number

    def write(connection: ServerConnection, chosen: Positions) -> None:
        message = messages.WriteRecords(table=number, rows=len(chosen))
        connection.call(message, body=(keys[chosen], records[chosen]), sequence=sequence)

    with client.servers.lock:
        sequence = client.servers.core.next_sequence()
        call_owners(client, spec, keys, write)


def call_owners(
    client: TableClient, spec: TableSpec, keys: Keys, call: Callable[[ServerConnection, Positions], None]
) -> None:
    """Call `call` for each server with the positions of its keys. Each key is passed once, even if the view changes."""
    remaining = np.arange(len(keys))

    def call_remaining() -> None:
        nonlocal remaining
        while len(remaining):
            connections = client.servers.newest()
            order, starts = _by_server(client, spec, keys[remaining])
            first = next(i for i in range(len(connections)) if starts[i + 1] > starts[i])
            call(connections[first], remaining[order[starts[first] : starts[first + 1]]])
            remaining = remaining[np.concatenate([order[: starts[first]], order[starts[first + 1] :]])]

    client.servers.retry(call_remaining)


def _by_server(client: TableClient, spec: TableSpec, keys: Keys) -> tuple[Positions, Positions]:
    """Return the positions of keys grouped by server, and the start of each group, as :func:`split` does."""
    num_servers = len(client.servers.newest())
    if spec.kind == "sparse":
        client.servers.check_not_lost(buckets_of_keys(keys) if client.servers.routes.lost else 0)
        order, starts = np.empty(len(keys), np.int64), np.empty(num_servers + 1, np.int64)
        split(keys, client.servers.routes.owners, starts, order)
        return order, starts
    buckets = dense_buckets(spec.size, keys)
    client.servers.check_not_lost(bucket_set(np.unique(buckets).tolist()) if client.servers.routes.lost else 0)
    owners = client.servers.routes.owners[buckets]
    order = np.argsort(owners, kind="stable")
    return order, np.searchsorted(owners[order], np.arange(num_servers + 1))

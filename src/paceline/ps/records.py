"""Whole records of a table, values and state together, as saved models and checkpoints hold them: read and written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.kernels.dedup import split
from paceline.protocol import NUM_BUCKETS
from paceline.ps import messages
from paceline.ps.client import Client
from paceline.ps.messages import TableSpec
from paceline.ps.sparse_store import Floats, Keys
from paceline.ps.tables import bucket_width


def read_records(client: Client, spec: TableSpec) -> Iterator[tuple[Keys, Floats]]:
    """Yield a table's keys (uint64 [n]) and records (float32 [n, words]) by buckets that hold something.

    A record is the values of a key, then the state of the table's update rule. What workers push meanwhile may or may
    not be part of it.
    """
    handle = client.open_table(spec)
    client.flush()
    for bucket in range(NUM_BUCKETS):
        with client.lock:
            connection = client.connections[int(client.owners[bucket])]
            rows, body = connection.call(messages.ReadBucket(table=handle.number, bucket=bucket))
        if rows:
            keys = np.frombuffer(body, np.uint64, rows)
            yield keys, np.frombuffer(body, np.float32, offset=8 * rows).reshape(rows, -1)


def write_records(client: Client, spec: TableSpec, keys: Keys, records: Floats) -> None:
    """Set whole records (float32 [n, words]) of `keys` (uint64 [n]), each on the server that has it, at once."""
    number = client.open_table(spec).number
    with client.lock:
        if spec.kind == "sparse":
            order, starts = np.empty(len(keys), np.int64), np.empty(len(client.connections) + 1, np.int64)
            split(keys, client.owners, starts, order)
        else:
            owners = client.owners[(keys // np.uint64(bucket_width(spec.size))).astype(np.int64)]
            order = np.argsort(owners, kind="stable")
            starts = np.searchsorted(owners[order], np.arange(len(client.connections) + 1))
        for i, connection in enumerate(client.connections):
            chosen = order[starts[i] : starts[i + 1]]
            if len(chosen):
                message = messages.WriteRecords(table=number, rows=len(chosen))
                connection.call(message, (keys[chosen], records[chosen]))

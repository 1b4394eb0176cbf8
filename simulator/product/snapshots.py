"""Take snapshots of a simulated cluster on a disk that may fail or be full, and check their contents."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.errors import ModelError, PacelineError
from paceline.protocol.buckets import Buckets, bucket_set, buckets_in
from paceline.ps import Client
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.storage.durable_io import replace_synced, write_synced
from paceline.storage.snapshot_directory import SnapshotWriteError, read_buckets, read_newest
from paceline.temporary import TemporaryFolder
from simulator.network import VirtualNetwork
from simulator.oracle import Violation
from simulator.product.transport import ADDRESS, VirtualTransport
from simulator.product.truth import table_named
from simulator.world import VirtualWorld

_PATIENCE_S: Final = 20.0
_FAILURES: Final = (errno.ENOSPC, errno.EIO)
_FAILED: Final = 0.4


class Disk:
    """The disk that all hosts share. It stores real files in a temporary folder."""

    def __init__(self, world: VirtualWorld) -> None:
        self.is_failing = False
        self.num_failed = 0
        self._world = world
        self._folder: TemporaryFolder | None = None
        self._number = 0

    def delay_s(self) -> float:
        """Return the duration of one operation."""
        return self._world.random.random() * 0.01

    def new_directory(self) -> Path:
        """Return the path of a new directory."""
        if self._folder is None:
            self._folder = TemporaryFolder.make("simulation")
        self._number += 1
        return self._folder.path / str(self._number)

    def stand_ins(self) -> list[tuple[Any, Any]]:
        """Return the product's functions that write files, with their replacements."""
        return [(write_synced, self._failing(write_synced)), (replace_synced, self._failing(replace_synced))]

    def _failing(self, write: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, *data: Any) -> None:
            if self.is_failing and self._world.random.random() < _FAILED:
                self.num_failed += 1
                number = self._world.random.choice(_FAILURES)
                raise OSError(number, os.strerror(number), str(path))
            write(path, *data)

        return call

    def close(self) -> None:
        """Remove all files."""
        if self._folder is not None:
            self._folder.close()


def take_snapshot(network: VirtualNetwork, disk: Disk) -> Path | None:
    """Take a snapshot; return its directory, or None after a timeout or if the disk failed.

    Raises Violation for an incomplete snapshot, and PacelineError for an error of the cluster.
    """
    world, num_failed, directory = network.world, disk.num_failed, disk.new_directory()
    end_s = world.time_s + _PATIENCE_S
    client = Client.connect(VirtualTransport(network), ADDRESS, observer=True)
    coordinator = SnapshotCoordinator(client, directory)
    try:
        coordinator.begin()
        while coordinator.poll() is None:
            if world.time_s >= end_s:
                return None
            world.sleep(0.01)
    except SnapshotWriteError as error:
        if disk.num_failed == num_failed:
            raise Violation(f"(snapshots) {error}") from None
        return None
    finally:
        coordinator.close()
    client.close()
    try:
        read_newest(directory)
    except ModelError as error:
        raise Violation(f"(snapshots) a finished snapshot is incomplete: {error}") from None
    return directory


def compare_snapshot(directory: Path, chains: Sequence[tuple[Buckets, Sequence[tuple[str, Any]]]]) -> None:
    """Raise Violation unless a snapshot has every row of the primaries, bit for bit."""
    snapshot = read_newest(directory)
    for stored in snapshot.manifest.tables:
        found: dict[int, tuple[bytes, bytes]] = {}
        for use in stored.uses:
            for bucket, keys, records in read_buckets(directory, use.part, bucket_set(use.buckets)):
                found[bucket] = keys.tobytes(), records.tobytes()
        for buckets, members in chains:
            server, tables = members[0]
            part = table_named(tables, stored.spec.name, server).part
            for bucket in buckets_in(buckets):
                keys, records = part.read_bucket(bucket)
                if found.get(bucket, (b"", b"")) != (keys.tobytes(), records.tobytes()):
                    raise Violation(f"(snapshots) bucket {bucket} of {stored.spec.name!r} differs from {server}")


def try_snapshot(network: VirtualNetwork, disk: Disk) -> None:
    """Take a snapshot while faults may occur. The snapshot may fail, but must not be incomplete."""
    try:
        take_snapshot(network, disk)
    except PacelineError as error:
        network.world.note(f"no snapshot: {type(error).__name__}")

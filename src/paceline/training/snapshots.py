"""Take snapshots of a training when they are due, and continue a training from a snapshot.

The driver (:mod:`paceline.training.train`) polls this module. :mod:`paceline.ps.client.snapshots` and
:mod:`~paceline.ps.client.snapshot_loading` send the requests to the servers.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.data import FORMATS, Columns, Dataset
from paceline.environment import parse_duration
from paceline.errors import DataError, PacelineError, UsageError
from paceline.models.base import SparseModel
from paceline.models.registry import describe_settings, read_model_settings
from paceline.protocol.jobs import JobAccount, JobState, shards_in
from paceline.ps import Client, messages, to_fields
from paceline.ps.client.snapshot_loading import load_snapshot
from paceline.ps.client.snapshots import SnapshotCoordinator
from paceline.storage.format import SnapshotManifest
from paceline.storage.snapshot_directory import Snapshot, SnapshotWriteError, read_newest
from paceline.training.options import SnapshotPlan
from paceline.training.plan import TrainingPlan

_EXAMPLES = re.compile(r"\d[\d_]*")


def parse_every(text: str) -> tuple[float | None, int | None]:
    """Parse an interval such as ``30s``, ``5m``, ``1h`` or ``100000`` examples. Return its seconds and examples."""
    seconds = parse_duration(text)
    if seconds is not None:
        return seconds, None
    if _EXAMPLES.fullmatch(text.strip()) and int(text) > 0:
        return None, int(text)
    raise UsageError(
        f"--snapshot-every {text}: expected a time such as 30s, 5m or 1h, or a number of examples such as 100000"
    )


class TrainingSnapshots:
    """Takes the snapshots of one training when they are due. A failed snapshot does not fail the training."""

    def __init__(self, client: Client, plan: SnapshotPlan, warn: Callable[[str], None]) -> None:
        self.directory = plan.directory
        self._client = client
        self._plan = plan
        self._warn = warn
        self._snapshotter = SnapshotCoordinator(client, plan.directory, keep=plan.keep)
        self._job = 0
        self._training: dict[str, Any] = {}
        self._last_s = 0.0
        self._last_examples = 0
        self.newest: SnapshotManifest | None = None

    def begin(self, training: dict[str, Any], examples: int) -> None:
        """Start to take snapshots of a training. `examples` is the number of examples before its first job."""
        self._training = training
        self._last_s = time.monotonic()
        self._last_examples = examples

    def follow(self, job: int) -> None:
        self._job = job

    def describe(self, **news: Any) -> None:
        self._training = {**self._training, **news}

    @property
    def is_taking(self) -> bool:
        """Whether servers write a snapshot now."""
        return self._snapshotter.is_taking

    def poll(self, state: JobState) -> None:
        """Start a snapshot if one is due, or advance the current one, without waiting."""
        try:
            if self.is_taking:
                self.newest = self._snapshotter.poll() or self.newest
            elif self._is_due(state):
                account = self._client.link.call(messages.GetAccount(job=self._job), JobAccount)
                self._snapshotter.begin(account, self._training)
        except SnapshotWriteError as error:
            self._warn(f"{error}; the training continues")
        except PacelineError as error:  # the driver detects the lost server, and decides whether the training continues
            self._snapshotter.give_up()
            self._warn(f"a snapshot was not taken: {error}")

    def _is_due(self, state: JobState) -> bool:
        time_s, examples = time.monotonic(), int(state.progress.get("examples", 0))
        if self._plan.seconds is not None:
            due = time_s - self._last_s >= self._plan.seconds
        else:
            assert self._plan.examples is not None
            due = examples - self._last_examples >= self._plan.examples
        if due:
            self._last_s, self._last_examples = time_s, examples
        return due

    def end(self) -> None:
        try:
            self._snapshotter.close()
        except PacelineError:
            pass  # the cluster has ended, so the snapshot cannot be finished


def describe_training(dataset: Dataset, plan: TrainingPlan, consistency: str) -> dict[str, Any]:
    return {
        "run": plan.run,
        "model": plan.model.describe(),
        "dataset": dataset.spec(),
        "files": describe_files(dataset.files, dataset.format),
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "update": to_fields(plan.update),
        "shards_at_once": plan.shards_at_once,
        "order": plan.order,
        "reordered": [] if plan.resumed is None else list(Resumption(plan.resumed).reordered(plan)),
        "num_examples": plan.num_examples,
        **({"optimism": list(plan.optimism)} if plan.optimism is not None else {}),
        "consistency": consistency,
    }


def describe_files(paths: Sequence[str | Path], format: str) -> list[list[Any]]:
    return [[os.path.basename(path), FORMATS[format].stat(str(path)).num_bytes] for path in paths]


class Resumption:
    """The snapshot from which a training continues."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if snapshot.manifest.account is None or "dataset" not in snapshot.manifest.training:
            raise UsageError(f"{snapshot} was not written by 'paceline train'. Load it from Python")
        self.account = snapshot.manifest.account
        self.training = snapshot.manifest.training
        """The description of the training by :func:`describe_training`."""

    @classmethod
    def find(cls, directory: str | Path, warn: Callable[[str], None]) -> Resumption:
        return cls(read_newest(directory, warn))

    @property
    def examples(self) -> int:
        return int(self.account.progress.get("examples", 0))

    @property
    def num_passes(self) -> int:
        files, num_done = self.account.files, 0
        done: dict[tuple[int, int], int] = {}
        for epoch, file, _ in shards_in(self.account.done):
            done[epoch, file] = done.get((epoch, file), 0) + 1
        while num_done < self.training["epochs"] and all(
            size is not None and done.get((num_done, file), 0) >= size for file, size in enumerate(files)
        ):
            num_done += 1
        return num_done

    def reordered(self, plan: TrainingPlan) -> tuple[int, ...]:
        """Return the started passes that would have another order under `plan`. They keep their old order."""
        num_shuffled, former = (plan.epochs - 1) * (plan.order == "shuffle"), self.training
        num_before = (former["epochs"] - 1) * (former["order"] == "shuffle")
        changed = set(range(*sorted((num_before, num_shuffled)))) ^ set(former["reordered"])
        return tuple(sorted(changed & {epoch for epoch, _, _ in shards_in(self.account.done)}))

    @property
    def model(self) -> SparseModel:
        return read_model_settings(self.training["model"])

    @property
    def shard_bytes(self) -> int:
        """The size of the data's shards. A resumed training must use the same size."""
        return int(self.training["dataset"]["shard_bytes"])

    def check_model(self, model: SparseModel) -> None:
        if self.model != model:
            raise UsageError(
                f"{self.snapshot} has the model {describe_settings(self.model.describe())}, not "
                f"{describe_settings(model.describe())}. Resume with the same model"
            )

    def check_data(self, dataset: Dataset) -> None:
        former = [list(file) for file in self.training["files"]]
        given = describe_files(dataset.files, dataset.format)
        if len(former) != len(given):
            raise DataError(
                f"{self.snapshot} belongs to a training on {len(former)} files, not {len(given)}. Resume with the "
                "same files in the same order"
            )
        for number, ((name, size), (given_name, given_size)) in enumerate(zip(former, given, strict=True), 1):
            if (name, size) != (given_name, given_size):
                raise DataError(
                    f"{self.snapshot}: file {number} of its training was {name} with {size:,} bytes, not "
                    f"{given_name} with {given_size:,} bytes. Resume with the same files in the same order"
                )
        spec, former_spec = dataset.spec(), self.training["dataset"]
        of_columns = (field.name for field in dataclasses.fields(Columns) if field.name != "scales")
        for name in ("format", *of_columns, "shard_bytes"):
            if spec.get(name) != former_spec.get(name):
                raise DataError(
                    f"{self.snapshot}: its training read the data with {name} {former_spec.get(name)!r}, not "
                    f"{spec.get(name)!r}. Resume with the same options"
                )
        if spec.get("scales") != former_spec.get("scales"):
            how = "other scales" if former_spec.get("scales") else "no scale"
            raise DataError(
                f"{self.snapshot}: its training had {how} for numeric columns. Resume with the same --numeric-scale"
            )

    def load(self, client: Client, check: Callable[[], None]) -> None:
        load_snapshot(client, self.snapshot, check=check)

    def describe(self) -> str:
        manifest = self.snapshot.manifest
        done = sum(int.from_bytes(part.shards, "little").bit_count() for part in self.account.done)
        known = [size for size in self.account.files if size is not None]
        of = f" of {sum(known) * self.training['epochs']:,}" if len(known) == len(self.account.files) else ""
        at = "" if manifest.iteration is None else f", iteration {manifest.iteration:,}"
        return f"resuming from {self.snapshot}: {done:,}{of} shards done, {self.examples:,} examples{at}"

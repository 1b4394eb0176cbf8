"""Snapshots of a training: when one is due, what is told when it does not come about, and how to go on from one.

Whom it talks to: the driver (:mod:`paceline.training.train`), which looks in now and then, and
:mod:`paceline.ps.client.snapshots` and :mod:`~paceline.ps.client.snapshot_loading`, which have servers write and read.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.data import FORMATS, Columns, Dataset
from paceline.errors import DataError, PacelineError, UsageError
from paceline.models.base import SparseModel
from paceline.models.registry import describe_settings, read_model_settings
from paceline.protocol.jobs import JobAccount, JobState, shards_in
from paceline.ps import Client, messages, to_fields
from paceline.ps.client.snapshot_loading import load_snapshot
from paceline.ps.client.snapshots import SnapshotTaker
from paceline.storage.format import SnapshotManifest
from paceline.storage.snapshot_directory import Snapshot, SnapshotWriteError, read_newest
from paceline.training.options import SnapshotPlan
from paceline.training.plan import TrainingPlan

_EVERY = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)|(\d[\d_]*)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_every(text: str) -> tuple[float | None, int | None]:
    """Return the seconds or the examples that a text means: ``30s``, ``5m``, ``1h`` or ``100000``."""
    found = _EVERY.fullmatch(text.strip())
    if found is not None and found[3] is None and float(found[1]) > 0:
        return float(found[1]) * _SECONDS[found[2]], None
    if found is not None and found[3] is not None and int(found[3]) > 0:
        return None, int(found[3])
    raise UsageError(f"every {text!r}: expected a time such as 30s, 5m or 1h, or a number of examples such as 100000")


class TrainingSnapshots:
    """Takes the snapshots of one training on time; nothing that goes wrong with them is the training's concern."""

    def __init__(self, client: Client, plan: SnapshotPlan, warn: Callable[[str], None]) -> None:
        self.directory = plan.directory
        self._client = client
        self._plan = plan
        self._warn = warn
        self._taker = SnapshotTaker(client, plan.directory, keep=plan.keep)
        self._job = 0
        self._training: dict[str, Any] = {}
        self._last_s = 0.0
        self._last_examples = 0
        self.newest: SnapshotManifest | None = None
        """The last one of this training."""

    def begin(self, training: dict[str, Any], examples: int) -> None:
        """Take them of a training whose first job comes now; `examples` were done before."""
        self._training = training
        self._last_s = time.monotonic()
        self._last_examples = examples

    def follow(self, job: int) -> None:
        """Take them of this job from now on."""
        self._job = job

    def describe(self, **news: Any) -> None:
        """Have the next ones say this too of the training."""
        self._training = {**self._training, **news}

    def look(self, state: JobState) -> None:
        """Begin a snapshot if one is due, go on with the one that is being taken; never waits."""
        try:
            if self._taker.is_taking:
                self.newest = self._taker.poll() or self.newest
            elif self._is_due(state):
                account = self._client.link.call(messages.GetAccount(job=self._job), JobAccount)
                self._taker.begin(account, self._training)
        except SnapshotWriteError as error:
            self._warn(f"{error}; the training goes on")
        except PacelineError as error:  # whether it can go on without this server, the driver sees
            self._taker.give_up()
            self._warn(f"a snapshot was not taken: {error}")

    def _is_due(self, state: JobState) -> bool:
        now, examples = time.monotonic(), int(state.progress.get("examples", 0))
        if self._plan.seconds is not None:
            due = now - self._last_s >= self._plan.seconds
        else:
            assert self._plan.examples is not None
            due = examples - self._last_examples >= self._plan.examples
        if due:
            self._last_s, self._last_examples = now, examples
        return due

    def end(self) -> None:
        """Take none any more; one that is not there yet is given up."""
        try:
            self._taker.close()
        except PacelineError:
            pass  # the cluster is gone, and with it what was being written


def describe_training(dataset: Dataset, plan: TrainingPlan, consistency: str) -> dict[str, Any]:
    """Return what a snapshot says of the training that it is of."""
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
    """Return by what files of a format are known again: their names and sizes."""
    return [[os.path.basename(path), FORMATS[format].stat(str(path)).num_bytes] for path in paths]


def _with_weights(account: JobAccount) -> JobAccount:
    """Return an account whose examples have a summed weight: where none was counted each has counted once."""
    progress = account.progress
    if "weight" in progress or "examples" not in progress:
        return account
    return dataclasses.replace(account, progress={**progress, "weight": progress["examples"]})


class Resumption:
    """The snapshot that a training goes on from."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if snapshot.manifest.account is None or "dataset" not in snapshot.manifest.training:
            raise UsageError(f"{snapshot} is of no training that 'paceline train' has done: load it from Python")
        self.account = _with_weights(snapshot.manifest.account)
        self._training = snapshot.manifest.training

    @classmethod
    def find(cls, directory: str | Path, warn: Callable[[str], None]) -> Resumption:
        """Take the newest whole snapshot of a directory. Raises ModelError if there is none."""
        return cls(read_newest(directory, warn))

    @property
    def examples(self) -> int:
        """Those of the shards that were done."""
        return int(self.account.progress.get("examples", 0))

    @property
    def num_passes(self) -> int:
        """How many passes over the data are whole."""
        files, num_done = self.account.files, 0
        done: dict[tuple[int, int], int] = {}
        for epoch, file, _ in shards_in(self.account.done):
            done[epoch, file] = done.get((epoch, file), 0) + 1
        while num_done < self._training["epochs"] and all(
            size is not None and done.get((num_done, file), 0) >= size for file, size in enumerate(files)
        ):
            num_done += 1
        return num_done

    def reordered(self, plan: TrainingPlan) -> tuple[int, ...]:
        """Return the begun passes that a plan would put into another order, in which they would lose shards."""
        num_shuffled, former = (plan.epochs - 1) * (plan.order == "shuffle"), self._training
        num_before = (former["epochs"] - 1) * (former.get("order") == "shuffle")  # older versions shuffled none
        changed = set(range(*sorted((num_before, num_shuffled)))) ^ set(former.get("reordered", ()))
        return tuple(sorted(changed & {epoch for epoch, _, _ in shards_in(self.account.done)}))

    @property
    def training(self) -> Mapping[str, Any]:
        """What :func:`describe_training` said of the training."""
        return self._training

    @property
    def model(self) -> SparseModel:
        """What was trained."""
        trained = self._training["model"]
        return read_model_settings({"kind": trained} if isinstance(trained, str) else trained)  # a name: by 0.1

    @property
    def shard_bytes(self) -> int:
        """How the data was cut into shards, and must be again."""
        return int(self._training["dataset"]["shard_bytes"])

    def check_model(self, model: SparseModel) -> None:
        """Raise UsageError unless the snapshot's training is of this model."""
        if self.model != model:
            raise UsageError(
                f"{self.snapshot} is of a training of {describe_settings(self.model.describe())}, and it is "
                f"{describe_settings(model.describe())} now: resume with the same model"
            )

    def check_data(self, dataset: Dataset) -> None:
        """Raise DataError unless a data set is the one that the snapshot's training has read."""
        before, now = [list(each) for each in self._training["files"]], describe_files(dataset.files, dataset.format)
        if len(before) != len(now):
            raise DataError(
                f"{self.snapshot} is of a training on {len(before)} files, and {len(now)} are given: resume with the "
                "same files in the same order"
            )
        for number, ((name, size), (name_now, size_now)) in enumerate(zip(before, now, strict=True), 1):
            if (name, size) != (name_now, size_now):
                raise DataError(
                    f"{self.snapshot} is of a training whose file {number} was {name} of {size:,} bytes, and it is "
                    f"{name_now} of {size_now:,} bytes now: resume with the same files in the same order"
                )
        ours, theirs = dataset.spec(), self._training["dataset"]
        of_columns = (each.name for each in dataclasses.fields(Columns) if each.name != "scales")
        for name in ("format", *of_columns, "shard_bytes"):
            if ours.get(name) != theirs.get(name):
                raise DataError(
                    f"{self.snapshot} is of a training that read the data with {name} {theirs.get(name)!r}, and it is "
                    f"{ours.get(name)!r} now: resume with the same options"
                )
        if ours.get("scales") != theirs.get("scales"):
            how = "other scales" if theirs.get("scales") else "no scale"
            raise DataError(
                f"{self.snapshot} is of a training whose numeric columns were on {how}: resume with the "
                "--numeric-scale that it had (none, if it is of a version that had no such option)"
            )

    def load(self, client: Client, check: Callable[[], None]) -> None:
        """Load the tables; `check` is called now and then, and may raise. Raises as :func:`load_snapshot`."""
        load_snapshot(client, self.snapshot, check=check)

    def describe(self) -> str:
        """Say where the training goes on."""
        manifest = self.snapshot.manifest
        done = sum(int.from_bytes(each.shards, "little").bit_count() for each in self.account.done)
        known = [size for size in self.account.files if size is not None]
        of = f" of {sum(known) * self._training['epochs']:,}" if len(known) == len(self.account.files) else ""
        at = "" if manifest.iteration is None else f", iteration {manifest.iteration:,}"
        return f"resuming from {self.snapshot}: {done:,}{of} shards done, {self.examples:,} examples{at}"

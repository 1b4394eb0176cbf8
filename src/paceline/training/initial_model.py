"""Start a training from a saved model or a snapshot."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

from paceline.data import FORMATS, Columns, Dataset, detect_format, have_same_features, source_format
from paceline.errors import DataError, PeerError, UsageError
from paceline.models.base import SparseModel, open_tables
from paceline.models.clicks import for_classes
from paceline.models.registry import read_model_settings
from paceline.models.stored import StoredModel, read_stored_model
from paceline.models.update import rule_of
from paceline.protocol.jobs.messages import OCCUPIED
from paceline.ps import FTRL, Client, SparseTable, UpdateRule, messages, read_records, write_records
from paceline.ps.client.client import make_spec
from paceline.tables.settings import to_fields
from paceline.training.options import TrainOptions
from paceline.training.tuning.choices import L1

_PATIENCE_S, _PAUSE_S = 5.0, 0.1


class InitialModel:
    """A model on disk with the same tables as the training's model. Raises UsageError for other tables."""

    def __init__(self, stored: StoredModel, model: SparseModel, update: UpdateRule) -> None:
        self._stored = stored
        self._model, self._update = model, update
        for table in model.tables:
            found = next((part.spec for part in stored.tables if part.spec.name == table.name), None)
            rule = to_fields(table.update or update)
            if found is None or found.dim != table.dim or found.update["kind"] != rule["kind"]:
                state = "is missing" if found is None else f"is {found}"
                raise UsageError(
                    f"table {table.name!r} of the model in {stored.directory} {state}, but this training needs "
                    f"{rule['kind']} and dim={table.dim}. Pass the same --update and sizes"
                )

    @classmethod
    def read(cls, directory: str | os.PathLike[str], model: SparseModel, update: UpdateRule) -> InitialModel:
        return cls(read_stored_model(directory), model, update)

    def check_data(self, dataset: Dataset) -> None:
        _check_format(self._stored, dataset.source_format)
        columns = self._stored.described.get("columns")
        read = None if dataset.columns is None else dataset.columns.unweighted
        if columns is not None and read != Columns.from_fields(columns).unweighted:
            raise DataError(
                f"the model in {self._stored.directory} was trained with other columns. Leave --label, --categorical "
                "and --numeric out to use the model's columns"
            )

    def load(self, client: Client, check: Callable[[], None]) -> None:
        """Write the rows into the tables of a new cluster. Call `check`, which may raise errors, between requests."""
        stored = {table.spec.name: table for table in self._stored.tables}
        for handle in open_tables(client, self._model, self._update):
            for keys, records in self._stored.records(stored[handle.name]):
                check()
                write_records(client, handle.spec, keys, records)


def _claim_cluster(client: Client, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not client.link.call(messages.ClaimCluster(), bool):
        check()
        if time.monotonic() > deadline:
            raise PeerError(OCCUPIED)
        time.sleep(_PAUSE_S)


def clear_tables(client: Client, model: SparseModel, update: UpdateRule, check: Callable[[], None]) -> None:
    """Erase the rows of an earlier training, and set this training's hyperparameters.

    Calls `check` between requests. Raises PeerError if another training uses the cluster, and UsageError if the tables
    have other properties.
    """
    _claim_cluster(client, check)
    known = {spec.name: spec for spec in client.tables()}
    for table in model.tables:
        spec, rule = known.get(table.name), table.update or update
        if spec is None:
            continue
        wanted = make_spec(table.name, "sparse", rule, table.initializer, spec.seed, dim=table.dim)
        if spec.update["kind"] != wanted.update["kind"] or spec.with_update(wanted.update) != wanted:
            raise UsageError(
                f"table {table.name!r} of an earlier training on this cluster is {spec}, but this training needs "
                f"{wanted}. End the cluster and start another one"
            )
        handle = client.open_table(spec)
        assert isinstance(handle, SparseTable)
        for keys, _ in read_records(client, spec):
            check()
            handle.erase(keys)
        if spec != wanted:
            handle.set_update(rule)


def continue_from(options: TrainOptions) -> TrainOptions:
    """Return the options with the initial model's settings and columns. Raises UsageError and ModelError."""
    if options.init_from is None:
        return options
    if options.resume is not None:
        raise UsageError("--resume continues a training, but --init-from starts one. Pass only one of these options")
    stored = read_stored_model(options.init_from)
    _check_format(stored, source_format(options.data[0], options.format))
    columns = stored.described.get("columns")
    classes = () if columns is None else Columns.from_fields(columns).classes
    options = dataclasses.replace(options, model=for_classes(options.model, classes))
    if columns is not None:
        known = dataclasses.replace(Columns.from_fields(columns), weight=options.weights.column or "")
        if options.reading.header != "auto":
            known = dataclasses.replace(known, header=options.reading.header)
        if _has_same_columns(options, known):
            options = dataclasses.replace(options, columns=known, numeric_scale="none")
    options = dataclasses.replace(options, model=_continue_model(stored, options.model))
    InitialModel(stored, options.model, rule_of(options.update, FTRL().alpha, L1))
    return options


def _has_same_columns(options: TrainOptions, known: Columns) -> bool:
    named = options.columns
    if named is not None and (named.label, named.categorical, named.numeric) != (
        known.label,
        known.categorical,
        known.numeric,
    ):
        return False
    path = str(options.data[0])
    format = options.format or detect_format(path)
    found = FORMATS[format].column_names(path, known.names, known.header)
    names = found or known.names + options.reading.names
    return options.reading.fit(path, known, names)


def _continue_model(stored: StoredModel, wanted: SparseModel) -> SparseModel:
    kind = stored.described.get("kind")
    if kind != wanted.name:
        raise UsageError(f"the model in {stored.directory} has the kind {kind!r}. Continue it with --model {kind}")
    found = read_model_settings(stored.described)
    known, given = found.interactions, wanted.interactions
    if known is not None and given is not None and known.text == given.text:
        wanted = dataclasses.replace(wanted, interactions=known)
    settings, usual = found.describe(), type(wanted)().describe()
    for name, value in wanted.describe().items():
        if value not in (settings.get(name), usual.get(name)):
            raise UsageError(
                f"the model in {stored.directory} has {name}={settings.get(name)}, not {name}={value}. Pass the stored "
                "value to continue its training"
            )
    return found


def _check_format(stored: StoredModel, format: str) -> None:
    before = stored.described.get("format")
    if not have_same_features(format, str(before)):
        raise DataError(
            f"the model in {stored.directory} was trained on {before} and has no features of {format}. Train it "
            f"further on {before}"
        )

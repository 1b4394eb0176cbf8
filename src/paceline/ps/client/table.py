"""The base of sparse and dense tables in a client: settings, and checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.errors import UsageError
from paceline.filters.base import Filter
from paceline.kernels.dedup import dedup, scratch_size, sum_rows
from paceline.kernels.sparse import largest
from paceline.observe.notebooks import NotebookTable
from paceline.protocol import Consistency
from paceline.protocol.bounds import Natural
from paceline.ps import messages
from paceline.ps.client.filtered import TableFilters
from paceline.ps.client.servers import Servers
from paceline.ps.messages import TableSpec
from paceline.ps.scheduler.link import SchedulerLink
from paceline.tables.part import not_finite
from paceline.tables.rules import RULES, UpdateRule
from paceline.tables.settings import from_fields, to_fields
from paceline.tables.types import Floats, Keys


class TableClient(Protocol):
    """The members of :class:`paceline.ps.Client` that its tables use."""

    link: SchedulerLink
    servers: Servers
    role: str
    rank: int
    consistency: Consistency

    def flush(self) -> None: ...

    def statistics(self) -> list[messages.ServerStatistics]: ...

    def tables(self) -> list[TableSpec]: ...

    def open_table(self, spec: TableSpec) -> Table: ...


class Table(NotebookTable):
    """A client's object for one table. This class is abstract."""

    def __init__(self, client: TableClient, number: int, spec: TableSpec, filters: TableFilters | None = None) -> None:
        self._client = client
        self.filters = filters
        self._servers = client.servers
        self._number = number
        self.spec = spec
        self._scratch = np.empty(0, np.int32)

    def __repr__(self) -> str:
        rows = {**self.described_rows(), "kind": type(self).__name__}
        return "<{kind} {name!r}: {shape}, {update!r}, {place}>".format(**rows)

    @override
    def described_rows(self) -> dict[str, Any]:
        spec, servers = self.spec, len(self._servers.routes.server_ranks)
        return {
            "name": self.name,
            "shape": f"dim {spec.dim}" if spec.kind == "sparse" else f"{spec.size:,} elements",
            "update": from_fields(RULES, spec.update),
            "place": "its client is closed"
            if self._servers.is_closed
            else f"on {servers} server{'' if servers == 1 else 's'}",
        }

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name

    @property
    def number(self) -> int:
        """The table's number in this cluster."""
        return self._number

    def set_update(self, update: UpdateRule) -> None:
        """Change hyperparameters, such as the learning rate, on every server; the rule must stay the same.

        Models saved later contain the new values. Processes may declare the table with the new or the original values.
        Raises UsageError for another rule, before anything is changed.
        """
        if not isinstance(update, UpdateRule):
            raise UsageError(f"update={update!r}: expected an update rule such as paceline.SGD(lr=0.1)")
        self._flush_filtered()
        with self._servers.lock:
            fields = to_fields(update)
            revision = self._client.link.call(messages.ChangeUpdate(table=self.name, update=fields), Natural)
            self._servers.call_all(messages.SetUpdate(table=self._number, update=fields, revision=revision))
            self.spec = self.spec.with_update(fields)

    def set_filters(self, filters: Sequence[Filter] = (), pull_filters: Sequence[Filter] | None = None) -> None:
        """Set the filters of this client's later requests, as in the table's declaration.

        Values that the former filters have not sent yet are lost. Pulls in flight are answered without filters. Raises
        UsageError if a server lacks a filter, before anything is changed.
        """
        chosen = TableFilters(filters, pull_filters, is_dense=self.spec.kind == "dense") or None
        if chosen is not None:
            chosen.check_fits(self.spec)
        with self._servers.lock:
            if chosen is not None and not chosen.are(self.filters):
                self._servers.call_all(messages.CheckFilters(filters=chosen.info))
                self.filters = chosen
            elif chosen is None:
                self.filters = None

    def _flush_filtered(self) -> None:
        """Wait for filtered requests, because they must be resent without filters if a server rejects them."""
        if self.filters is not None:
            self._client.flush()

    def _check_keys(self, keys: npt.ArrayLike) -> Keys:
        array = np.asarray(keys)
        if array.dtype != np.uint64:
            array = self._convert_keys(array)
        if array.ndim != 1:
            raise UsageError(f"keys of table {self.name!r} have shape {array.shape}: expected one dimension, [n]")
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def _convert_keys(self, array: npt.NDArray[Any]) -> Keys:
        if array.size == 0:
            return array.astype(np.uint64)
        if array.dtype.kind not in "iu":
            raise UsageError(
                f"keys of table {self.name!r} are {array.dtype}: expected uint64 (or another integer type)"
            )
        if array.dtype.kind == "i" and array.min() < 0:
            raise UsageError(
                f"keys of table {self.name!r} hold {array.min()}: keys are uint64; if negative numbers are meant as "
                "bit patterns, pass keys.view(np.uint64)"
            )
        return array.astype(np.uint64)

    def _check_grads(self, grads: npt.ArrayLike, count: int, dim: int) -> Floats:
        array = np.asarray(grads)
        if array.dtype != np.float32:
            raise UsageError(
                f"gradients for table {self.name!r} are {array.dtype}: expected float32; convert with "
                "grads.astype(np.float32)"
            )
        if array.shape != (count, dim) and not (dim == 1 and array.shape == (count,)):
            raise UsageError(
                f"gradients for table {self.name!r} have shape {array.shape}: expected {(count, dim)}, one row per key"
            )
        flat = np.ascontiguousarray(array).reshape(-1)
        if not largest(flat) < math.inf:
            raise not_finite(flat, f"{self._client.role} {self._client.rank}", self.name)
        return flat

    def _check_out(self, out: Floats | None, count: int, dim: int) -> Floats:
        if out is None:
            return np.empty((count, dim), np.float32)
        if not isinstance(out, np.ndarray):
            raise UsageError(
                f"out for table {self.name!r} is a {type(out).__name__}: expected a NumPy array of float32"
            )
        is_fit = out.flags.c_contiguous and out.flags.writeable
        if out.dtype != np.float32 or out.size != count * dim or not is_fit:
            raise UsageError(
                f"out for table {self.name!r} is {out.dtype} of shape {out.shape}: expected a contiguous, writable "
                f"float32 array of {count * dim} elements"
            )
        return out

    def _dedup(self, keys: Keys) -> tuple[Keys, npt.NDArray[np.int32] | None]:
        """Return the distinct keys and the position of each key among them (None if all keys are distinct)."""
        if len(keys) < 2:
            return keys, None
        size = scratch_size(len(keys))
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.int32)
        unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
        count = dedup(keys, self._scratch[:size], unique, inverse)
        return (keys, None) if count == len(keys) else (unique[:count], inverse)

    def _sum_equal(self, keys: Keys, grads: Floats, dim: int) -> tuple[Keys, Floats, npt.NDArray[np.int32] | None]:
        """Return the distinct keys, the summed gradients (flat), and the position of each key (None if all differ)."""
        distinct, inverse = self._dedup(keys)
        if inverse is None:
            return keys, grads, None
        summed = np.empty(len(distinct) * dim, np.float32)
        sum_rows(inverse, grads, dim, summed)
        return distinct, summed, inverse

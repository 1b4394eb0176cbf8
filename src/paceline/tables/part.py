"""Define the interface of a server's part of a table, sparse or dense. It uses no network and no clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from paceline.errors import NonFiniteError, UsageError
from paceline.kernels.dedup import take_keys, take_rows
from paceline.kernels.sparse import largest
from paceline.protocol.buckets import Buckets, buckets_in
from paceline.tables.bucket_arrays import positions_in
from paceline.tables.initializers import INITIALIZERS, Initializer
from paceline.tables.magnitudes import Magnitudes
from paceline.tables.rules import RULES, UpdateRule
from paceline.tables.settings import from_fields
from paceline.tables.spec import TableSpec
from paceline.tables.types import Floats, Keys

Positions = npt.NDArray[np.int64]


class Selection:
    """The keys, or the range of a dense table, of a request.

    A range covers only the elements of `buckets`. None stands for the buckets that the server leads; the first call of
    :meth:`TablePart.num_values` replaces None by these buckets, so later changes of the server's buckets do not affect
    the selection. Only dense parts use `places`.
    """

    __slots__ = ("buckets", "keys", "places", "start", "stop")

    def __init__(self, keys: Keys | None, start: int = 0, stop: int = 0, buckets: Buckets | None = None) -> None:
        self.keys = keys
        self.start = start
        self.stop = stop
        self.buckets = buckets
        self.places: Positions | None = None

    def key_array(self) -> Keys:
        if self.keys is None:
            raise UsageError(f"expected keys, got the range [{self.start}, {self.stop})")
        return self.keys

    def copy(self) -> Selection:
        """Return a copy that does not depend on a receive buffer."""
        return Selection(None if self.keys is None else self.keys.copy(), self.start, self.stop, self.buckets)


def check_finite(grads: Floats, sender: str, table: str) -> None:
    if not largest(grads) < math.inf:
        raise not_finite(grads, sender, table)


def not_finite(grads: Floats, sender: str, table: str) -> NonFiniteError:
    bad = grads[~np.isfinite(grads)][0]
    return NonFiniteError(
        f"a push of {sender} to table {table!r} contains {bad}. It was rejected, and the table is unchanged. Check "
        "for a diverging loss or a division by zero in the gradient"
    )


def sum_of(grads: Sequence[Floats], factor: float) -> Floats:
    total = grads[0]
    for more in grads[1:]:
        total = total + more
    return total if factor == 1.0 else total * np.float32(factor)


class TablePart(ABC):
    """A server's buckets of a table, for which the server is primary or replica."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.dim = spec.dim
        self.rule: UpdateRule = from_fields(RULES, spec.update)
        self.initializer: Initializer = from_fields(INITIALIZERS, spec.initializer)
        self.magnitudes = Magnitudes(self.rule, self.initializer, self.dim)
        """Bounds of the records. Callers report the gradients of pushes; this class reports all other writes."""
        self.parameters: npt.NDArray[np.float64]
        """The kernels' parameters: those of the rule and of the initializer."""
        self._held: Buckets = 0
        self._primary: Buckets = 0

    @property
    def held(self) -> Buckets:
        return self._held

    @property
    def primary(self) -> Buckets:
        """The held buckets whose elements belong to a requested range."""
        return self._primary

    @property
    def record_words(self) -> int:
        """The number of float32 in the value and the state of a key."""
        return self.dim * (1 + self.rule.num_states) + self.rule.has_count

    @property
    def num_rows(self) -> int:
        return self.rows_in(self.held)

    @abstractmethod
    def rows_in(self, buckets: Buckets) -> int: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def hold(self, buckets: Buckets) -> None:
        """Add these buckets with initial values; buckets that are already held do not change."""

    @abstractmethod
    def drop(self, buckets: Buckets) -> None:
        """Drop these buckets and free all pages that they fill."""

    @abstractmethod
    def check_bucket(self, bucket: int, keys: Keys) -> None: ...

    @abstractmethod
    def load_bucket(self, bucket: int, keys: Keys, records: Floats) -> None:
        """Replace a bucket by data in the format of :meth:`read_bucket`.

        Raises UsageError, and changes nothing, if a key is not in this bucket.
        """

    def set_primary(self, buckets: Buckets) -> None:
        """Set :attr:`primary`; all these buckets must be held."""
        assert not buckets & ~self._held
        self._primary = buckets

    @property
    def pass_number(self) -> int:
        """The current pass over the data; 0 if passes are not recorded."""
        return 0

    rows_of: int = 0
    """The pass that counts as the last pass of rows without a push since passes are recorded."""

    def with_passes(self, bucket: int, keys: Keys, records: Floats) -> Floats:
        """Return records (float32 [n, record_words]), with a column for each row's last pass if passes are recorded."""
        return records

    def load_with_passes(self, bucket: int, keys: Keys, records: Floats, rows_of: int | None = None) -> None:
        """Load records that may have the column of :meth:`with_passes`.

        Rows without this column count as pushed in pass `rows_of` (default: the current pass).
        """
        self.load_bucket(bucket, keys, records)

    @abstractmethod
    def num_values(self, selection: Selection) -> int:
        """Return the number of float32 values in a selection. Raises UsageError if this server lacks some keys."""

    @abstractmethod
    def keys_of(self, selection: Selection) -> Keys: ...

    @abstractmethod
    def buckets_of(self, selection: Selection) -> Buckets: ...

    def restrict(self, selection: Selection, grads: Floats, buckets: Buckets) -> tuple[Selection, Floats]:
        """Return the keys and gradients of a push (float32 [num_values]) that belong to these buckets.

        If all keys belong to `buckets`, return `selection` and `grads` themselves. The gradients may be a view. Buckets
        outside `buckets` may already be dropped. If the selection has keys, each row of `grads` may have any width.
        """
        keys = selection.key_array()
        order = positions_in(self.spec, keys, buckets)
        if len(order) == len(keys):
            return selection, grads
        width = len(grads) // len(keys)
        chosen_keys, chosen_grads = np.empty(len(order), np.uint64), np.empty(len(order) * width, np.float32)
        take_keys(keys, order, chosen_keys)
        take_rows(grads, order, width, chosen_grads)
        return Selection(chosen_keys), chosen_grads

    @abstractmethod
    def pull(self, selection: Selection, out: Floats) -> None:
        """Read values into `out` (float32 [num_values])."""

    @abstractmethod
    def reserve(self, selection: Selection) -> None:
        """Allocate the memory that a push or write needs. Raises MemoryError, without changing readable values."""

    @abstractmethod
    def push(self, selection: Selection, grads: Floats) -> None:
        """Apply the update rule with finite `grads` (float32 [num_values])."""

    @abstractmethod
    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        """Apply the update rule once with the sum of finite `grads` (float32 [num_values] each) times `factor`."""

    @abstractmethod
    def trial(self, selection: Selection, grads: Floats) -> Iterator[tuple[Keys, Floats]]:
        """Yield, in blocks, the keys (uint64 [n]) and records (float32 [n, record_words]) that a push would write."""

    def measure_all(self) -> None:
        self.magnitudes.reset()
        for bucket in buckets_in(self.held):
            self.magnitudes.widen(self.read_bucket(bucket)[1])

    @abstractmethod
    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        """Return a copy of a bucket: keys (uint64 [n]) and records (float32 [n, record_words])."""

    @abstractmethod
    def write_records(self, keys: Keys, records: Floats) -> None:
        """Set complete records: values and state of each key."""

    @abstractmethod
    def erase(self, keys: Keys) -> int:
        """Erase the rows of `keys`, and return the number of rows that existed."""

    def set_update(self, rule: UpdateRule) -> None:
        rule.check_follows(self.rule, f"table {self.spec.name!r}")
        self.rule = rule
        self.magnitudes.set_rule(rule)
        self.parameters[: len(rule.hyper)] = rule.hyper

    def _wrong_bucket(self, bucket: int) -> UsageError:
        return UsageError(
            f"records for bucket {bucket} of {self.spec.kind} table {self.spec.name!r} contain keys of other buckets. "
            "The bucket is unchanged"
        )

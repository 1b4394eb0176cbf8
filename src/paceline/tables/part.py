"""The interface of a server's part of a sparse or dense table. It uses no network and no clock."""

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
    """The elements of a table that a request reads or writes: keys, or a range of elements of a dense table.

    A range selects only the elements in `buckets`. None means the buckets whose primary is this server. The first call
    of :meth:`TablePart.num_values` replaces None by these buckets, so that later changes of the server's buckets do not
    affect the selection. Only dense parts use `places`.
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
        """Return a copy of the selection with its own memory, so that the receive buffer can be reused."""
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
    """The buckets of a table that a server holds as primary or as replica."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.dim = spec.dim
        self.rule: UpdateRule = from_fields(RULES, spec.update)
        self.initializer: Initializer = from_fields(INITIALIZERS, spec.initializer)
        self.magnitudes = Magnitudes(self.rule, self.initializer, self.dim)
        """Upper bounds of the numbers in the records. The caller of a push raises them; other writes do so themselves.
        """
        self.parameters: npt.NDArray[np.float64]
        """The numbers that kernels receive: the hyperparameters of the rule, and the numbers of the initializer."""
        self._held: Buckets = 0
        self._primary: Buckets = 0

    @property
    def held(self) -> Buckets:
        return self._held

    @property
    def primary(self) -> Buckets:
        """The buckets whose primary is this server. A request for a range reads only the elements in them."""
        return self._primary

    @property
    def record_words(self) -> int:
        """The number of float32 in a record: the values and the state of a key."""
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
        """Add buckets with initial values. Buckets that this part already holds do not change."""

    @abstractmethod
    def drop(self, buckets: Buckets) -> None:
        """Drop buckets, and free all pages of memory that only they use."""

    @abstractmethod
    def check_bucket(self, bucket: int, keys: Keys) -> None: ...

    @abstractmethod
    def load_bucket(self, bucket: int, keys: Keys, records: Floats) -> None:
        """Replace a bucket by data in the format of :meth:`read_bucket`. If a key is not in this bucket, raise
        UsageError and change nothing.
        """

    def set_primary(self, buckets: Buckets) -> None:
        """Set :attr:`primary`. This part must hold all of these buckets."""
        assert not buckets & ~self._held
        self._primary = buckets

    @property
    def pass_number(self) -> int:
        """The number of the current pass over the data; 0 if the table does not record passes."""
        return 0

    rows_of: int = 0
    """If a row was not pushed since the table records passes, this pass is regarded as its last push."""

    def with_passes(self, bucket: int, keys: Keys, records: Floats) -> Floats:
        """Return `records` (float32 [n, record_words]). If the table records passes, add a column of last passes."""
        return records

    def load_with_passes(self, bucket: int, keys: Keys, records: Floats, rows_of: int | None = None) -> None:
        """Load records that may have the additional column of :meth:`with_passes`.

        If the column is missing, pass `rows_of` (default: the current pass) is regarded as the rows' last push.
        """
        self.load_bucket(bucket, keys, records)

    @abstractmethod
    def num_values(self, selection: Selection) -> int:
        """Return a selection's number of float32 values. Raises UsageError if this part does not hold all its keys."""

    @abstractmethod
    def keys_of(self, selection: Selection) -> Keys: ...

    @abstractmethod
    def buckets_of(self, selection: Selection) -> Buckets: ...

    def restrict(self, selection: Selection, grads: Floats, buckets: Buckets) -> tuple[Selection, Floats]:
        """Return the part of a push (keys and gradients) that belongs to `buckets`.

        `grads` is float32 [num_values]. If all keys belong to `buckets`, `selection` and `grads` themselves are
        returned. The returned gradients may be a view of `grads`. This part need not hold the other buckets of the
        push. If the selection has keys, `grads` may have rows of any width.
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
        """Allocate the memory that a push or write of the selection needs.

        Raises MemoryError, and then changes no value.
        """

    @abstractmethod
    def push(self, selection: Selection, grads: Floats) -> None:
        """Apply the update rule with finite `grads` (float32 [num_values])."""

    @abstractmethod
    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        """Apply the update rule once, to the sum of finite `grads` (float32 [num_values] each) times `factor`."""

    @abstractmethod
    def trial(self, selection: Selection, grads: Floats) -> Iterator[tuple[Keys, Floats]]:
        """Yield blocks of the keys (uint64 [n]) and records (float32 [n, record_words]) that a push would write."""

    def measure_all(self) -> None:
        self.magnitudes.reset()
        for bucket in buckets_in(self.held):
            self.magnitudes.widen(self.read_bucket(bucket)[1])

    @abstractmethod
    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        """Return a copy of a bucket: keys (uint64 [n]) and records (float32 [n, record_words])."""

    @abstractmethod
    def write_records(self, keys: Keys, records: Floats) -> None:
        """Set the complete records (values and state) of `keys`."""

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

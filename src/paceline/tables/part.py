"""A server's part of a table, in general: what can be asked of it, and of which keys. No networks, no clocks."""

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
    """The keys, or the range of a dense table, that a request is about.

    Of a range only the elements of `buckets` are meant; None stands for those of which the server is primary, and is
    replaced by them when the selection is first counted (:meth:`TablePart.num_values`): what a request was about stays
    the same when the server's buckets change before it is done. `places` is a dense part's own.
    """

    __slots__ = ("buckets", "keys", "places", "start", "stop")

    def __init__(self, keys: Keys | None, start: int = 0, stop: int = 0, buckets: Buckets | None = None) -> None:
        self.keys = keys
        self.start = start
        self.stop = stop
        self.buckets = buckets
        self.places: Positions | None = None

    def key_array(self) -> Keys:
        """Return the keys. Raises UsageError for a range."""
        if self.keys is None:
            raise UsageError(f"expected keys, got the range [{self.start}, {self.stop})")
        return self.keys

    def copy(self) -> Selection:
        """Return one that does not depend on a receive buffer."""
        return Selection(None if self.keys is None else self.keys.copy(), self.start, self.stop, self.buckets)


def check_finite(grads: Floats, who: str, table: str) -> None:
    """Raise NonFiniteError unless gradients (flat) are finite."""
    if not largest(grads) < math.inf:
        raise not_finite(grads, who, table)


def not_finite(grads: Floats, who: str, table: str) -> NonFiniteError:
    """Return the reason for rejecting a push with these gradients."""
    bad = grads[~np.isfinite(grads)][0]
    return NonFiniteError(
        f"a push of {who} to table {table!r} holds {bad}; it was refused and the table is unchanged: look for a "
        "diverging loss or a division by zero in the gradient"
    )


class TablePart(ABC):
    """What one server holds of a table: some buckets, of which it is the primary server or a replica."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.dim = spec.dim
        self.rule: UpdateRule = from_fields(RULES, spec.update)
        self.initializer: Initializer = from_fields(INITIALIZERS, spec.initializer)
        self.magnitudes = Magnitudes(self.rule, self.initializer, self.dim)
        """How large its records can be. Who pushes tells them of the gradients first; the rest they are told here."""
        self._held: Buckets = 0
        self._primary: Buckets = 0

    @property
    def held(self) -> Buckets:
        """The buckets that are here."""
        return self._held

    @property
    def primary(self) -> Buckets:
        """Those of them that requests for a range are about."""
        return self._primary

    @property
    def record_words(self) -> int:
        """How many float32 the value and the state of a key are."""
        return self.dim * (1 + self.rule.num_states) + self.rule.has_count

    @property
    @abstractmethod
    def parameters(self) -> npt.NDArray[np.float64]:
        """The kernel's parameter array."""

    @property
    def num_rows(self) -> int:
        """Rows (sparse) or elements (dense) held."""
        return self.rows_in(self.held)

    @abstractmethod
    def rows_in(self, buckets: Buckets) -> int:
        """How many rows (sparse) or elements (dense) of these buckets are held."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held."""

    # Buckets that come and go.

    @abstractmethod
    def hold(self, buckets: Buckets) -> None:
        """Hold these buckets too, with initial values; those that are here already stay as they are."""

    @abstractmethod
    def drop(self, buckets: Buckets) -> None:
        """Forget these buckets, and give their memory back as far as it makes whole pages."""

    @abstractmethod
    def check_bucket(self, bucket: int, keys: Keys) -> None:
        """Raise UsageError where a key is not of this bucket."""

    @abstractmethod
    def load_bucket(self, bucket: int, keys: Keys, records: Floats) -> None:
        """Make `keys` and `records`, as :meth:`read_bucket` returns them, all that a bucket holds.

        Raises UsageError, and changes nothing, where a key is not of this bucket.
        """

    def set_primary(self, buckets: Buckets) -> None:
        """Let requests for a range be about these buckets, all of which are held."""
        assert not buckets & ~self._held
        self._primary = buckets

    # Requests.

    @property
    def pass_number(self) -> int:
        """The pass over the data that pushes count as of; 0 where that is not noted."""
        return 0

    def with_passes(self, bucket: int, keys: Keys, records: Floats) -> Floats:
        """Return a bucket's records (float32 [n, record_words]) with one column more, where passes are noted.

        It has the number of the pass in which each row was last pushed.
        """
        return records

    def load_with_passes(self, bucket: int, keys: Keys, records: Floats) -> None:
        """Do as :meth:`load_bucket` with records that may have the column of :meth:`with_passes`."""
        self.load_bucket(bucket, keys, records)

    @abstractmethod
    def num_values(self, selection: Selection) -> int:
        """How many float32 a selection's values are, on this server. Raises UsageError if it is not all there."""

    @abstractmethod
    def keys_of(self, selection: Selection) -> Keys:
        """Return the keys of a selection that lie on this server, in order."""

    @abstractmethod
    def buckets_of(self, selection: Selection) -> Buckets:
        """Return the buckets that a selection's keys are of."""

    @abstractmethod
    def restrict(self, selection: Selection, grads: Floats, buckets: Buckets) -> tuple[Selection, Floats]:
        """Return the part of a push (float32 [num_values]) that is of these buckets; the same objects if all of it is.

        The gradients may be a view of those given. The other buckets need not be here any more. Of a selection of keys
        the rows may be of any width: records, or nothing.
        """

    def _restrict_keys(self, selection: Selection, rows: Floats, buckets: Buckets) -> tuple[Selection, Floats]:
        keys = selection.key_array()
        order = positions_in(self.spec, keys, buckets)
        if len(order) == len(keys):
            return selection, rows
        width = len(rows) // len(keys)
        taken, chosen = np.empty(len(order), np.uint64), np.empty(len(order) * width, np.float32)
        take_keys(keys, order, taken)
        take_rows(rows, order, width, chosen)
        return Selection(taken), chosen

    @abstractmethod
    def pull(self, selection: Selection, out: Floats) -> None:
        """Read values into `out` (float32 [num_values])."""

    @abstractmethod
    def reserve(self, selection: Selection) -> None:
        """Take the memory that a push or write of a selection needs: then it does not fail for want of it.

        Raises MemoryError, and changes nothing that can be read, if there is none.
        """

    @abstractmethod
    def push(self, selection: Selection, grads: Floats) -> None:
        """Apply the update rule with finite `grads` (float32 [num_values])."""

    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        """Apply the update rule once with the sum of finite `grads` (float32 [num_values] each) times `factor`."""
        total = grads[0]
        for more in grads[1:]:
            total = total + more
        self.push(selection, total if factor == 1.0 else total * np.float32(factor))

    @abstractmethod
    def trial(self, selection: Selection, grads: Floats) -> Iterator[tuple[Keys, Floats]]:
        """Yield keys (uint64 [n]) and records (float32 [n, record_words]), in blocks, as a push would leave them."""

    def look_at_all(self) -> None:
        """Find the magnitudes of the records there are."""
        self.magnitudes.begin_anew()
        for bucket in buckets_in(self.held):
            self.magnitudes.widen(self.read_bucket(bucket)[1])

    @abstractmethod
    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        """Return keys (uint64 [n]) and records (float32 [n, record_words]) of a bucket: a copy, in its own memory.

        It may wait in a queue, or be written to, while the table changes.
        """

    @abstractmethod
    def write_records(self, keys: Keys, records: Floats) -> None:
        """Set whole records: values and state of each key."""

    @abstractmethod
    def erase(self, keys: Keys) -> int:
        """Erase the rows of `keys`; return how many there were."""

    def set_update(self, rule: UpdateRule) -> None:
        """Take other hyperparameters of the same rule."""
        rule.check_follows(self.rule, f"table {self.spec.name!r}")
        self.rule = rule
        self.magnitudes.set_rule(rule)
        self.parameters[: len(rule.hyper)] = rule.hyper

    def _strangers(self, bucket: int) -> UsageError:
        return UsageError(
            f"records for bucket {bucket} of {self.spec.kind} table {self.spec.name!r} hold keys of other buckets: "
            "the bucket was left as it is"
        )

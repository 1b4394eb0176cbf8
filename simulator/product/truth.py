"""Check the contents of a cluster's tables: each replica must have each acknowledged push and change exactly once.

The *model* of a table is one part that never moves and has no replicas. It applies the same pushes and changes, in the
order in which workers sent them. Each bucket must equal the model's bucket in every bit. The order between workers does
not matter: either each worker has its own keys, or the gradients are small whole numbers that SGD adds exactly. If a
worker dies before the acknowledgement of a push, or a server rejects the push, the push is *uncertain*: each bucket may
or may not contain it. Such a bucket must equal one of the possible states, and must not change its state later.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.filters import Compress, DeltaKeys, Filter, KeyCaching, KeyNumbers, Quantize
from paceline.protocol.buckets import ALL, Buckets, bucket_set, buckets_in
from paceline.ps import Client
from paceline.tables.bucket_arrays import buckets_of_keys, dense_buckets
from paceline.tables.initializers import Initializer, Uniform, Zeros
from paceline.tables.part import Selection, TablePart
from paceline.tables.rules import FTRL, SGD, Adagrad, Adam, UpdateRule
from paceline.tables.server_tables import ServerTable
from paceline.tables.sparse_part import make_part
from paceline.tables.spec import TableSpec
from simulator.oracle import Oracle, Violation
from simulator.settings import RunSettings

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Change: TypeAlias = Callable[[Any, Selection, Floats], int | None]
"""Applies a request with these keys and rows (flat) to a part of a table; returns the number of erased rows."""
SLOTS: Final = 16
_OWN_ROWS: Final = 24
_OWN_ELEMENTS: Final = 80
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_MAX_UNSURE: Final = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """A table of a simulation."""

    name: str
    kind: str
    rule: UpdateRule
    dim: int = 1
    initializer: Initializer = field(default_factory=Zeros)
    is_shared: bool = False
    """Whether all workers push to the same keys; then gradients are whole numbers."""
    filters: tuple[Filter, ...] = ()
    """The filters of requests. Answers use only the exact filters among them."""
    is_signs: bool = False
    """Whether all gradients are 1 or -1, which filters with few bits transmit exactly."""
    num_pushing: int = SLOTS
    """The number of workers that push to the table: those with the lowest slots."""

    @property
    def size(self) -> int:
        """Number of elements of a dense table."""
        return SLOTS * _OWN_ELEMENTS

    def declare(self, client: Client) -> Any:
        """Return a client's table."""
        if self.kind == "sparse":
            return client.sparse_table(
                self.name,
                dim=self.dim,
                update=self.rule,
                initializer=self.initializer,
                seed=7,
                filters=self.filters,
                pull_filters=[filter for filter in self.filters if filter.preserves == "exact"],
            )
        return client.dense_table(
            self.name,
            size=self.size,
            update=self.rule,
            initializer=self.initializer,
            seed=7,
            filters=self.filters,
        )

    def keys_of(self, slot: int) -> Keys:
        """Return the keys that a worker pushes to."""
        if self.kind == "dense":
            first = 0 if self.is_shared else slot * _OWN_ELEMENTS
            return np.arange(first, first + _OWN_ELEMENTS, dtype=np.uint64)
        numbers = np.arange(_OWN_ROWS, dtype=np.uint64) + np.uint64(0 if self.is_shared else slot * _OWN_ROWS)
        return numbers * _SPREAD if self.is_shared else (numbers + np.uint64(1)) * _SPREAD

    def pull(self, table: Any, keys: Keys) -> Floats:
        """Return the values of keys as one row each."""
        found = table.pull(keys) if self.kind == "sparse" else table.pull(keys=keys)
        return np.asarray(found, np.float32).reshape(len(keys), self.dim)

    def push(self, table: Any, keys: Keys, grads: Floats) -> Any:
        """Push; return the ticket. Consecutive keys of a dense table are sent as a range."""
        if self.kind == "sparse":
            return table.push(keys, grads)
        if len(keys) and int(keys[-1]) - int(keys[0]) == len(keys) - 1:
            return table.push(grads.reshape(-1), start=int(keys[0]))
        return table.push(grads.reshape(-1), keys=keys)


CLOCKS: Final = Plan("clocks", "dense", SGD(lr=1.0), is_shared=True)
"""Every worker counts its iterations in its own element of this table."""
CHANGED: Final = Plan("changed", "sparse", Adagrad(lr=0.1), dim=2, num_pushing=1)
"""One worker changes the whole table: it sets hyperparameters, begins passes over the data, and loads snapshots."""
RATES: Final = Plan("rates", "sparse", SGD(lr=1.0), num_pushing=0)
"""All workers change the hyperparameters of this table, at the same time."""
OPTIONAL: Final = (
    Plan("sums", "sparse", SGD(lr=1.0), dim=2, is_shared=True),
    Plan("adagrad", "sparse", Adagrad(lr=0.1), dim=3, initializer=Uniform(low=-0.5, high=0.5)),
    Plan("ftrl", "sparse", FTRL(alpha=0.1, l1=0.01)),
    Plan("adam", "sparse", Adam(lr=0.01), dim=5),
    Plan("cached", "sparse", Adagrad(lr=0.1), dim=2, filters=(KeyCaching(), DeltaKeys(), Compress())),
    Plan("signs", "sparse", SGD(lr=1.0), is_shared=True, filters=(KeyCaching(), Quantize(2)), is_signs=True),
    Plan("numbered", "sparse", FTRL(alpha=0.1), dim=2, filters=(KeyNumbers(), Compress())),
    Plan("dense adam", "dense", Adam(lr=0.01)),
    Plan("dense packed", "dense", Adam(lr=0.01), filters=(KeyNumbers(), Compress())),
    Plan("dense adagrad", "dense", Adagrad(lr=0.1), initializer=Uniform(low=-1, high=1)),
    Plan("dense ftrl", "dense", FTRL(alpha=0.2)),
)


@dataclass(slots=True, eq=False)
class Issued:
    """A push or another change that a worker has sent."""

    plan: Plan
    slot: int
    keys: Keys
    rows: Floats
    """Gradients or records, one row per key. If the change needs neither, the rows have no columns."""
    change: Change
    is_sure: bool = False
    """Whether the change must have been applied."""
    resolved: Buckets = 0
    """The buckets in which an uncertain change is no longer uncertain."""
    without: Buckets = 0
    """The buckets in which the change was not applied."""

    @property
    def unsettled(self) -> Buckets:
        """The buckets in which the change is uncertain."""
        return 0 if self.is_sure else _buckets_of(self) & ~self.resolved

    def left_out(self, is_applied: bool) -> Buckets:
        """Return the buckets without the change if all uncertain buckets have it (`is_applied`) or none has it."""
        return 0 if self.is_sure else self.without if is_applied else self.without | (ALL & ~self.resolved)


def _buckets_of(push: Issued) -> Buckets:
    if push.plan.kind == "sparse":
        return buckets_of_keys(push.keys)
    return bucket_set(np.unique(dense_buckets(push.plan.size, push.keys)).tolist())


class Mirror:
    """A table's model: one part with all buckets, to which pushes are applied in order."""

    def __init__(self, plan: Plan, spec: TableSpec) -> None:
        self.plan = plan
        self.part: TablePart = make_part(spec, ALL)

    def apply(self, issued: Issued, without: Buckets = 0) -> int | None:
        """Apply a push or change, except to some buckets; return the number of erased rows."""
        selection, flat = Selection(issued.keys), np.ascontiguousarray(issued.rows.reshape(-1))
        if without:
            selection, flat = self.part.restrict(selection, flat, ALL & ~without)
        return issued.change(self.part, selection, flat) if len(selection.key_array()) else 0

    def values(self, keys: Keys) -> Floats:
        """Return the values of keys as one row each."""
        out = np.empty(len(keys) * self.plan.dim, np.float32)
        self.part.pull(Selection(keys), out)
        return out.reshape(len(keys), self.plan.dim)


class Truth(Oracle):
    """An oracle that stores all pushes and other changes of tables."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self.issued: list[Issued] = []
        self.specs: dict[str, TableSpec] = {}
        self.unfinished: Counter[str] = Counter()
        """Table name → number of calls to all servers that have not returned. A dead worker's call never returns."""

    def issue(self, plan: Plan, slot: int, keys: Keys, rows: Floats, change: Change) -> Issued:
        """Record a push or change before it is sent."""
        push = Issued(plan, slot, keys.copy(), rows.copy(), change)
        self.issued.append(push)
        return push

    def check(self, chains: Sequence[tuple[Buckets, Sequence[tuple[str, Any]]]]) -> None:
        """Compare each bucket with its expected contents. `chains` has the tables of each chain's servers, the primary
        first.

        A push that was never acknowledged may be on one server of a chain and not on another.
        """
        for spec in self.specs.values():
            self._compare_settings(spec.name, chains)
            pushes = [push for push in self.issued if push.plan.name == spec.name]
            if not pushes:
                continue
            unsure = [push for push in pushes if push.unsettled]
            doubtful = functools.reduce(operator.or_, (push.unsettled for push in unsure), 0)
            left: dict[int, dict[tuple[bytes, bytes], str]] = {}
            for buckets, members in chains:
                parts = [(server, table_named(tables, spec.name, server).part) for server, tables in members]
                for bucket in buckets_in(buckets):
                    states: dict[tuple[bytes, bytes], str] = {}
                    for server, part in parts:
                        states.setdefault(_sorted(part.read_bucket(bucket)), server)
                    left[bucket] = states
                    if len(states) > 1 and not doubtful >> bucket & 1:
                        primary, other = list(states.values())[:2]
                        raise Violation(f"(replicas) bucket {bucket} of {spec.name!r}: {primary} and {other} differ")
            self.num_compared += len(left)
            self._compare(spec, pushes, unsure, left)

    def _compare_settings(self, name: str, chains: Sequence[tuple[Buckets, Sequence[tuple[str, Any]]]]) -> None:
        """Raise Violation unless all servers have the same update rule and pass number for a table."""
        tables = {server: table_named(tables, name, server) for _, members in chains for server, tables in members}
        found = {server: (table.spec.update, table.part.pass_number) for server, table in tables.items()}
        if not self.unfinished[name] and any(state != next(iter(found.values())) for state in found.values()):
            raise Violation(f"(settings) update rule and pass number of table {name!r} differ: {found}")

    def _compare(
        self,
        spec: TableSpec,
        pushes: list[Issued],
        unsure: list[Issued],
        left: dict[int, dict[tuple[bytes, bytes], str]],
    ) -> None:
        """Find the uncertain pushes that were applied in each observed state of a bucket."""
        expected: Mirror | None = None
        num_states = {bucket: len(states) for bucket, states in left.items()}
        for applied in _choices(unsure, left):
            mirror = self._replay(spec, pushes, applied)
            expected = expected or mirror
            for bucket, states in list(left.items()):
                if states.pop(_sorted(mirror.part.read_bucket(bucket)), None) is None:
                    continue
                if num_states[bucket] == 1:
                    for push in unsure:
                        push.without |= 0 if push in applied or not push.unsettled >> bucket & 1 else 1 << bucket
                        push.resolved |= 1 << bucket
                if not states:
                    del left[bucket]
            if not left:
                return
        assert expected is not None
        bucket, states = next(iter(left.items()))
        found, server = next(iter(states.items()))
        wanted = _describe(_sorted(expected.part.read_bucket(bucket)))
        raise Violation(
            f"(exactly once) {len(left)} buckets of table {spec.name!r} differ from the expected contents: bucket "
            f"{bucket} on {server} has {_describe(found)}, expected {wanted}"
            + (f", {len(unsure)} pushes unsure" if unsure else "")
        )

    def _replay(self, spec: TableSpec, pushes: Sequence[Issued], applied: Sequence[Issued]) -> Mirror:
        mirror = Mirror(pushes[0].plan, spec)
        for push in pushes:
            mirror.apply(push, push.left_out(push in applied))
        return mirror


def _choices(unsure: Sequence[Issued], left: Mapping[int, object]) -> Iterator[tuple[Issued, ...]]:
    """Yield possible sets of applied uncertain pushes.

    If many are uncertain, the sets with the first pushes of each slot come before all subsets of the pushes to one
    bucket, for each bucket in `left`. The caller removes buckets that it has explained.
    """
    if len(unsure) <= _MAX_UNSURE:
        yield from _subsets(unsure)
        return
    slots = sorted({push.slot for push in unsure})
    by_slot = [[push for push in unsure if push.slot == slot] for slot in slots]
    for counts in itertools.product(*(range(len(changes), -1, -1) for changes in by_slot)):
        yield tuple(itertools.chain.from_iterable(changes[:n] for changes, n in zip(by_slot, counts, strict=True)))
    for bucket in list(left):
        for applied in _subsets([push for push in unsure if push.unsettled >> bucket & 1]):
            if bucket not in left:
                break
            yield applied


def _subsets(pushes: Sequence[Issued]) -> Iterator[tuple[Issued, ...]]:
    for count in range(len(pushes), -1, -1):
        yield from itertools.combinations(pushes, count)


def table_named(tables: Any, name: str, server: str) -> ServerTable:
    """Return a server's table with this name. Raises Violation if the server does not have the table."""
    for table in tables.by_number.values():
        if table.spec.name == name:
            assert isinstance(table, ServerTable)
            return table
    raise Violation(f"(tables) {server} has no table {name!r}")


def _sorted(bucket: tuple[Any, Floats]) -> tuple[bytes, bytes]:
    keys, records = bucket
    order = np.argsort(keys)
    return keys[order].tobytes(), records[order].tobytes()


def _describe(bucket: tuple[bytes, bytes]) -> str:
    keys, records = np.frombuffer(bucket[0], np.uint64), np.frombuffer(bucket[1], np.float32)
    return f"keys {keys[:4].tolist()} with {records[:8].tolist()}"

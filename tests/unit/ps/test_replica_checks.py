"""Digests of buckets: equal for the same rows and pushes, different otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.kernels.sparse import digest_records
from paceline.protocol import Eventual, Member, Role, ServerCore
from paceline.protocol.buckets import ALL, bucket_set
from paceline.protocol.chains import chain_group
from paceline.protocol.replication import Change, Forwarded, LinkUp, Replication
from paceline.protocol.scheduler.views import View
from paceline.ps.server.replica_checks import BucketOrders, ReplicaChecks
from paceline.tables.server_tables import ServerTables

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT

WORDS = st.integers(0, 2**32 - 1)
ROWS = st.dictionaries(st.integers(0, 2**64 - 1), st.tuples(WORDS, WORDS), max_size=20)
PUSHES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.sets(st.integers(0, 511), min_size=1)), max_size=8)


def digest(rows: dict[int, tuple[int, int]]) -> int:
    words = np.array(list(rows.values()), np.uint32).reshape(len(rows), 2)
    return int(digest_records(np.array(list(rows), np.uint64), words))


@settings(deadline=None)
@given(rows=ROWS, other=ROWS, random=st.randoms())
def test_a_digest_does_not_depend_on_the_order_of_rows(
    rows: dict[int, tuple[int, int]], other: dict[int, tuple[int, int]], random: np.random.Generator
) -> None:
    keys = list(rows)
    random.shuffle(keys)
    assert digest({key: rows[key] for key in keys}) == digest(rows)
    assume(rows != other)
    assert digest(other) != digest(rows)


@settings(deadline=None)
@given(rows=ROWS.filter(bool), bit=st.integers(0, 63), data=st.data())
def test_a_digest_depends_on_every_bit(rows: dict[int, tuple[int, int]], bit: int, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(rows)))
    first, second = rows[key]
    changed = (first ^ 1 << bit, second) if bit < 32 else (first, second ^ 1 << bit - 32)
    assert digest({**rows, key: changed}) != digest(rows)


@given(pushes=PUSHES)
def test_the_number_of_a_bucket_depends_only_on_its_pushes(pushes: list[tuple[int, int, set[int]]]) -> None:
    orders, alone = BucketOrders(), BucketOrders()
    for incarnation, sequence, buckets in pushes:
        orders.applied(incarnation, sequence, bucket_set(buckets))
        if 7 in buckets:
            alone.applied(incarnation, sequence, ALL)
    assert orders.of(7) == alone.of(300)


def test_another_order_of_pushes_gives_another_number() -> None:
    one, other = BucketOrders(), BucketOrders()
    for orders, sequence in ((one, (0, 1)), (other, (1, 0))):
        for worker in sequence:
            orders.applied(worker, 3, ALL)
    assert one.of(0) != other.of(0)
    one.drop(ALL)
    assert one.of(0) == BucketOrders().of(0)
    one.take(0, other.of(0))
    assert one.of(0) == other.of(0)


def test_a_bucket_is_compared_after_the_same_pushes() -> None:
    first, second = Replication(1), Replication(2)
    groups = (chain_group((1, 2), None, ALL),)
    for table in (first, second):
        table.handle(Change(1, groups))
    assert first.checkable(2) == 0  # server 1 has no connection to server 2
    first.handle(LinkUp(2))
    assert first.checkable(2) == ALL
    assert second.checkable(1) == 0
    assert second.is_comparable(1, 1, 5)
    assert not second.is_comparable(1, 0, 5)
    assert not first.is_comparable(2, 1, 5)
    first.push("a", 9, 4, 1 << 5)
    assert first.applied_to(5) == ((9, 4),)
    second.handle(Forwarded("a", 1, 9, 4, 1, 1 << 5))
    assert second.applied_to(5) == ((9, 4),)


def test_a_former_primary_with_pushes_in_flight_is_not_compared() -> None:
    first, second = Replication(1), Replication(2)
    for table in (first, second):
        table.handle(Change(1, (chain_group((2, 1), None, ALL),)))
    second.push("a", 9, 4, 1 << 5)
    for table in (first, second):
        table.handle(Change(2, (chain_group((1, 2), None, ALL),)))
    assert not second.is_comparable(1, 2, 5)
    assert second.is_comparable(1, 2, 6)


def test_a_server_being_filled_is_not_compared() -> None:
    first, second = Replication(1), Replication(2)
    first.handle(Change(1, (chain_group((1,), None, ALL),)))
    for table in (first, second):
        table.handle(Change(2, (chain_group((1,), 2, ALL),)))
    first.handle(LinkUp(2))
    assert first.checkable(2) == 0
    assert not second.is_comparable(1, 2, 5)


def test_a_round_of_checks_takes_a_minute_or_a_share_of_the_time() -> None:
    core = ServerCore(Eventual())
    core.joined(1)
    servers = tuple(Member(f"{server}", Role.SERVER, server, server, "address") for server in (1, 2))
    core.handle(View(version=1, epoch=1, groups=(chain_group((1, 2), None, ALL),), members=servers, last_incarnation=2))
    checks = ReplicaChecks(ServerTables(0))
    assert checks.next(core, [2]) is None
    assert 0 < checks.pause_s(None) <= 10
    core.handle(LinkUp(2))
    found = [checks.next(core, [2]) for _ in range(512)]
    assert {entry and entry[1] for entry in found} == set(range(512))
    assert 512 * checks.pause_s(0.0) < 60
    assert checks.pause_s(1.0) >= 25

"""The model of the tables: each bucket may or may not contain a push that a server rejected."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.protocol.buckets import ALL
from paceline.protocol.consistency import Eventual
from paceline.ps import SGD, to_fields
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable
from paceline.tables.sparse_part import make_part
from paceline.tables.spec import TableSpec
from simulator.oracle import Violation
from simulator.product.changes import push
from simulator.product.truth import Plan, Truth
from simulator.settings import RunSettings

PLAN = Plan("sums", "sparse", SGD(lr=1.0), is_shared=True)
KEYS = PLAN.keys_of(0)[:2]
NUM_PUSHES = 11  # too many pushes to try all subsets


def check(rejected: set[int], *, lost: int | None = None) -> None:
    """Check a server that lacks some pushes. The worker knows that these pushes except `lost` may be missing."""
    spec = TableSpec(name="sums", kind="sparse", update=to_fields(PLAN.rule), initializer=to_fields(PLAN.initializer))
    truth = Truth(RunSettings(num_servers=1, num_workers=1, replicas=1, consistency=Eventual(), think_s=0.1))
    truth.specs["sums"] = spec
    part = make_part(spec, ALL)
    for number in range(NUM_PUSHES):
        rows = np.full((2, 1), 2.0**number, np.float32)
        issued = truth.issue(PLAN, 0, KEYS, rows, push)
        issued.is_sure = number == lost
        if number not in rejected and number != lost:
            push(part, Selection(KEYS), rows.reshape(-1))
    tables = SimpleNamespace(by_number={1: ServerTable(spec, part)})
    truth.check([(ALL, [("server1", tables)])])


@pytest.mark.parametrize("rejected", [set(), {10}, {0}, {0, 3, 7, 9}])
def test_any_of_many_uncertain_pushes_may_be_missing(rejected: set[int]) -> None:
    check(rejected)


def test_a_certain_push_must_not_be_missing() -> None:
    with pytest.raises(Violation, match="exactly once"):
        check({1, 5}, lost=4)

"""The progress of a server that copies buckets, or moves them before it leaves."""

from __future__ import annotations

from typing import Any

import pytest
from typing_extensions import override

from paceline.launch import roles
from paceline.launch.roles import BucketMoves
from paceline.observe.work import SilentWork
from paceline.protocol.chains import chain_group

SERVER, OTHER = 7, 8


class RecordedWork(SilentWork):
    def __init__(self, title: str, total: float) -> None:
        self.shown = [f"{title}, {total:g}"]

    @override
    def update(self, done: float, **options: Any) -> None:
        self.shown.append(f"{done:g}")

    @override
    def close(self) -> None:
        self.shown.append("end")


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[RecordedWork]:
    started: list[RecordedWork] = []

    def start(title: str, total: float, unit: str) -> RecordedWork:
        started.append(RecordedWork(title, total))
        return started[-1]

    monkeypatch.setattr(roles, "start_work", start)
    return started


def test_a_server_that_joins_copies_buckets(works: list[RecordedWork]) -> None:
    moves = BucketMoves(SERVER)
    moves.take([chain_group((OTHER,), None, 0b1111)])
    assert works == []
    moves.take([chain_group((OTHER,), SERVER, 0b0111), chain_group((OTHER,), None, 0b1000)])
    moves.take([chain_group((OTHER,), SERVER, 0b0001), chain_group((SERVER, OTHER), None, 0b0110)])
    moves.take([chain_group((SERVER, OTHER), None, 0b0111)])
    (work,) = works
    assert work.shown == ["copying buckets from other servers, 3", "0", "2", "3", "end"]


def test_a_server_that_leaves_moves_its_buckets(works: list[RecordedWork]) -> None:
    with BucketMoves(SERVER) as moves:
        moves.take([chain_group((SERVER,), None, 0b11)])
        moves.is_leaving = True
        moves.take([chain_group((SERVER,), OTHER, 0b11)])
        moves.take([chain_group((SERVER,), OTHER, 0b01), chain_group((OTHER,), None, 0b10)])
    (work,) = works
    assert work.shown == ["moving buckets to other servers, 2", "0", "1", "end"]

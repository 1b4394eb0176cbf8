"""One job's board: when its shards are dealt out, which findings count, and what a new scheduler makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.ps import messages
from paceline.ps.messages import ALL_DONE, JobMemory
from paceline.ps.scheduler.account import Account
from paceline.ps.scheduler.job import JobBoard
from paceline.ps.scheduler.sessions import Call, Session
from paceline.storage.format import DoneShards

from .lines import End


def post(files: tuple[int | None, ...], *, assignment: str = "first-come", **fields: Any) -> messages.PostJob:
    return messages.PostJob(description=b"", files=files, epochs=1, assignment=assignment, **fields)


class Worker:
    """Takes leases of a board; it is incarnation 10 + its rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.incarnation = rank, 10 + rank
        self.end = End()
        self.session = Session(self.end.peer, self.incarnation)
        self.number = 0

    def take(self, board: JobBoard) -> messages.Lease | None:
        """Ask for a shard; return what is answered at once."""
        self.number += 1
        board.take_lease(Call(self.session, self.number), self.rank, wait=True)
        return self.answer()

    def answer(self) -> messages.Lease | None:
        answers = [msgspec.msgpack.decode(each.meta, type=messages.Lease) for each in self.end.take()]
        assert len(answers) < 2
        return answers[0] if answers else None

    def done(self, board: JobBoard, lease: messages.Lease, examples: float = 1.0) -> None:
        progress = {"job": 1.0, "examples": examples}
        board.lease_done(self.rank, self.incarnation, messages.LeaseDone(job=1, lease=lease.lease, progress=progress))
        board.note_progress(self.incarnation, progress)

    def predict(self, board: JobBoard, number: int) -> None:
        report = messages.Report(job=1, fields={"kind": "predictions"}, number=number)
        board.add_report(self.rank, self.incarnation, report, b"scores")


def taken(worker: Worker, board: JobBoard) -> messages.Lease:
    lease = worker.take(board)
    assert lease is not None
    assert lease.lease >= 0
    return lease


def test_strided_shards_are_dealt_when_all_workers_have_asked() -> None:
    board = JobBoard(1, post((4,), assignment="strided"), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    assert second.take(board) is None
    lease = taken(first, board)
    other = second.answer()
    assert other is not None
    assert (lease.shard, other.shard) == (0, 1)


@pytest.mark.parametrize("is_dead", [False, True])
def test_one_that_goes_before_it_has_asked_is_not_waited_for(is_dead: bool) -> None:
    board = JobBoard(1, post((2,), assignment="strided"), 2, [0, 1])
    first = Worker(0)
    assert first.take(board) is None
    if is_dead:
        board.worker_lost(1, 11)
    else:
        board.worker_left(1)
    assert first.answer() is not None


def test_what_a_snapshot_says_is_done_is_not_read_again() -> None:
    done = DoneShards(epoch=0, file=0, shards=b"\5")
    board = JobBoard(1, post((3,), done=(done,), progress={"examples": 8.0}), 1, [0])
    worker = Worker(0)
    lease = taken(worker, board)
    assert lease.shard == 1
    worker.done(board, lease, 3.0)
    answer = worker.take(board)
    assert answer is not None
    assert answer.lease == ALL_DONE
    assert board.account().progress == {"examples": 11.0}
    assert [(each.epoch, each.file, each.shards) for each in board.account().done] == [(0, 0, b"\7")]


def test_the_end_of_a_file_becomes_known() -> None:
    board = JobBoard(1, post((None,)), 1, [0])
    worker = Worker(0)
    assert board.state(1).total is None
    lease = taken(worker, board)
    board.file_ended(0, 1)
    worker.done(board, lease)
    assert (board.state(1).done, board.state(1).total) == (1, 1)
    news = board.take_news()
    assert news is not None
    assert news.ended == {0: 1}


def test_predictions_count_when_their_shard_is_done_and_it_is_done_when_they_are_taken() -> None:
    board = JobBoard(1, post((1,)), 1, [0])
    worker = Worker(0)
    board.take_news()
    lease = taken(worker, board)
    worker.predict(board, 1)
    assert board.take_report() is None
    worker.done(board, lease, 5.0)
    assert board.take_news() is None
    taken_report = board.take_report()
    assert taken_report is not None
    report, body = taken_report
    assert (report.incarnation, report.number, report.done, body) == (10, 1, (0, 0, 0), b"scores")
    news = board.take_news()
    assert news is not None
    assert news.done == ((0, 0, 0),)
    assert news.settled == {10: {"job": 1.0, "examples": 5.0}}


@pytest.mark.parametrize(("is_dead", "num_reports"), [(True, 0), (False, 1)])
def test_predictions_of_a_shard_that_a_dead_worker_held_do_not_count(is_dead: bool, num_reports: int) -> None:
    board = JobBoard(1, post((1,)), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    taken(first, board)
    first.predict(board, 1)
    if is_dead:
        board.worker_lost(first.rank, first.incarnation)
    else:
        board.worker_left(first.rank)
    assert board.state(1).num_reports == num_reports
    assert taken(second, board).shard == 0


def test_what_a_dead_worker_counted_since_its_last_shard_does_not_count() -> None:
    board = JobBoard(1, post((2,)), 1, [0])
    worker = Worker(0)
    worker.done(board, taken(worker, board), 5.0)
    taken(worker, board)
    board.note_progress(worker.incarnation, {"job": 1.0, "examples": 8.0})
    assert board.state(1).progress == {"examples": 8.0}
    board.worker_lost(worker.rank, worker.incarnation)
    assert board.state(1).progress == {"examples": 5.0}


def test_counters_of_another_job_do_not_count() -> None:
    board = JobBoard(2, post((2,)), 1, [0])
    board.note_progress(10, {"job": 1.0, "examples": 8.0})
    assert board.state(1).progress == {}


def test_a_job_that_has_failed_gives_nothing_to_do() -> None:
    board = JobBoard(1, post((2,)), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    taken(first, board)
    board.fail("DataError", "bad")
    for worker in (first, second):
        answer = worker.take(board)
        assert answer is not None
        assert answer.lease == ALL_DONE


def test_what_nodes_know_is_the_board_again() -> None:
    board = JobBoard(1, post((4,)), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    done, held, lost = (taken(worker, board) for worker in (first, first, second))
    first.done(board, done, 5.0)
    account = Account(1)
    news = board.take_news()
    assert news is not None
    account.take_news(news)
    counters = {"job": 1.0, "examples": 5.0}
    memory = JobMemory(number=1, working=True, leases=(held,), last_lease=held.lease, progress=counters)
    posters = JobMemory(number=1, posted=post((4,)), seconds=3.0)
    again = JobBoard.restore(account, posters, {0: (10, memory)}, dead={1: 11}, num_workers=2)
    state = again.state(1)
    assert (state.done, state.total, state.lost_workers, state.progress) == (1, 4, 1, {"examples": 5.0})
    assert state.seconds >= 3.0
    first.done(again, held, 6.0)
    shards = set()
    while (lease := first.take(again)) is not None and lease.lease != ALL_DONE:
        assert lease.lease > held.lease
        shards.add(lease.shard)
        first.done(again, lease)
    assert shards == {0, 1, 2, 3} - {done.shard, held.shard}
    assert lost.shard in shards

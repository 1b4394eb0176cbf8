"""The scheduler's side of a job: who reads which shard, how far it is, and what workers report.

What becomes of shards and workers is news (:meth:`JobBoard.take_news`) that the nodes keep, so that a new scheduler can
make the board again (:meth:`JobBoard.restore`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from paceline.protocol import Shards, shards
from paceline.ps import messages
from paceline.ps.messages import ALL_DONE, NOTHING_NOW
from paceline.ps.scheduler.account import Account
from paceline.ps.scheduler.sessions import Call
from paceline.storage.format import JobAccount, done_shards, shards_in

_BEFORE = -1  # in place of an incarnation: what was done before this job, as a snapshot has it


class JobBoard:
    """One job: its shards, leases and findings. `number` identifies it; `ranks` are the workers that live now.

    The first shards of a strided job are given out when all of those have asked: each has joined the iterations by
    then, so that none runs its first ones alone, and the job's result does not depend on who was quicker.
    """

    def __init__(self, number: int, request: messages.PostJob, num_workers: int, ranks: Sequence[int] = ()) -> None:
        self.number = number
        self.description = request.description
        self.failed: tuple[str, str] | None = None
        self._num_workers = max(num_workers, 1)
        self._shards = Shards.restore(
            request.files,
            epochs=request.epochs,
            assignment="strided" if request.assignment == "strided" else "first-come",
            num_workers=self._num_workers,
            done=shards_in(request.done),
        )
        strided = request.assignment == "strided"
        self._awaited = set(ranks) if strided else set()
        self._early: dict[int, tuple[Call, bool]] = {}  # who has asked while others were awaited
        self._answers: dict[int, messages.Lease] = {}  # granted while nobody was listening
        self._waiting: dict[int, Call] = {}
        self._waits: set[int] = set()
        self._progress: dict[int, dict[str, float]] = {}
        self._settled: dict[int, dict[str, float]] = {}  # the counters of a rank at its last shard's end
        # Incarnation → counters of the shards that are done.
        self._of_done: dict[int, dict[str, float]] = {_BEFORE: request.progress}
        if request.progress:
            self._progress[_BEFORE] = request.progress
        self._reports: deque[tuple[messages.TakenReport, bytes]] = deque()
        self._unsettled: dict[int, list[tuple[messages.TakenReport, bytes]]] = {}
        self._known_reports: set[tuple[int, int]] = set()
        self._started: float | None = None
        self._ended: float | None = None
        self._active: set[int] = set()
        self._lost = 0
        self._exhausted = False
        self._new_done: list[tuple[int, int, int]] = []
        self._new_ended: dict[int, int] = {}
        self._new_settled: dict[int, dict[str, float]] = {}
        self._is_news = True  # the job itself
        if strided:
            self._deal_out_absent(ranks)

    @classmethod
    def restore(
        cls,
        account: Account,
        posters: messages.JobMemory,
        memories: Mapping[int, tuple[int, messages.JobMemory]],
        *,
        dead: Mapping[int, int],
        num_workers: int,
    ) -> JobBoard:
        """Make the board of a former scheduler anew.

        `account` is what all nodes know together, `posters` what the poster does; `memories` are the live workers'
        incarnations and what each knows, `dead` the incarnations of those that did not come back, both by rank.
        `num_workers` counts if no node knows how many there were.
        """
        request = posters.posted
        assert request is not None
        board = cls(account.number, request, account.num_workers or num_workers, sorted(memories))
        files = [account.ended.get(file, size) for file, size in enumerate(request.files)]
        at_work = {rank: memory for rank, (_, memory) in memories.items() if memory.working}
        held = [
            shards.Granted(rank, lease.lease, lease.epoch, lease.file, lease.shard)
            for rank, memory in at_work.items()
            for lease in memory.leases
        ]
        done = [*account.done(), *shards_in(request.done)]
        board._shards = Shards.restore(
            files,
            epochs=request.epochs,
            assignment="strided" if request.assignment == "strided" else "first-come",
            num_workers=board._num_workers,
            done=done,
            held=held,
            last_lease=max((memory.last_lease for memory in at_work.values()), default=-1),
        )
        if request.assignment == "strided":
            board._deal_out_absent(sorted(memories))
        if done or held or posters.seconds:
            board._awaited = set()
            board._started = time.monotonic() - posters.seconds
        board._active = set(at_work)
        board._lost = account.lost
        board.failed = account.failed
        board._known_reports = set(posters.taken)
        board._of_done.update(account.settled)
        board._progress.update((incarnation, dict(counters)) for incarnation, counters in account.settled.items())
        for rank, (incarnation, memory) in memories.items():
            if incarnation in account.settled:
                board._settled[rank] = dict(account.settled[incarnation])
            board.note_progress(incarnation, memory.progress)
        board._new_done, board._new_ended, board._new_settled = done, dict(account.ended), dict(account.settled)
        for rank, incarnation in dead.items():
            board._settled[rank] = account.settled.get(incarnation, {})
            board.worker_lost(rank, incarnation)
        return board

    def _deal_out_absent(self, ranks: Sequence[int]) -> None:
        """Give the strides of workers that are not there to the others, until they come."""
        for absent in set(range(self._num_workers)) - set(ranks):
            self._obey(self._shards.handle(shards.Lost(absent)))

    def take_news(self) -> messages.JobNews | None:
        """Return what is new since the last call, for the nodes to keep; None if nothing is."""
        if not self._is_news:
            return None
        news = messages.JobNews(
            job=self.number,
            num_workers=self._num_workers,
            done=tuple(self._new_done),
            ended=self._new_ended,
            settled=self._new_settled,
            lost=self._lost,
        )
        self._is_news, self._new_done, self._new_ended, self._new_settled = False, [], {}, {}
        return news

    def take_lease(self, call: Call, rank: int, wait: bool) -> None:
        """Answer a worker that wants a shard; with `wait`, when there is one."""
        if self._awaited and self.failed is None:
            self._early[rank] = (call, wait)
            self._await_no_more(rank)
            return
        self._started = self._started or time.monotonic()
        self._waiting[rank] = call
        if self.failed is not None:
            self._tell(rank, messages.Lease(lease=ALL_DONE))
            return
        self._active.add(rank)
        if rank in self._answers:
            self._tell(rank, self._answers.pop(rank))
        elif rank not in self._waits:
            self._obey(self._shards.handle(shards.Lease(rank)))
        if not wait and rank in self._waiting:
            self._tell(rank, messages.Lease(lease=NOTHING_NOW))

    def _await_no_more(self, rank: int) -> None:
        """Note that a worker has asked or is gone; when all have, answer them in the order of their ranks."""
        self._awaited.discard(rank)
        if not self._awaited:
            early, self._early = self._early, {}
            for asker, (call, wait) in sorted(early.items()):
                self.take_lease(call, asker, wait)

    def lease_done(self, rank: int, incarnation: int, request: messages.LeaseDone) -> None:
        """Note that a shard is done, and keep what its worker found in it."""
        self._settled[rank] = request.progress
        reports = self._unsettled.pop(rank, [])
        shard = self._shards.shard_of(request.lease)
        if shard is not None:
            self._of_done[incarnation] = request.progress
        if shard is not None and reports:
            # If worker and scheduler die before the poster has what was found in the shard, it is to be read again:
            # so that it is done becomes known with the report.
            report, body = reports[-1]
            reports[-1] = (msgspec.structs.replace(report, done=shard, settled=request.progress), body)
        elif shard is not None:
            self._note_done(shard, incarnation, request.progress)
        self._reports.extend(reports)
        self._obey(self._shards.handle(shards.Done(rank, request.lease)))

    def file_ended(self, file: int, num_shards: int) -> None:
        """Note the number of shards of a file whose end has been read."""
        self._obey(self._shards.handle(shards.Ended(file, num_shards)))
        self._is_news = True
        self._new_ended[file] = num_shards

    def worker_lost(self, rank: int, incarnation: int) -> None:
        """Lease again what a worker held; what it did of it, and found in it, counts once, when it is done again."""
        self._lost += 1
        self._is_news = True
        self._unsettled.pop(rank, None)
        self._progress[incarnation] = self._settled.get(rank, {})
        self.worker_left(rank)

    def worker_left(self, rank: int) -> None:
        """Forget a worker that went; its findings stay."""
        self._active.discard(rank)
        self._waits.discard(rank)
        self._waiting.pop(rank, None)
        self._answers.pop(rank, None)
        self._settled.pop(rank, None)  # whoever gets this rank next counts anew
        self._reports.extend(self._unsettled.pop(rank, ()))
        self._obey(self._shards.handle(shards.Lost(rank)))
        self._early.pop(rank, None)
        self._await_no_more(rank)
        self._look_for_end()

    def worker_rests(self, rank: int) -> None:
        """Note that a worker has asked for the next job: it is through with this one."""
        self._active.discard(rank)
        self._look_for_end()

    def note_progress(self, key: int, progress: dict[str, float]) -> None:
        """Keep a worker's counters, which only rise."""
        if progress.get("job") == self.number:
            self._progress[key] = progress

    def end(self) -> None:
        """Tell whoever waits for a shard that there is none: another job follows, or the cluster ends."""
        for rank, (call, _) in self._early.items():
            self._waiting[rank] = call
        self._awaited, self._early = set(), {}
        for rank in list(self._waiting):
            self._tell(rank, messages.Lease(lease=ALL_DONE))

    def fail(self, error: str, message: str) -> None:
        """End the job for a reason; the first one counts."""
        self.failed = self.failed or (error, message)
        self.end()

    def add_report(self, rank: int, incarnation: int, request: messages.Report, body: bytes) -> None:
        """Keep a report for whoever posted the job; predictions, until the shard that they are of is done."""
        key = (incarnation, request.number)
        if request.number:
            if key in self._known_reports:
                return  # its worker could not know that it had come
            self._known_reports.add(key)
        report = messages.TakenReport(fields=request.fields, incarnation=incarnation, number=request.number)
        if request.fields.get("kind") == "predictions" and not request.settled:
            self._unsettled.setdefault(rank, []).append((report, body))
        else:
            self._reports.append((report, body))

    def take_report(self) -> tuple[messages.TakenReport, bytes] | None:
        """Return the next report."""
        if not self._reports:
            return None
        report, body = self._reports.popleft()
        if report.done is not None:
            self._note_done(report.done, report.incarnation, report.settled)
        return report, body

    def _note_done(self, shard: tuple[int, int, int], incarnation: int, progress: dict[str, float]) -> None:
        """Have the nodes know that a shard is done, and its worker's counters then."""
        self._is_news = True
        self._new_done.append(shard)
        known = self._new_settled.get(incarnation, {})
        rising = {name: max(value, known.get(name, value)) for name, value in progress.items()}
        self._new_settled[incarnation] = {**known, **rising}

    def account(self) -> JobAccount:
        """Return what is done: all that came of these shards is acknowledged by the servers."""
        progress: dict[str, float] = {}
        for counters in self._of_done.values():
            for name, value in counters.items():
                if name != "job":
                    progress[name] = progress.get(name, 0.0) + value
        return JobAccount(files=self._shards.sizes, done=done_shards(self._shards.report()), progress=progress)

    def state(self, num_workers: int) -> messages.JobState:
        """Return how far the job is."""
        done, total = self._shards.progress()
        progress: dict[str, float] = {}
        for counters in self._progress.values():
            for name, value in counters.items():
                if name != "job":
                    progress[name] = progress.get(name, 0.0) + value
        now = self._ended or time.monotonic()
        return messages.JobState(
            done=done,
            total=total,
            finished=self._ended is not None,
            failed=self.failed,
            progress=progress,
            seconds=now - self._started if self._started is not None else 0.0,
            num_workers=num_workers,
            lost_workers=self._lost,
            num_reports=len(self._reports),
        )

    def _obey(self, instructions: list[shards.Instruction]) -> None:
        for instruction in instructions:
            rank = instruction.worker
            if isinstance(instruction, shards.Wait):
                self._waits.add(rank)
                continue
            self._waits.discard(rank)
            if isinstance(instruction, shards.Granted):
                answer = messages.Lease(
                    lease=instruction.lease, epoch=instruction.epoch, file=instruction.file, shard=instruction.shard
                )
            else:
                self._exhausted = True
                answer = messages.Lease(lease=ALL_DONE)
            if rank in self._waiting:
                self._tell(rank, answer)
            else:
                self._answers[rank] = answer

    def _tell(self, rank: int, answer: messages.Lease) -> None:
        self._waiting.pop(rank).answer(answer)

    def _look_for_end(self) -> None:
        if self._ended is not None or self._active:
            return
        done, total = self._shards.progress()
        if self._exhausted or (self._started is not None and done == total):  # the last one may die before it hears
            self._ended = time.monotonic()

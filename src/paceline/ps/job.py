"""The scheduler's side of a job: who reads which shard, how far it is, and what workers report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline.protocol import Shards, shards
from paceline.ps import messages
from paceline.ps.messages import ALL_DONE, NOTHING_NOW, RESULT
from paceline.transport import Header, Peer


class JobBoard:
    """One job: its shards, leases and findings. `number` identifies it; `ranks` are the workers that live now.

    The first shards of a strided job are given out when all of those have asked: each has joined the iterations by
    then, so that none runs its first ones alone, and the job's result does not depend on who was quicker.
    """

    def __init__(self, number: int, request: messages.PostJob, num_workers: int, ranks: Sequence[int] = ()) -> None:
        self.number = number
        self.description = request.description
        self.failed: tuple[str, str] | None = None
        self._shards = Shards(
            request.files,
            epochs=request.epochs,
            assignment="strided" if request.assignment == "strided" else "first-come",
            num_workers=max(num_workers, 1),
        )
        strided = request.assignment == "strided"
        self._awaited = set(ranks) if strided else set()
        self._early: dict[int, tuple[Peer, Header, bool]] = {}  # who has asked while others were awaited
        self._answers: dict[int, messages.Lease] = {}  # granted while nobody was listening
        self._waiting: dict[int, tuple[Peer, Header]] = {}
        self._waits: set[int] = set()
        self._progress: dict[int, dict[str, float]] = {}
        self._settled: dict[int, dict[str, float]] = {}  # the counters of a rank at its last shard's end
        self._reports: deque[tuple[dict[str, Any], bytes]] = deque()
        self._unsettled: dict[int, list[tuple[dict[str, Any], bytes]]] = {}
        self._started: float | None = None
        self._ended: float | None = None
        self._active: set[int] = set()
        self._lost = 0
        self._exhausted = False
        if strided:
            for absent in set(range(num_workers)) - set(ranks):  # its stride is for the others, until it comes
                self._obey(self._shards.handle(shards.Lost(absent)))

    def take_lease(self, peer: Peer, header: Header, rank: int, wait: bool) -> None:
        """Answer a worker that wants a shard; with `wait`, when there is one."""
        if self._awaited and self.failed is None:
            self._early[rank] = (peer, header, wait)
            self._await_no_more(rank)
            return
        self._started = self._started or time.monotonic()
        self._waiting[rank] = (peer, header)
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
            for asker, (peer, header, wait) in sorted(early.items()):
                self.take_lease(peer, header, asker, wait)

    def lease_done(self, rank: int, request: messages.LeaseDone) -> None:
        """Note that a shard is done, and keep what its worker found in it."""
        self._settled[rank] = request.progress
        self._reports.extend(self._unsettled.pop(rank, ()))
        self._obey(self._shards.handle(shards.Done(rank, request.lease)))

    def file_ended(self, file: int, num_shards: int) -> None:
        """Note the number of shards of a file whose end has been read."""
        self._obey(self._shards.handle(shards.Ended(file, num_shards)))

    def worker_lost(self, rank: int, incarnation: int) -> None:
        """Lease again what a worker held; what it did of it, and found in it, counts once, when it is done again."""
        self._lost += 1
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
        for rank, (peer, header, _) in self._early.items():
            self._waiting[rank] = (peer, header)
        self._awaited, self._early = set(), {}
        for rank in list(self._waiting):
            self._tell(rank, messages.Lease(lease=ALL_DONE))

    def fail(self, error: str, message: str) -> None:
        """End the job for a reason; the first one counts."""
        self.failed = self.failed or (error, message)
        self.end()

    def add_report(self, rank: int, fields: dict[str, Any], body: bytes) -> None:
        """Keep a report for whoever posted the job; predictions, until the shard that they are of is done."""
        if fields.get("kind") == "predictions":
            self._unsettled.setdefault(rank, []).append((fields, body))
        else:
            self._reports.append((fields, body))

    def take_report(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next report."""
        return self._reports.popleft() if self._reports else None

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
        peer, header = self._waiting.pop(rank)
        peer.send_frame(RESULT, request=header.request, meta=messages.encode(answer))

    def _look_for_end(self) -> None:
        if self._ended is not None or self._active:
            return
        done, total = self._shards.progress()
        if self._exhausted or (self._started is not None and done == total):  # the last one may die before it hears
            self._ended = time.monotonic()

"""Choose the ranks of each quorum of an elastic training, and decide which steps are committed.

A *step* is one exchange between the ranks of a *quorum*, for example the all-reduce of one backward pass. A rank is
*prepared* when it has the step's result. Then all ranks vote, by one more all-reduce. A rank with a successful vote
*commits* the step. These are the rules:

1. A vote succeeds only if all ranks contribute to it, and a rank contributes only when it is prepared. So a commit on
   one rank implies that all ranks were prepared.
2. If an exchange or a vote fails, the rank reports its number of committed steps to the coordinator and waits. The
   coordinator waits for the reports of all living members of the quorum.
3. The step is committed if a member has committed it, or if all surviving members are prepared. Otherwise the members
   repeat the exchange, with the same inputs, in the next quorum. So all members commit a step, or none.
4. Only the coordinator starts quorums. The numbers of quorums grow, and a rank accepts only larger numbers.
5. Newcomers enter between two steps: all members send reports, and the coordinator starts a quorum with the newcomers.
   A member is *ready* if it has the training's state. A member that is not ready takes part in the steps without an
   effect on their results (:mod:`paceline.protocol.healing`). It is ready after a step that gives it the state. Ready
   members have the lowest ranks.
6. A member that is too slow leaves between two steps. It then computes alone, and later enters as a newcomer.

`member` is the incarnation of a process: a number that no other process has. The runtimes are
:mod:`paceline.meeting.coordinator` and :mod:`paceline.collectives.elastic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TypeAlias

from msgspec import Struct

from paceline.errors import ProtocolError
from paceline.protocol.bounds import Number

# Requests of the ranks.


class JoinRequest(Struct, frozen=True, array_like=True, tag=True):
    """A process requests to become a member; `epoch` is its position in the training loop."""

    member: Number
    epoch: Number
    patience_s: Number = 0
    """Time to wait for new ranks when too few ranks live, before the training fails."""


class QuorumReport(Struct, frozen=True, array_like=True, tag=True):
    """A member has stopped its exchanges in a quorum, and waits for the next one."""

    member: Number
    quorum: Number
    step: Number
    """Steps that the member has committed."""
    is_prepared: bool
    """Whether the member has the result of the next step."""
    is_ready: bool
    """Whether the member has the training's state."""
    gives_state: bool = False
    """Whether the prepared step, if it is committed, gives the state to the members that are not ready."""
    epoch: Number | None = None
    """The member's position in the training loop, in a report that lets newcomers in; None after a failure."""


class LeaveNotice(Struct, frozen=True, array_like=True, tag=True):
    """A member makes no further exchanges."""

    member: Number
    step: Number
    will_return: bool = False
    """Whether the process leaves because it is too slow. It joins again when it has recovered."""


# Instructions of the coordinator. StartQuorum and RetryJoin are also the coordinator's answers to ranks.


class StartQuorum(Struct, frozen=True, array_like=True, tag=True):
    """Form a quorum of these members; a member's rank is its place in `members`. The ready members come first."""

    quorum: Number
    members: tuple[Number, ...]
    step: Number
    """Steps that all members have committed, or commit now."""
    num_ready: Number
    """Number of ready members."""


class RetryJoin(Struct, frozen=True, array_like=True, tag=True):
    """A newcomer is in another epoch than the members. It must continue to the members' epoch and then join again."""

    member: Number


class RejectMember(Struct, frozen=True):
    """Answer a process that is not a member."""

    member: int
    reason: str


class DismissProcess(Struct, frozen=True):
    """Answer a waiting process that the training has ended."""

    member: int


class AnnounceNewcomers(Struct, frozen=True):
    """Notify the members of a quorum that newcomers wait."""

    quorum: int


class BreakQuorum(Struct, frozen=True):
    """End the formation of a quorum, because a member was lost."""

    quorum: int


class ExpelMember(Struct, frozen=True):
    """End the process of this member, because it was declared lost."""

    member: int


class FailTraining(Struct, frozen=True):
    """End the training."""

    reason: str


QuorumInstruction: TypeAlias = (
    StartQuorum
    | RetryJoin
    | RejectMember
    | DismissProcess
    | AnnounceNewcomers
    | BreakQuorum
    | ExpelMember
    | FailTraining
)


class Coordinator:
    """Starts the quorums of one training. A quorum is a numbered group of the ranks that are present.

    The first quorum has the `initial` processes, and the first `num_places` other processes that start. If one of these
    processes ends before the quorum starts, another process may take its place. The first quorum starts with free
    places after `start_timeout_s`, or if a newcomer waits, which then enters the second quorum.

    The training fails if fewer than `min_ranks` members live, and not enough processes join within the time that the
    ranks' requests contain. The coordinator waits `report_timeout_s` for the members' reports, from the first report
    on, and declares members without a report lost. The training also fails if the members of the quorums change more
    than `max_changes` times.
    """

    def __init__(
        self,
        initial: Iterable[int] = (),
        *,
        min_ranks: int,
        max_ranks: int,
        report_timeout_s: float,
        num_places: int | None = None,
        start_timeout_s: float = 0.0,
        max_changes: int | None = None,
    ) -> None:
        self.quorum = 0
        self.members: tuple[int, ...] = ()
        """The members at the start of the current quorum, in rank order. Some may have been lost since."""
        self.has_failed = False
        self._min_ranks, self._max_ranks, self._report_timeout_s = min_ranks, max_ranks, report_timeout_s
        self._num_places, self._start_timeout_s = num_places, start_timeout_s
        """The free places in the first quorum; None if no more processes may enter it."""
        self._initial = set(initial)
        self._processes = set(self._initial)
        self._awaited = set(self._initial)
        """Initial members that have not joined yet."""
        self._waiting: dict[int, int] = {}
        """Epochs of the processes that wait to become members."""
        self._alive: set[int] = set()
        self._leaving: set[int] = set()
        """Members that have left and whose processes live."""
        self._paused: set[int] = set()
        """Processes that have left and will return."""
        self._joined: set[int] = set()
        """Processes that have become members and have not ended."""
        self._has_ended = False
        """Whether a member has ended without a failure."""
        self._step_of_left = 0
        self._reports: dict[int, QuorumReport] = {}
        self._start: StartQuorum | None = None
        self._deadline_s: float | None = None
        self._patience_s = 0
        self._patience_until_s = 0.0
        self._is_announced = False
        self._max_changes, self._num_changes = max_changes, 0

    @property
    def deadline_s(self) -> float | None:
        return self._deadline_s

    @property
    def is_over(self) -> bool:
        """Whether all members have ended."""
        return self.quorum > 0 and not self._alive and not self._leaving

    @property
    def _num_living(self) -> int:
        return len(self._alive) + len(self._leaving) + len(self._paused)

    def has_joined(self, member: int) -> bool:
        """Return whether a process has become a member. It may have left, or be declared lost, since."""
        return member in self._joined

    def is_newcomer(self, member: int) -> bool:
        """Return whether a process enters a later quorum than the first one."""
        return member not in self._initial

    def started(self, member: int, time_s: float = 0.0) -> None:
        """Expect a new process. Requests of unexpected processes are rejected."""
        if self._num_places and member not in self._processes:
            self._num_places -= 1
            self._initial.add(member)
            self._awaited.add(member)
            if self._deadline_s is None:
                self._deadline_s = time_s + self._start_timeout_s
        self._processes.add(member)

    def joined(self, request: JoinRequest) -> list[QuorumInstruction]:
        member = request.member
        if self.has_failed or member not in self._processes or member in self._leaving:
            return [RejectMember(member, "it was declared lost, or the training has failed")]
        if member in self._alive:
            assert self._start is not None
            return [self._start]  # a repeated request: the answer to the first one was lost
        if self.quorum and not self._alive:
            return [DismissProcess(member)]
        self._waiting[member] = request.epoch
        self._awaited.discard(member)
        self._patience_s = max(self._patience_s, request.patience_s)
        return self._start_first() if not self.quorum else [*self._announce(), *self._decide()]

    def reported(self, report: QuorumReport, time_s: float) -> list[QuorumInstruction]:
        if report.member not in self._alive or report.quorum > self.quorum:
            return [RejectMember(report.member, "the other ranks continue without it, because it was declared lost")]
        if report.quorum < self.quorum:
            assert self._start is not None
            return [self._start]  # a repeated report: the answer to the first one was lost
        self._reports[report.member] = report
        if self._deadline_s is None:
            self._deadline_s = time_s + self._report_timeout_s
            self._patience_until_s = time_s + self._patience_s
        return self._decide()

    def left(self, request: LeaveNotice) -> list[QuorumInstruction]:
        self._waiting.pop(request.member, None)
        if request.member not in self._alive:
            return []
        self._alive.remove(request.member)
        (self._paused if request.will_return else self._leaving).add(request.member)
        self._reports.pop(request.member, None)
        self._step_of_left = max(self._step_of_left, request.step)
        return self._decide()

    def lost(self, members: Iterable[int]) -> list[QuorumInstruction]:
        """Record that processes are lost together. Members that had left before end without a failure."""
        finished = self._leaving.intersection(members)
        instructions = self.ended(*set(members) - finished, is_failure=True)
        return [*instructions, *self.ended(*finished, is_failure=False)]

    def ended(self, *members: int, is_failure: bool) -> list[QuorumInstruction]:
        """Record that processes have ended, either all with a failure or all without."""
        self._joined.difference_update(members)
        ended = self._processes.intersection(members)
        if self.has_failed or not ended:
            return []
        is_old = bool(ended & (self._alive | self._leaving | self._awaited))
        was_alive = bool(ended & self._alive)
        for processes in (self._processes, self._alive, self._leaving, self._paused, self._awaited):
            processes -= ended
        for member in ended:
            self._waiting.pop(member, None)
            self._reports.pop(member, None)
        if self._num_places is not None:
            self._num_places += len(ended & self._initial)
            self._initial -= ended
            return self._start_first()
        if not self.quorum:
            num_left = len(self._initial & self._processes)
            if is_failure and num_left < self._min_ranks:
                return self._fail_for_size(num_left)
            return self._start_first()
        if not is_old:
            is_short = is_failure and len(self._processes) < self._min_ranks and not self._has_ended
            return self._fail_for_size(len(self._processes)) if is_short and not self._patience_s else []
        self._has_ended |= not is_failure
        if is_failure and self._has_ended:
            return self._fail("a rank failed after another rank had ended the training")
        is_short = is_failure and self._num_living < self._min_ranks
        if is_short and not self._patience_s:
            return self._fail_for_size(self._num_living)
        if is_failure and self.is_over:
            return self._fail("no rank is left that has the training's state")
        # Without a member that left before its process failed, the other members may have started a quorum already.
        instructions: list[QuorumInstruction] = [BreakQuorum(self.quorum)] if was_alive or is_short else []
        if self.is_over:
            return [*instructions, *self._dismiss()]
        return [*instructions, *self._decide()]

    def time_passed(self, time_s: float) -> list[QuorumInstruction]:
        if self.has_failed or self._deadline_s is None or time_s < self._deadline_s:
            return []
        if self._num_places is not None:
            return self._close_places()
        silent = sorted(self._alive - self._reports.keys())
        if self._alive and not silent:  # the members have waited for new ranks
            return self._fail_for_size(self._num_living)
        self._alive -= set(silent)
        self._processes -= set(silent)
        instructions: list[QuorumInstruction] = [BreakQuorum(self.quorum), *map(ExpelMember, silent)] if silent else []
        if self._num_living < self._min_ranks and not self._patience_s:
            return [*instructions, *self._fail_for_size(self._num_living)]
        return [*instructions, *self._decide()]

    def _close_places(self) -> list[QuorumInstruction]:
        """Start the first quorum with the processes that are present."""
        self._num_places = self._deadline_s = None
        if len(self._processes) < self._min_ranks or not self._initial:
            started = f"ranks that have started within {self._start_timeout_s:g} s: {len(self._processes)}"
            return self._fail(f"{started}, and --min-ranks is {self._min_ranks}")
        return self._start_first()

    def _start_first(self) -> list[QuorumInstruction]:
        num_free = self._num_places or 0
        if self._awaited or num_free > len(self._processes - self._initial) or (num_free and not self._initial):
            return []
        members = self._initial & self._waiting.keys()
        if not members:
            return self._dismiss()
        for member in members:
            del self._waiting[member]
        return self._start_quorum(members, set(), 0)

    def _dismiss(self) -> list[QuorumInstruction]:
        waiting, self._waiting = self._waiting, {}
        return [DismissProcess(member) for member in waiting]

    def _decide(self) -> list[QuorumInstruction]:
        """Start the next quorum if all living members have reported."""
        if self.has_failed or not self._alive or len(self._reports) < len(self._alive):
            return []
        reports = [self._reports[member] for member in sorted(self._alive)]
        step = max(self._step_of_left, *(report.step for report in reports))
        if all(report.step == step and report.is_prepared for report in reports):
            step += 1
        for report in reports:
            if report.step + report.is_prepared < step:
                return self._fail(
                    f"member {report.member} has not prepared step {step}, which another member committed"
                )
        ready = {report.member for report in reports if report.is_ready or (report.gives_state and report.step < step)}
        if not ready:
            return self._fail("no rank is left that has the training's state")
        epoch = next((report.epoch for report in reports if report.epoch is not None), None)
        late: list[int] = []
        newcomers: list[int] = []
        if epoch is not None:
            late = [member for member, position in self._waiting.items() if position != epoch]
            room = max(self._max_ranks - len(self._alive), 0)
            newcomers = [member for member in sorted(self._waiting) if member not in late][:room]
        if self._patience_s and not self._has_ended and self._num_living + len(newcomers) < self._min_ranks:
            self._deadline_s = self._patience_until_s
            return []
        for member in (*late, *newcomers):
            del self._waiting[member]
        return [*self._start_quorum(ready, {*self._alive, *newcomers} - ready, step), *map(RetryJoin, late)]

    def _start_quorum(self, ready: Set[int], others: Set[int], step: int) -> list[QuorumInstruction]:
        if self.quorum and {*ready, *others} != {*self.members}:
            self._num_changes += 1
            if self._max_changes is not None and self._num_changes > self._max_changes:
                limit = f"{self._max_changes} times (--max-changes, or --reset-limit of horovodrun)"
                return self._fail(f"the set of ranks has changed more than {limit}")
        self.quorum += 1
        self.members = (*sorted(ready), *sorted(others))
        members = self._alive = {*ready, *others}
        self._joined |= members
        self._paused -= members
        self._reports, self._deadline_s, self._is_announced = {}, None, False
        self._num_places = None
        self._start = StartQuorum(self.quorum, self.members, step, len(ready))
        return [self._start, *self._announce()]

    def _announce(self) -> list[QuorumInstruction]:
        if self._is_announced or not self._waiting or len(self._alive) >= self._max_ranks:
            return []
        self._is_announced = True
        return [AnnounceNewcomers(self.quorum)]

    def _fail_for_size(self, num_left: int) -> list[QuorumInstruction]:
        ranks = "1 rank is" if num_left == 1 else f"{num_left} ranks are" if num_left else "no rank is"
        waited = f", no new rank has joined within {self._patience_s} s" if self.quorum and self._patience_s else ""
        return self._fail(f"{ranks} left{waited}, and --min-ranks is {self._min_ranks}")

    def _fail(self, reason: str) -> list[QuorumInstruction]:
        self.has_failed = True
        self._deadline_s = None
        return [FailTraining(reason)]


class QuorumMember:
    """The rules of one rank: its quorum, its steps, and its reports."""

    def __init__(self, member: int, *, is_ready: bool) -> None:
        self.member, self.is_ready = member, is_ready
        self.quorum = self.step = 0
        self.is_prepared = False
        self._gives_state = False

    def prepare(self, *, gives_state: bool = False) -> None:
        self.is_prepared, self._gives_state = True, gives_state

    def commit(self) -> None:
        assert self.is_prepared
        self.step += 1
        self.is_ready |= self._gives_state
        self.is_prepared = self._gives_state = False

    def report(self, epoch: int | None = None) -> QuorumReport:
        """Return this rank's report: after a failure, or between two steps (with `epoch`) to let newcomers in."""
        assert epoch is None or not self.is_prepared
        return QuorumReport(
            self.member, self.quorum, self.step, self.is_prepared, self.is_ready, self._gives_state, epoch
        )

    def start(self, start: StartQuorum) -> bool:
        """Enter the next quorum; return whether the prepared step is committed.

        Raises ProtocolError if the quorum is not newer, lacks this rank, or commits a step that is not prepared.
        """
        if start.quorum <= self.quorum or self.member not in start.members:
            raise ProtocolError(
                f"member {self.member} of quorum {self.quorum} received {start}: expected a newer quorum "
                "with this member"
            )
        is_committed = self.step < start.step and self.is_prepared
        if self.quorum and self.step + is_committed < start.step:
            raise ProtocolError(f"member {self.member} cannot commit step {start.step}, which it has not prepared")
        self.quorum, self.step = start.quorum, start.step
        self.is_ready |= is_committed and self._gives_state
        self.is_prepared = self._gives_state = False
        return is_committed

"""A group whose ranks may die and join during a training: either all ranks complete an exchange, or none does.

The rules are in :mod:`paceline.protocol.quorum`. The ranks of each quorum form a new :class:`Group`.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
from typing_extensions import override

from paceline.closing import Closing
from paceline.collectives.arrays import as_array
from paceline.collectives.group import Group
from paceline.collectives.start import join
from paceline.collectives.ticket import CollectiveTicket
from paceline.errors import (
    AddressError,
    CollectiveError,
    DeadlineError,
    GroupClosedError,
    MismatchError,
    PacelineError,
    PeerError,
)
from paceline.meeting.coordinator import COORDINATOR, NEWCOMERS, quorum_prefix, request_quorum
from paceline.meeting.network_store import NetworkStore
from paceline.meeting.store import MemoryStore, PrefixStore
from paceline.protocol.quorum import JoinRequest, LeaveNotice, QuorumMember, QuorumReport, RetryJoin, StartQuorum
from paceline.protocol.stragglers import StepTimes
from paceline.transport import TLS, Address, make_token
from paceline.transport.security.authentication import Hello

_Result = TypeVar("_Result")
_MOST_REPETITIONS: Final = 5
"""The number of repetitions of an exchange by the same members. If the last one fails, its error is raised."""
_LEAVE_S: Final = 5.0


class _NoNewcomersError(Exception):
    """All newcomers have died before they received the state."""


class ElasticGroup(Closing):
    """The ranks of an elastic training, as one rank uses them.

    Before :meth:`enter` the group has only this process. All ranks make the same calls in the same order. If a rank
    dies during a call, the other ranks repeat the call without this rank. A newcomer enters when the other ranks call
    :meth:`admit`, and then makes the same calls as the other ranks.

    Raises RankLostError if this rank was declared lost, and GroupClosedError after the end of the training.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        member: int,
        *,
        is_newcomer: bool,
        tls: TLS | None,
        timeout: timedelta,
        step_times: StepTimes | None = None,
    ) -> None:
        """Connect to the coordinator. `member` is the incarnation of this process; `timeout` limits each call.

        With `step_times` the ranks compare the times of their steps, and find stragglers.
        """
        self._token, self._tls, self.timeout = token, tls, timeout
        hello = Hello(role="rank", rank=member, incarnation=member, to=COORDINATOR)
        self._store = NetworkStore(address, token, hello, timeout_s=timeout.total_seconds(), tls=tls)
        self._rules = QuorumMember(member, has_state=not is_newcomer)
        self._group = join(MemoryStore(), 0, 1, token=token, timeout=timeout)
        self._is_closed = False
        self.members: tuple[int, ...] = (member,)
        """The incarnations of the ranks, in rank order."""
        self.contributors: tuple[int, ...] = self.members
        """The incarnations of the ranks whose data are in the result of the last exchange."""
        self.source = 0
        """The rank that sends the training's state to newcomers."""
        self.has_newcomers = False
        """Whether the ranks must transfer the training's state before the next exchange."""
        self._newcomers_wait = False
        """Whether rank 0 has received the announcement of newcomers."""
        self.admits_newcomers = False
        """Whether all ranks must call :meth:`admit`; the same on all ranks after each exchange."""
        self.step_times = step_times
        self.straggler: int | None = None
        """The rank that must call :meth:`pause` while the others call :meth:`admit`; the same on all ranks."""
        self._limit_s = 0.0
        """The step time of a recovered straggler."""
        self._busy_s = 0.0
        """Time outside of exchanges since the last step."""
        self._left_at_s = time.monotonic()
        """The end of the last exchange."""
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def quorum(self) -> int:
        """Number of the current quorum; 0 before :meth:`enter`."""
        return self._rules.quorum

    @property
    def has_state(self) -> bool:
        """Whether this rank has the training's state."""
        return self._rules.has_state

    def enter(self, epoch: int = 0) -> bool:
        """Become a member; return False if the other ranks are in another `epoch` of the training loop."""
        start = self._request(JoinRequest(self._rules.member, epoch))
        if isinstance(start, RetryJoin):
            return False
        self._start(start)
        return True

    def admit(self, epoch: int) -> None:
        """Let in the newcomers that wait in `epoch`. All ranks call this method between the same two exchanges."""
        self._recover(self._rules.report(epoch))

    def pause(self) -> None:
        """Leave the other ranks between two exchanges, because this rank is a straggler. Then it is alone."""
        assert self.step_times is not None
        self._limit_s = self.step_times.factor * self.step_times.others(self.rank)
        member = self._rules.member
        request_quorum(self._store, LeaveNotice(member, self._rules.step, will_return=True), self.timeout)
        self._group.close()
        self._rules = QuorumMember(member, has_state=False)
        self._group = join(MemoryStore(), 0, 1, token=self._token, timeout=self.timeout)
        self.members = (member,)
        self._reset_quorum()

    @property
    def has_recovered(self) -> bool:
        """Whether this process may join: always, except after :meth:`pause` until its steps are fast enough."""
        return not self._limit_s or self.step_times is None or self.step_times.has_recovered(self._limit_s)

    def _reset_quorum(self) -> None:
        """Reset the agreements of the last quorum."""
        self._newcomers_wait = self.admits_newcomers = self.has_newcomers = False
        self.straggler = None
        if self.step_times is not None:
            self.step_times.reset()

    def exchange(self, run: Callable[[Group], _Result], *, is_step: bool = False) -> _Result:
        """Call `run` with a group until it succeeds on all ranks of the group; return this rank's result.

        `run` must not change its inputs, because it may be called again. Raises MismatchError, and errors of `run` that
        are not a CollectiveError. `is_step` ends a step; the ranks compare the times of their steps.
        """
        self._busy_s += time.monotonic() - self._left_at_s
        try:
            return self._exchange(run, is_step=is_step)
        finally:
            self._left_at_s = time.monotonic()
            self._busy_s *= not is_step

    def _exchange(self, run: Callable[[Group], _Result], *, is_step: bool) -> _Result:
        repeated, members = 0, self.members
        while True:
            contributors = self.members
            try:
                result = run(self._group)
                self._rules.prepare()
                self._vote(is_step=is_step)
            except MismatchError:
                raise
            except CollectiveError:
                if not self.quorum or self._is_closed:
                    raise
                repeated = repeated + 1 if self.members == members else 0
                members = self.members
                if repeated > _MOST_REPETITIONS:
                    raise
                if not self._recover(self._rules.report()):
                    continue
            else:
                self._rules.commit()
            self.contributors = contributors
            return result

    def transfer(self, share: Callable[[Group, int], None]) -> bool:
        """Call ``share(group, source)`` on all ranks until all succeed; return False if no newcomer is left."""

        def run(group: Group) -> None:
            if not self.has_newcomers:
                raise _NoNewcomersError
            share(group, self.source)

        try:
            self.exchange(run)
        except _NoNewcomersError:
            return False
        self._rules.has_state = True
        self.has_newcomers = False
        return True

    def start_mean(self, array: Any, out: Any) -> CollectiveTicket | None:
        """Start an all-reduce of the next :meth:`exchange`; None if a rank was lost before."""
        try:
            return self._group.all_reduce_async(array, "mean", out=out)
        except CollectiveError:
            return None

    def _vote(self, *, is_step: bool) -> None:
        """Succeed if all ranks call it; share the flag of newcomers, and the ranks' times of the step."""
        has_times = is_step and self.step_times is not None
        votes = np.zeros(1 + has_times * self.size)
        votes[0] = self._newcomers_wait
        if has_times:
            votes[1 + self.rank] = self._busy_s
        if self.size > 1:
            votes = self._group.all_reduce(votes, "max", out=votes)
        self.admits_newcomers = bool(votes[0])
        if self.step_times is not None and is_step:
            self.step_times.record(votes[1:].tolist())
            self.straggler = self.step_times.straggler() if self.quorum else None

    def _recover(self, report: QuorumReport) -> bool:
        """Enter the next quorum; return whether the prepared step is committed."""
        self._group.abort()  # so that no other rank waits for this rank
        return self._start(self._request(report))

    def _start(self, start: StartQuorum | RetryJoin) -> bool:
        """Form quorums until one of them succeeds; return whether the prepared step is committed."""
        is_committed = False
        while True:
            assert isinstance(start, StartQuorum)
            is_committed = self._rules.start(start) or is_committed
            self._group.close()
            self._reset_quorum()
            store = PrefixStore(self._store, quorum_prefix(start.quorum))
            rank, size = start.members.index(self._rules.member), len(start.members)
            try:
                self._group = join(
                    store, rank, size, token=self._token, tls=self._tls, name=f"quorum {start.quorum}",
                    timeout=self.timeout,
                )  # fmt: skip
            except (PeerError, AddressError):
                start = self._request(self._rules.report())
                continue
            self.members, self.source, self.has_newcomers = start.members, start.source, start.has_newcomers
            self._limit_s = 0.0
            if rank == 0:
                watch = threading.Thread(
                    target=self._watch, args=(store, start.quorum), name="paceline-newcomers", daemon=True
                )
                watch.start()
            return is_committed

    def _watch(self, store: PrefixStore, quorum: int) -> None:
        """Wait in a thread for the announcement of newcomers. The coordinator ends the wait with the quorum."""
        while True:
            try:
                store.get(NEWCOMERS, time.monotonic() + self.timeout.total_seconds())
            except DeadlineError:
                continue
            except PacelineError:
                return
            if quorum == self.quorum:
                self._newcomers_wait = True
            return

    def _request(self, request: JoinRequest | QuorumReport) -> StartQuorum | RetryJoin:
        # The coordinator declares silent members lost after `timeout`, so it answers within twice this time.
        patience = 2 * self.timeout if isinstance(request, QuorumReport) else timedelta(days=365)
        answer = request_quorum(self._store, request, patience)
        if answer is None:
            raise GroupClosedError("the training has ended")
        return answer

    def mark(self, key: str) -> None:
        """Set a key for :meth:`is_marked`."""
        self._store.set(key, b"")

    def is_marked(self, key: str) -> bool:
        return self._store.collect([key], time.monotonic())[0] is not None

    def all_reduce(self, array: Any, op: str = "sum", *, out: Any = None) -> Any:
        """Return the reduction of `array` over all ranks; `out` may be `array` itself."""
        given = as_array(array)
        if out is not None:
            given = given.copy() if isinstance(given, np.ndarray) else given.detach().clone()
        return self.exchange(lambda group: group.all_reduce(given, op, out=out))

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return self.exchange(lambda group: group.all_gather_objects(value))

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.exchange(lambda group: group.barrier())

    @override
    def close(self) -> None:
        """Leave the training; the other ranks continue. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self.quorum:
            try:
                leave = LeaveNotice(self._rules.member, self._rules.step)
                request_quorum(self._store, leave, timedelta(seconds=_LEAVE_S))
            except PacelineError:
                pass  # without a message, the launcher detects the end of this process
        self._group.close()
        self._store.close()


def load_kernels() -> None:
    """Load the compiled code of a group with two ranks, so that no first call exceeds its timeout meanwhile."""
    store, token = MemoryStore(), make_token()

    def work(rank: int) -> None:
        with join(store, rank, 2, token=token) as group:
            for dtype in (np.float32, np.float64):
                group.all_reduce(np.ones(1, dtype), "max")
            group.broadcast(np.ones(1, np.float32))

    other = threading.Thread(target=work, args=(1,), daemon=True)
    other.start()
    work(0)
    other.join()

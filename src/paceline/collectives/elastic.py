"""A group whose ranks may die and join during a training.

A quorum is the set of ranks that currently take part. Each exchange of data (for example an all-reduce of gradients)
succeeds on all ranks of the quorum or on none. If a rank dies or joins, the ranks form the next quorum and a new
:class:`Group`. *Ready* ranks have the training's state. The data of other ranks have no effect. The rules are in
:mod:`paceline.protocol.quorum` and :mod:`paceline.protocol.healing`.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
from typing_extensions import override

from paceline.closing import Closing
from paceline.collectives.arrays import as_array, empty_like
from paceline.collectives.group import Group
from paceline.collectives.shared_values import SharedValues
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
    RankLostError,
)
from paceline.meeting.coordinator import COORDINATOR, END, NEWCOMERS, quorum_prefix, request_quorum
from paceline.meeting.network_store import NetworkStore
from paceline.meeting.rendezvous import own_host
from paceline.meeting.store import MemoryStore, PrefixStore
from paceline.protocol.balance import Balance
from paceline.protocol.quorum import JoinRequest, LeaveNotice, QuorumMember, QuorumReport, RetryJoin, StartQuorum
from paceline.protocol.stragglers import StepTimes
from paceline.transport import TLS, Address
from paceline.transport.security.authentication import Hello

_Result = TypeVar("_Result")
_MOST_REPETITIONS: Final = 5
"""How often the same ranks repeat an exchange. If the last repetition fails, its error is raised."""
_LEAVE_S: Final = 5.0


class _NoNewcomersError(Exception):
    """Raised if all ranks that were not ready have died."""


class ElasticGroup(Closing):
    """One rank's group in an elastic training.

    Before :meth:`enter`, the group contains only this process. All ranks must make the same calls in the same order. If
    a rank dies during a call, the other ranks repeat the call without the dead rank. A new process waits in
    :meth:`enter` until the other ranks call :meth:`admit`. From then on, it makes the same calls as the other ranks.

    Calls raise RankLostError if the coordinator has declared this rank lost, and GroupClosedError if the training has
    ended.
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
        balance: Balance | None = None,
    ) -> None:
        """Connect to the coordinator, the process that forms the quorums.

        `member` is the unique number (incarnation) of this process, and `timeout` limits each call. With `step_times`,
        the ranks compare the times of their training steps to find stragglers (slow ranks). With a `balance`, they
        choose their shares of a step from these times.
        """
        self._token, self._tls, self.timeout = token, tls, timeout
        self._host = own_host(address.host)
        hello = Hello(role="rank", rank=member, incarnation=member, to=COORDINATOR)
        self._store = NetworkStore(address, token, hello, timeout_s=timeout.total_seconds(), tls=tls)
        self.values = SharedValues(self._store, member, timeout)
        self._rules = QuorumMember(member, is_ready=not is_newcomer)
        self.group = join(MemoryStore(), 0, 1, token=token, timeout=timeout)
        """The group of the current quorum. If a call of its methods fails, all ranks must call :meth:`admit`."""
        self._is_closed = False
        self.member = member
        self.members: tuple[int, ...] = (member,)
        """The unique numbers (incarnations) of the ranks' processes, in the order of ranks."""
        self.contributors: tuple[int, ...] = self.members
        """The unique numbers (incarnations) of the ranks whose data are in the last exchange's result, by rank.

        After an exchange that made ranks ready, these ranks are included. The value is equal on all ranks. But
        :attr:`members` may differ between ranks: after the death of a rank, one rank may be in the next quorum while
        another rank is still in the previous quorum.
        """
        self.shares: tuple[int, ...] | None = None
        """The contributors' numbers of samples in a step; None for equal numbers. The value is equal on all ranks."""
        self._num_ready = 1
        self._has_voted = False
        """Whether the last exchange ended by a successful vote of this rank."""
        self._part: tuple[CollectiveTicket, Callable[[float], None]] | None = None
        """The part of the state that this rank receives in the background, and the function that loads it."""
        self.newcomers_wait = False
        """Whether this rank is rank 0, and has received the announcement of newcomers."""
        self._patience = timedelta(0)
        self.admits_newcomers = False
        """Whether all ranks must call :meth:`admit` now. After an exchange, the value is equal on all ranks."""
        self.step_times = step_times
        self.balance = balance
        self.straggler: int | None = None
        """The slow rank, which must call :meth:`pause` when the other ranks call :meth:`admit`; None without one."""
        self._limit_s = 0.0
        """A paused straggler may join again when its steps take at most this many seconds; 0 if not paused."""
        self._busy_s = 0.0
        """The seconds that this rank spent outside of exchanges since its last step."""
        self._left_at_s = time.monotonic()
        """The time at which the last exchange ended."""
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def quorum(self) -> int:
        """The number of the current quorum (set of participating ranks); 0 before :meth:`enter`."""
        return self._rules.quorum

    @property
    def has_state(self) -> bool:
        """Whether this rank has the training's state."""
        return self._rules.is_ready

    def set_ready(self) -> None:
        """Record that this rank has received the training's state by calls of :attr:`group`."""
        self._rules.is_ready = True

    @property
    def ready(self) -> tuple[int, ...]:
        """The ready members, which are the first ranks. A process that computes alone counts as ready."""
        return self.members[: self._num_ready]

    @property
    def is_ready(self) -> bool:
        """Whether this rank is among :attr:`ready`, so that its data have an effect."""
        return self.rank < self._num_ready

    @property
    def has_newcomers(self) -> bool:
        """Whether ranks of the quorum are not ready. The ranks must call :meth:`heal` between two steps."""
        return self._num_ready < self.size

    def enter(self, epoch: int = 0, *, patience: timedelta = timedelta(0)) -> bool:
        """Join the training in `epoch`. Return False if the other ranks are in another epoch.

        If later fewer than ``--min-ranks`` ranks remain, :meth:`admit` waits up to `patience` for new ranks in epoch 0.
        """
        self._patience = patience
        start = self._request(JoinRequest(self._rules.member, epoch, round(patience.total_seconds())))
        if isinstance(start, RetryJoin):
            return False
        self._start(start)
        return True

    def admit(self, epoch: int) -> None:
        """Form a quorum with the new processes that wait in :meth:`enter` for this `epoch`.

        All ranks must call this method between the same two exchanges.
        """
        self._recover(self._rules.report(epoch))

    def pause(self) -> None:
        """Leave the training between two exchanges, because this rank is too slow.

        The group then has only this rank.
        """
        assert self.step_times is not None
        self._limit_s = self.step_times.factor * self.step_times.others(self.rank)
        member = self.member
        request_quorum(self._store, LeaveNotice(member, self._rules.step, will_return=True), self.timeout)
        self.group.close()
        self._rules = QuorumMember(member, is_ready=False)
        self.group = join(MemoryStore(), 0, 1, token=self._token, timeout=self.timeout)
        self.members = self.contributors = (member,)
        self.shares, self._num_ready = None, 1
        self._reset_quorum()

    @property
    def has_recovered(self) -> bool:
        """Whether this process may join the training. After :meth:`pause`, its steps must first be fast enough."""
        return not self._limit_s or self.step_times is None or self.step_times.has_recovered(self._limit_s)

    def _reset_quorum(self) -> None:
        """Reset the attributes that were valid for the last quorum only."""
        self.newcomers_wait = self.admits_newcomers = False
        self._reset_times()

    def _reset_times(self) -> None:
        """Reset the attributes that depend on the ready ranks' times."""
        self.straggler = None
        if self.step_times is not None:
            self.step_times.reset()
        if self.balance is not None:
            self.balance.reset()

    def exchange(self, run: Callable[[Group], _Result], *, is_step: bool = False, heals: bool = False) -> _Result:
        """Call ``run(group)`` until it succeeds on all ranks of the group, and return this rank's result.

        `run` must not change its inputs, because it may be called several times. With `is_step`, the exchange ends a
        training step, and the ranks compare the times of their steps. With `heals`, a true result makes all ranks
        ready. Raises MismatchError if the ranks make different calls, and errors of `run` other than CollectiveError.
        """
        self.load_part()
        self._busy_s += time.monotonic() - self._left_at_s
        try:
            return self._exchange(run, is_step, heals)
        finally:
            self._left_at_s = time.monotonic()
            self._busy_s *= not is_step

    def _exchange(self, run: Callable[[Group], _Result], is_step: bool, heals: bool) -> _Result:
        repeated, members = 0, self.members
        while True:
            contributors, shares, gives_state = self.ready, self._next_shares, False
            try:
                result = run(self.group)
                if heals and result:
                    contributors, shares, gives_state = self.members, None, True
                self._rules.prepare(gives_state=gives_state)
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
                self._has_voted = False
                if not self._recover(self._rules.report()):
                    continue
            else:
                self._rules.commit()
                self._has_voted = True
                if gives_state:
                    self._num_ready = self.size
                    self._reset_times()
            self.contributors, self.shares = contributors, shares
            return result

    @property
    def _next_shares(self) -> tuple[int, ...] | None:
        """The ranks' last choice of shares, which is in :attr:`shares` after the next exchange."""
        return None if self.balance is None else self.balance.shares

    def heal(self, share: Callable[[Group], bool]) -> bool:
        """Call ``share(group)`` until it succeeds on all ranks. `share` returns whether newcomers have the whole state.

        Return whether rank 0 may now call :meth:`send_part`, and newcomers :meth:`receive_part`.
        """

        def run(group: Group) -> bool:
            if not self.has_newcomers:
                raise _NoNewcomersError
            return share(group)

        try:
            is_complete = self.exchange(run, heals=True)
        except _NoNewcomersError:
            return False
        # After a failed vote, this rank is in the next quorum, while another rank may be in the previous one.
        return not is_complete and self._has_voted

    def send_part(self, message: Any) -> None:
        """Start to send a part of the state to every newcomer. A failure lets the next exchange form a new quorum."""
        with contextlib.suppress(CollectiveError):
            for rank in range(self._num_ready, self.size):
                self.group.send_async(message, rank, tag=self._rules.step)

    def receive_part(self, message: Any, load: Callable[[float], None]) -> None:
        """Start to receive a part of the state. :meth:`load_part`, or the next exchange, waits for the part."""
        with contextlib.suppress(CollectiveError):
            self._part = self.group.recv_async(message, 0, tag=self._rules.step), load

    def load_part(self) -> None:
        """Wait for the part of :meth:`receive_part`, and call ``load(waited_s)``, unless the group has failed."""
        part, self._part = self._part, None
        if part is not None:
            ticket, load = part
            begun_s = time.monotonic()
            with contextlib.suppress(CollectiveError):
                ticket.wait()
                load(time.monotonic() - begun_s)

    def start_mean(self, array: Any, out: Any) -> CollectiveTicket | None:
        """Start an all-reduce whose result the next :meth:`exchange` uses. Return None if the group has failed."""
        try:
            return self.group.all_reduce_async(array, "mean", out=out)
        except CollectiveError:
            return None

    def _vote(self, *, is_step: bool) -> None:
        """Check that all ranks have finished the exchange. Share whether newcomers wait, and the time of each rank's
        step.
        """
        has_times = is_step and self.step_times is not None
        votes = np.zeros(1 + has_times * self._num_ready)
        votes[0] = self.newcomers_wait
        if has_times and self.is_ready:
            votes[1 + self.rank] = self._busy_s
        if self.size > 1:
            votes = self.group.all_reduce(votes, "max", out=votes)
        self.admits_newcomers = bool(votes[0]) and not self.has_newcomers
        if self.step_times is not None and is_step:
            self._compare(self.step_times, votes[1:].tolist())

    def _compare(self, step_times: StepTimes, times_s: Sequence[float]) -> None:
        """Compare the ranks' times of a step: find a straggler, and choose the shares of later steps."""
        if self.shares != self._next_shares:
            return  # the times were measured with earlier shares
        step_times.record(times_s)
        if self.quorum:
            self.straggler = step_times.straggler()
            if self.balance is not None:
                self.balance.update(step_times)

    def _recover(self, report: QuorumReport) -> bool:
        """Enter the next quorum. Return whether the last step is committed (all ranks must apply it)."""
        self.group.abort()  # so that other ranks do not wait for this rank in a call
        return self._start(self._request(report))

    def _start(self, start: StartQuorum | RetryJoin) -> bool:
        """Form quorums until one of them succeeds.

        Return whether the last step is committed (all ranks must apply it).
        """
        is_committed = False
        while True:
            assert isinstance(start, StartQuorum)
            is_committed = self._rules.start(start) or is_committed
            self.group.close()
            self._reset_quorum()
            store = PrefixStore(self._store, quorum_prefix(start.quorum))
            rank, size = start.members.index(self._rules.member), len(start.members)
            try:
                group = join(
                    store, rank, size, token=self._token, host=self._host, tls=self._tls,
                    name=f"quorum {start.quorum}", timeout=self.timeout)  # fmt: skip
            except (PeerError, AddressError):
                epoch = 0 if self._patience else None  # with patience, newcomers may join after a failure too
                start = self._request(self._rules.report(epoch))
                continue
            group.tuner.reuse(self.group.tuner)  # a measurement would delay the next step by up to a second
            self.group, self.members, self._num_ready = group, start.members, start.num_ready
            self._limit_s = 0.0
            arguments = (store, start.quorum, self.group)
            threading.Thread(target=self._watch, args=arguments, name="paceline-quorum", daemon=True).start()
            return is_committed

    def _watch(self, store: PrefixStore, quorum: int, group: Group) -> None:
        """Wait in a thread for the end of the quorum, and abort its group. Rank 0 also waits for newcomers.

        Without this thread, the ranks would wait for a rank whose host or network has failed silently.
        """
        key = END if group.rank else NEWCOMERS
        while True:
            try:
                store.get(key, time.monotonic() + self.timeout.total_seconds())
            except DeadlineError:
                continue
            except RankLostError:
                group.abort()
                return
            except PacelineError:
                return
            key = END
            if quorum == self.quorum:
                self.newcomers_wait = True

    def _request(self, request: JoinRequest | QuorumReport) -> StartQuorum | RetryJoin:
        # The coordinator waits up to `timeout` for the other ranks' reports, so it answers within twice this time.
        limit = 2 * self.timeout + self._patience if isinstance(request, QuorumReport) else timedelta(days=365)
        answer = request_quorum(self._store, request, limit)
        if answer is None:
            raise GroupClosedError("the training has ended")
        return answer

    @property
    def num_exchanges(self) -> int:
        """The number of exchanges of the training. Between two exchanges, the value is equal on all ranks."""
        return self._rules.step

    def all_reduce(self, array: Any, op: str = "sum", *, out: Any = None) -> Any:
        """Return the reduction of `array` over all ready ranks.

        The result is written to `out`, which may be `array` itself.
        """
        local = as_array(array)
        if out is not None:
            local = local.copy() if isinstance(local, np.ndarray) else local.detach().clone()

        def reduce(group: Group) -> Any:
            if not self.has_newcomers:
                return group.all_reduce(local, op, out=out)
            parts = group.all_gather(local[None])[: self._num_ready]
            is_tensor = not isinstance(parts, np.ndarray)
            result = empty_like(local, local.shape) if out is None else out
            result[...] = getattr(parts, f"a{op}" if is_tensor and op in ("min", "max") else op)(0)
            return result

        return self.exchange(reduce)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ready ranks."""
        return self.exchange(lambda group: group.all_gather_objects(value)[: self._num_ready])

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
                pass  # without the message, the launcher still detects the end of this process
        self.group.close()
        self._store.close()

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
        self, address: Address, token: str, member: int, *, is_newcomer: bool, tls: TLS | None, timeout: timedelta
    ) -> None:
        """Connect to the coordinator. `member` is the incarnation of this process; `timeout` limits each call."""
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

    def exchange(self, run: Callable[[Group], _Result]) -> _Result:
        """Call `run` with a group until it succeeds on all ranks of the group; return this rank's result.

        `run` must not change its inputs, because it may be called again. Raises MismatchError, and errors of `run` that
        are not a CollectiveError.
        """
        repeated, members = 0, self.members
        while True:
            contributors = self.members
            try:
                result = run(self._group)
                self._rules.prepare()
                self._vote()
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

    def _vote(self) -> None:
        if self.size == 1:
            self.admits_newcomers = self._newcomers_wait
            return
        flag = np.array([self._newcomers_wait], np.int32)
        self.admits_newcomers = bool(self._group.all_reduce(flag, "max", out=flag)[0])

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
            self._newcomers_wait = self.admits_newcomers = False
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
            for dtype in (np.float32, np.int32):
                group.all_reduce(np.ones(1, dtype), "max")
            group.broadcast(np.ones(1, np.float32))

    other = threading.Thread(target=work, args=(1,), daemon=True)
    other.start()
    work(0)
    other.join()

"""Serve the coordinator of an elastic training, together with the store in which its ranks meet.

A rank sends each of its requests with :func:`request_quorum`. The answer comes when the next quorum starts. The keys of
quorum 5 begin with ``quorum 5/``; they are dropped when quorum 6 starts, or when a member of quorum 5 is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import PacelineError, RankLostError
from paceline.meeting.network_store import NetworkStore, ServedStore, StoreCall, StoreServer
from paceline.protocol.quorum import (
    AnnounceNewcomers,
    BreakQuorum,
    Coordinator,
    DismissProcess,
    ExpelMember,
    FailTraining,
    JoinRequest,
    LeaveNotice,
    QuorumInstruction,
    QuorumReport,
    RejectMember,
    RetryJoin,
    StartQuorum,
)
from paceline.transport import TLS
from paceline.transport.addresses import Address
from paceline.transport.base import Peer
from paceline.transport.decoding import reader
from paceline.transport.frames import Header, frame_parts
from paceline.transport.security.authentication import Hello

COORDINATOR = "coordinator"
"""The role of the server in its Hello."""
NEWCOMERS = "newcomers"
"""Key that is set within a quorum's prefix when newcomers wait."""
ENDED = "the training has ended"
"""Key that is set when all members have ended, for ranks that compute alone."""
_decode_request = reader(JoinRequest | QuorumReport | LeaveNotice, "a request to the coordinator")
_decode_answer = reader(StartQuorum | RetryJoin | None, "an answer of the coordinator")


def quorum_prefix(quorum: int) -> str:
    return f"quorum {quorum}"


def request_quorum(
    store: NetworkStore, request: JoinRequest | QuorumReport | LeaveNotice, timeout: timedelta
) -> StartQuorum | RetryJoin | None:
    """Send a request, and wait for the answer; None after the end of the training, and for a notice.

    Raises RankLostError if this process was declared lost, and the errors of :meth:`NetworkStore.call`.
    """
    body = msgspec.msgpack.encode(request)
    answer: StartQuorum | RetryJoin | None = _decode_answer(
        store.call(StoreCall.QUORUM, timeout.total_seconds(), body=body)
    )
    return answer


class _CoordinatedStore(ServedStore):
    """The store, the coordinator and the requests that wait for it. Used in the loop's thread only."""

    def __init__(self, coordinator: Coordinator, expel: Callable[[int], None], fail: Callable[[str], None]) -> None:
        super().__init__()
        self.coordinator = coordinator
        self._expel, self._fail = expel, fail
        self._waiting: dict[int, tuple[Peer, Header]] = {}
        self._first_usable = 0
        """The lowest number of a quorum whose keys may be used."""
        self._timer: asyncio.TimerHandle | None = None

    @override
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind != StoreCall.QUORUM:
            super().frame_received(peer, header, meta, body)
            return
        request = _decode_request(body)
        self._waiting[request.member] = (peer, header)
        match request:
            case JoinRequest():
                self.carry_out(self.coordinator.joined(request))
            case QuorumReport():
                self.carry_out(self.coordinator.reported(request, time.monotonic()))
            case LeaveNotice():
                self._reply(request.member, None)
                self.carry_out(self.coordinator.left(request))

    @override
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        super().disconnected(peer, reason)
        self._waiting = {member: waiting for member, waiting in self._waiting.items() if waiting[0] is not peer}

    def carry_out(self, instructions: Iterable[QuorumInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartQuorum(quorum=quorum, members=members):
                    self._drop_before(quorum)
                    for member in members:
                        self._reply(member, instruction)
                case RetryJoin(member=member):
                    self._reply(member, instruction)
                case DismissProcess(member=member):
                    self._reply(member, None)
                case RejectMember(member=member, reason=reason):
                    self._reply(member, RankLostError(f"this rank cannot continue: {reason}"))
                case AnnounceNewcomers(quorum=quorum):
                    if quorum >= self._first_usable:
                        self.set(f"{quorum_prefix(quorum)}/{NEWCOMERS}", b"")
                case BreakQuorum(quorum=quorum):
                    self._drop_before(quorum + 1)
                case ExpelMember(member=member):
                    self._expel(member)
                case FailTraining(reason=reason):
                    self._fail(reason)
        if self.coordinator.is_over:
            self.set(ENDED, b"")
        self._set_timer()

    def _reply(self, member: int, answer: StartQuorum | RetryJoin | RankLostError | None) -> None:
        peer, header = self._waiting.pop(member, (None, None))
        if peer is None or header is None:
            return
        if isinstance(answer, RankLostError):
            peer.send_error(header, answer)
        else:
            peer.send(*frame_parts(StoreCall.DONE, body=msgspec.msgpack.encode(answer)))

    def _drop_before(self, quorum: int) -> None:
        for number in range(self._first_usable, quorum):
            self.drop(f"{quorum_prefix(number)}/", _ended(number))
        self._first_usable = max(self._first_usable, quorum)

    @override
    def _check_key(self, key: str) -> None:
        number = key.partition("/")[0].removeprefix("quorum ")
        if number.isdecimal() and int(number) < self._first_usable:
            raise _ended(int(number))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_s = self.coordinator.deadline_s
        if deadline_s is not None:
            wait_s = max(deadline_s - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._pass_time)

    def _pass_time(self) -> None:
        self.carry_out(self.coordinator.time_passed(time.monotonic()))


def _ended(quorum: int) -> PacelineError:
    return RankLostError(f"quorum {quorum} has ended, because a rank was lost or another quorum has started")


class CoordinatorServer(Closing):
    """A coordinator and its store, served by a thread until :meth:`close`. All methods are thread-safe.

    `expel` is called in that thread with a process that was declared lost and must end.
    """

    def __init__(
        self, coordinator: Coordinator, address: Address, token: str, tls: TLS | None, expel: Callable[[int], None]
    ) -> None:
        """Raises AddressError if the address cannot be used."""
        self.failure: str | None = None
        """The reason for which the training cannot continue."""
        self._coordinator = coordinator
        self._store = _CoordinatedStore(coordinator, expel, self._record_failure)
        self._server = StoreServer(address, token, Hello(role=COORDINATOR), tls, store=self._store)
        self.address = self._server.address

    def _record_failure(self, reason: str) -> None:
        self.failure = reason

    def started(self, member: int) -> None:
        """Expect a new process."""
        self._server.call(lambda: self._coordinator.started(member))

    def ended(self, member: int, *, is_failure: bool) -> None:
        """Remove a process that has ended."""
        self._server.call(lambda: self._store.carry_out(self._coordinator.ended(member, is_failure=is_failure)))

    def has_joined(self, member: int) -> bool:
        """Return whether a process takes part in the training."""
        return self._coordinator.is_member(member)

    @override
    def close(self) -> None:
        self._server.close()

"""The server with the coordinator of an elastic training, and with the store through which its ranks connect.

The coordinator forms *quorums*, which are numbered sets of ranks that train together. A rank sends its requests with
:func:`request_quorum`, and the answer arrives when the next quorum starts. The ranks of quorum 5 use keys of the store
that begin with ``quorum 5/``. These keys are removed when quorum 6 starts, or when a rank of quorum 5 is lost.
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
"""The role of the server in its Hello (the identity that it sends in the handshake)."""
NEWCOMERS = "newcomers"
"""The key that is set, with the prefix of the current quorum, when new processes wait to join."""
ENDED = "the training has ended"
"""The key that is set when all members have ended. Ranks that are paused, and therefore in no quorum, wait for it."""
_decode_request = reader(JoinRequest | QuorumReport | LeaveNotice, "a request to the coordinator")
_decode_answer = reader(StartQuorum | RetryJoin | None, "an answer of the coordinator")


def quorum_prefix(quorum: int) -> str:
    return f"quorum {quorum}"


def request_quorum(
    store: NetworkStore, request: JoinRequest | QuorumReport | LeaveNotice, timeout: timedelta
) -> StartQuorum | RetryJoin | None:
    """Send a request to the coordinator, and wait for the answer.

    The answer is None after the end of the training, and for a LeaveNotice. Raises RankLostError if the coordinator
    declared this process lost, and the errors of :meth:`NetworkStore.call`.
    """
    body = msgspec.msgpack.encode(request)
    answer: StartQuorum | RetryJoin | None = _decode_answer(
        store.call(StoreCall.QUORUM, timeout.total_seconds(), body=body)
    )
    return answer


class _CoordinatedStore(ServedStore):
    """The store, the coordinator, and the requests that wait for its answer. Only the event loop's thread uses it."""

    def __init__(self, coordinator: Coordinator, expel: Callable[[int], None], fail: Callable[[str], None]) -> None:
        super().__init__()
        self.coordinator = coordinator
        self._expel, self._fail = expel, fail
        self._waiting: dict[int, tuple[Peer, Header]] = {}
        self._first_usable = 0
        """The lowest quorum number whose keys are still valid. Requests for keys of lower numbers fail."""
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
    """A coordinator and its store. A background thread serves them until :meth:`close`. All methods are thread-safe.

    The thread calls `expel` with the number (incarnation) of a process that was declared lost and must end.
    """

    def __init__(
        self, coordinator: Coordinator, address: Address, token: str, tls: TLS | None, expel: Callable[[int], None]
    ) -> None:
        """Start the server. Raises AddressError if it cannot listen at the address."""
        self.failure: str | None = None
        """The reason for which the training cannot continue; None if it can."""
        self._coordinator = coordinator
        self._store = _CoordinatedStore(coordinator, expel, self._record_failure)
        self._server = StoreServer(address, token, Hello(role=COORDINATOR), tls, store=self._store)
        self.address = self._server.address

    def _record_failure(self, reason: str) -> None:
        self.failure = reason

    def started(self, member: int) -> None:
        """Record that a new process was started, so that the coordinator expects its request."""
        self._server.call(lambda: self._coordinator.started(member))

    def ended(self, member: int, *, is_failure: bool) -> None:
        """Record that a process has ended. It no longer takes part in the training."""
        self._server.call(lambda: self._store.carry_out(self._coordinator.ended(member, is_failure=is_failure)))

    def has_joined(self, member: int) -> bool:
        """Return whether a process that has not ended takes or took part in the training."""
        return self._coordinator.has_joined(member)

    @override
    def close(self) -> None:
        self._server.close()

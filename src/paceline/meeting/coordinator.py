"""The server with the coordinator of an elastic training, and with the store through which its ranks connect.

The coordinator forms *quorums*, which are numbered sets of ranks that train together. A rank sends its requests with
:func:`request_quorum`, and the answer arrives when the next quorum starts. The ranks of quorum 5 use keys of the store
that begin with ``quorum 5/``. These keys are removed when quorum 6 starts, or when a rank of quorum 5 is lost.

The launcher of node 0, or ``paceline coordinator``, owns a :class:`CoordinatorServer`. The launchers of other nodes
report the starts and ends of their ranks through a :class:`~paceline.meeting.coordinator_client.CoordinatorClient`.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import msgspec
from typing_extensions import override

from paceline.closing import Closing
from paceline.errors import PacelineError, RankLostError
from paceline.meeting.network_store import NetworkStore, ServedStore, StoreCall, StoreServer
from paceline.protocol.launchers import (
    LauncherAnswer,
    LauncherEnd,
    LauncherRequest,
    Launchers,
    RankEnd,
    RankStart,
)
from paceline.protocol.own_time import OwnTime
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
NUM_RANKS = "num_ranks"
"""The field of a launcher's Hello with the number of ranks on all nodes; 0 if a rank is its own launcher."""
OPTIONS, TIMEOUT_MS = "options", "timeout_ms"
"""Fields of the Hello of ``paceline coordinator``: the strategy's options, and the time without a request after which a
rank is lost.
"""
NEWCOMERS = "newcomers"
"""The key that is set, with the prefix of the current quorum, when new processes wait to join."""
END = "end"
"""A key that is never set. A request for it fails when the quorum ends."""
ENDED = "the training has ended"
"""The key that is set when all members have ended. Paused ranks, which are in no quorum, check this key."""
_decode_launcher_request = reader(LauncherRequest, "a request of a launcher")
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


class CoordinatedStore(ServedStore):
    """The store, the coordinator, and the ranks' requests without an answer. Only the event loop's thread uses it."""

    def __init__(self, coordinator: Coordinator, launchers: Launchers, expel: Callable[[int], None]) -> None:
        super().__init__()
        self.coordinator = coordinator
        self.launchers = launchers
        self.failure: str | None = None
        self._expel = expel
        self._connections: dict[tuple[int, int], Peer] = {}
        """The newest connection of each launcher, by the launcher's node and number."""
        self._waiting: dict[int, tuple[Peer, Header]] = {}
        self._first_usable = 0
        """The lowest quorum number whose keys are still valid. Requests for keys of lower numbers fail."""
        self._timer: asyncio.TimerHandle | None = None
        self._tick_s = launchers.timeout_s / 8
        self._time = OwnTime(2 * self._tick_s, time.monotonic())
        self._now_s()

    def _now_s(self) -> float:
        self._time.read(time.monotonic())
        return self._time.now_s

    @override
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind == StoreCall.LAUNCHER:
            self._answer_launcher(peer, _decode_launcher_request(body))
            return
        if header.kind != StoreCall.QUORUM:
            super().frame_received(peer, header, meta, body)
            return
        request = _decode_request(body)
        self._waiting[request.member] = (peer, header)
        match request:
            case JoinRequest():
                self.carry_out(self.coordinator.joined(request))
            case QuorumReport():
                self.carry_out(self.coordinator.reported(request, self._now_s()))
            case LeaveNotice():
                self._reply(request.member, None)
                self.carry_out(self.coordinator.left(request))

    @override
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        super().disconnected(peer, reason)
        self._waiting = {member: waiting for member, waiting in self._waiting.items() if waiting[0] is not peer}
        for launcher in [launcher for launcher, newest in self._connections.items() if newest is peer]:
            del self._connections[launcher]
            self.remove_members(self.launchers.disconnected(*launcher))

    def _answer_launcher(self, peer: Peer, request: LauncherRequest) -> None:
        time_s = self._now_s()
        self.launchers.check_size(request.node, peer.hello.extra.get(NUM_RANKS))
        self.remove_members(self.launchers.request_received(request, time_s, peer.hello.name))
        self._connections[request.node, request.launcher] = peer
        member, has_joined, is_newcomer = 0, False, False
        match request:
            case RankStart():
                member = self.launchers.start(request)
                self.coordinator.started(member, time_s)
                is_newcomer = self.coordinator.is_newcomer(member)
            case RankEnd():
                has_joined = self.coordinator.has_joined(request.member)
                self.launchers.ended(request)
                self.carry_out(self.coordinator.ended(request.member, is_failure=request.is_failure))
            case LauncherEnd():
                del self._connections[request.node, request.launcher]
                self.remove_members(self.launchers.launcher_ended(request))
        lost = self.launchers.lost_members(request.node)
        answer = LauncherAnswer(self.failure, lost, member, has_joined, is_newcomer)
        peer.send(*frame_parts(StoreCall.DONE, body=msgspec.msgpack.encode(answer)))
        self._set_timer()

    def remove_members(self, members: Iterable[int]) -> None:
        """Continue without the members of a lost launcher."""
        self.carry_out(self.coordinator.lost(list(members)))

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
                    if not self.launchers.expel(member):
                        self._expel(member)
                case FailTraining(reason=reason):
                    self.failure = reason
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
        deadlines_s = [self.coordinator.deadline_s, self.launchers.deadline_s]
        deadline_s = min((deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None)
        if deadline_s is not None:
            wait_s = min(max(deadline_s - self._now_s(), 0.0), self._tick_s)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._pass_time)

    def _pass_time(self) -> None:
        self.remove_members(self.launchers.time_passed(self._now_s()))
        self.carry_out(self.coordinator.time_passed(self._now_s()))


def _ended(quorum: int) -> PacelineError:
    return RankLostError(f"quorum {quorum} has ended, because a rank was lost or another quorum has started")


class CoordinatorAccess(Closing):
    """A launcher's access to the coordinator, to report the starts and ends of its ranks. Methods are thread-safe."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """The reason for which the training cannot continue; None if it can."""

    @property
    @abstractmethod
    def must_serve(self) -> bool:
        """Whether other launchers still need this process."""

    @abstractmethod
    def started(self, rank: int) -> int | None:
        """Announce a new process of a rank. Return its unique number (incarnation), or None after a failure."""

    @abstractmethod
    def ended(self, member: int, *, is_failure: bool) -> bool:
        """Record that a process has ended. Return whether it took part in the training."""

    @abstractmethod
    def take_notes(self) -> list[str]:
        """Return new notes for the user about other nodes."""


class CoordinatorServer(CoordinatorAccess):
    """A coordinator and its store. A background thread serves them until :meth:`close`.

    The thread calls `expel` with the number (incarnation) of a process of this launcher that was declared lost and must
    end.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        launchers: Launchers,
        address: Address,
        token: str,
        tls: TLS | None,
        expel: Callable[[int], None],
        *,
        extra: Mapping[str, int | str] | None = None,
    ) -> None:
        """Start the server. `extra` are fields of its Hello. Raises AddressError if it cannot listen at the address."""
        self._store = CoordinatedStore(coordinator, launchers, expel)
        hello = Hello(role=COORDINATOR, extra=dict(extra or {}))
        self._server = StoreServer(address, token, hello, tls, store=self._store)
        self.address = self._server.address

    @property
    @override
    def failure(self) -> str | None:
        return self._store.failure

    @property
    @override
    def must_serve(self) -> bool:
        return self._server.call(lambda: self._store.launchers.are_needed)

    @property
    def has_ended(self) -> bool:
        """Whether the training has ended on all ranks, and all launchers have left."""
        store = self._store
        return self._server.call(lambda: store.coordinator.is_over and not store.launchers.are_needed)

    @override
    def started(self, rank: int) -> int:
        def start() -> int:
            member = self._store.launchers.new_member(rank)
            self._store.coordinator.started(member)
            return member

        return self._server.call(start)

    @override
    def ended(self, member: int, *, is_failure: bool) -> bool:
        def end() -> bool:
            has_joined = self._store.coordinator.has_joined(member)
            self._store.carry_out(self._store.coordinator.ended(member, is_failure=is_failure))
            return has_joined

        return self._server.call(end)

    @override
    def take_notes(self) -> list[str]:
        def take() -> list[str]:
            launchers = self._store.launchers
            notes, launchers.notes = launchers.notes, []
            return notes

        return self._server.call(take)

    @override
    def close(self) -> None:
        if self._store.failure is None:
            self._store.failure = f"{self._store.launchers.server} has ended"  # for launchers that still send requests
        self._server.close()

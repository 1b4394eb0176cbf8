"""The access of a launcher on another node, or of a rank, to the coordinator of an elastic training."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec
from typing_extensions import override

from paceline.errors import PacelineError, RankLostError, UsageError
from paceline.meeting.coordinator import COORDINATOR, NUM_RANKS, CoordinatorAccess
from paceline.meeting.network_store import NetworkStore, StoreCall
from paceline.protocol.launchers import (
    LauncherAnswer,
    LauncherEnd,
    LauncherHeartbeat,
    LauncherRequest,
    RankEnd,
    RankStart,
)
from paceline.transport import TLS
from paceline.transport.addresses import Address
from paceline.transport.decoding import reader
from paceline.transport.security.authentication import Hello

_HEARTBEAT_S: Final = 0.5
"""The longest interval of heartbeats."""
_LEAVE_S: Final = 2.0
"""Time limit for the last request."""
_decode_answer = reader(LauncherAnswer, "an answer to a launcher")


class CoordinatorClient(CoordinatorAccess):
    """A connection to the coordinator. A thread sends heartbeats.

    The thread calls `expel` with the number (incarnation) of a process that must end. If the coordinator does not
    answer for `timeout_s` seconds, :attr:`failure` has the reason.
    """

    must_serve = False

    def __init__(
        self,
        address: Address,
        token: str,
        tls: TLS | None,
        expel: Callable[[int], None],
        *,
        node: int | None,
        num_ranks: int,
        timeout_s: float,
        own_name: str = "",
        name: str = "node 0",
    ) -> None:
        """Connect to the coordinator. `num_ranks` is the number of ranks on all nodes.

        A rank that is its own launcher has no `node`. The coordinator's notes contain `own_name`, and the errors of
        this client contain `name`, the coordinator's name. Raises the errors of :meth:`Transport.connect`.
        """
        self._number = secrets.randbits(48)
        self._node = self._number if node is None else node
        self._timeout_s, self._name = timeout_s, name
        self._expel = expel
        self._failure: str | None = None
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        hello = Hello(
            role="launcher",
            rank=node or 0,
            incarnation=self._number,
            name=own_name,
            extra={NUM_RANKS: num_ranks},
            to=COORDINATOR,
        )
        self._store = NetworkStore(address, token, hello, timeout_s=timeout_s, tls=tls)
        self._thread = threading.Thread(target=self._send_heartbeats, name="paceline-launcher", daemon=True)
        self._begin()

    def _begin(self) -> None:
        """Start the thread that sends heartbeats."""
        self._thread.start()

    @property
    @override
    def failure(self) -> str | None:
        return self._failure

    @override
    def started(self, rank: int) -> int | None:
        answer = self._request_start(rank)
        return None if answer is None else answer.member

    def _request_start(self, rank: int | None) -> LauncherAnswer | None:
        return self._request(RankStart(self._node, self._number, next(self._serials), rank))

    @override
    def ended(self, member: int, *, is_failure: bool) -> bool:
        answer = self._request(RankEnd(self._node, self._number, member, is_failure))
        return answer is not None and answer.has_joined

    @override
    def take_notes(self) -> list[str]:
        return []

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(min(_HEARTBEAT_S, self._timeout_s / 4)) and self._failure is None:
            self._request(LauncherHeartbeat(self._node, self._number))
        if self._failure is not None and not self._stop.is_set():
            self._failed(self._failure)

    def _failed(self, reason: str) -> None:
        """Handle a failure, in the heartbeats' thread."""

    def _request(self, request: LauncherRequest) -> LauncherAnswer | None:
        """Return the coordinator's answer; None after a failure or after :meth:`close`."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._failure is None and not self._stop.is_set():
            try:
                return self._call(request, max(deadline_s - time.monotonic(), 0.1))
            except (RankLostError, UsageError) as error:  # the coordinator rejects this launcher
                self._failure = str(error)
            except PacelineError as error:
                is_refused = isinstance(error.__context__, ConnectionRefusedError)  # the coordinator has ended
                if is_refused or time.monotonic() >= deadline_s:
                    self._failure = f"{self._name} does not answer: {error}"
                else:
                    self._stop.wait(_HEARTBEAT_S)
        return None

    def _call(self, request: LauncherRequest, timeout_s: float) -> LauncherAnswer:
        """Send a request; record a failure and end lost processes according to the answer."""
        with self._lock:  # one request at a time uses one connection, whose end is the loss of this launcher
            body = self._store.call(StoreCall.LAUNCHER, timeout_s, body=msgspec.msgpack.encode(request))
            answer: LauncherAnswer = _decode_answer(body)
            self._failure = self._failure or answer.failure
        for member in answer.lost:
            self._expel(member)
        return answer

    @override
    def close(self) -> None:
        """Report that this launcher ends. Its processes must have ended. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._lock.acquire(timeout=_LEAVE_S):  # otherwise the coordinator does not answer
            self._lock.release()
            try:
                self._call(LauncherEnd(self._node, self._number), _LEAVE_S)
            except PacelineError:
                pass  # the coordinator then detects the end of the connection
        self._store.close()
        self._thread.join()

"""Ranks that start without ``paceline run``, for example by torchrun. Each rank is its own launcher.

The variable ``PACELINE_COORDINATOR`` has the address of ``paceline coordinator``. The rank reports its start and its
end. The connection breaks if the process dies, and the heartbeats end if the process is stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import weakref
from typing import Final, NoReturn

from typing_extensions import override

from paceline.environment import Environment, naming
from paceline.errors import PeerError, UsageError
from paceline.meeting.coordinator import OPTIONS, TIMEOUT_MS
from paceline.meeting.coordinator_client import CoordinatorClient
from paceline.meeting.credentials import choose_secret
from paceline.meeting.rendezvous import is_loopback, parse_place
from paceline.transport import TLS
from paceline.transport.addresses import Address
from paceline.transport.backoff import reach

_ATTEMPT_S: Final = 5.0


class OwnLauncher(CoordinatorClient):
    """The connection of a rank to ``paceline coordinator``, from the start of the rank to its end.

    If the coordinator declares the rank lost, or the training cannot continue, the process ends with status 1. The
    system that started the process, such as torchrun, may then start it again.
    """

    def __init__(self, address: Address, token: str, tls: TLS | None) -> None:
        """Connect to the coordinator and report the start of this rank.

        Raises the errors of :meth:`Transport.connect`, UsageError if the coordinator belongs to ``paceline run``, and
        PeerError if the training has failed.
        """
        self.address, self.token = address, token
        super().__init__(
            address,
            token,
            tls,
            self._expelled,
            node=None,
            num_ranks=0,
            timeout_s=_ATTEMPT_S,
            own_name=f"process {os.getpid()} on {socket.gethostname()}",
            name=f"the coordinator at {address.netloc}",
        )

    @override
    def _begin(self) -> None:
        try:
            self._start()
        except BaseException:
            self._store.close()
            raise
        super()._begin()
        atexit.register(self._end_at_exit)
        _open.add(self)

    def _start(self) -> None:
        extra = self._store.peer.extra
        if OPTIONS not in extra:
            raise UsageError(
                f"PACELINE_COORDINATOR={self.address.netloc}: the coordinator of paceline run listens there, which "
                "accepts only its own ranks. Start paceline coordinator, and pass its address"
            )
        self.options = str(extra[OPTIONS])
        """The strategy's options, in the format of ``PACELINE_STRATEGY_OPTIONS``."""
        self._timeout_s = int(extra[TIMEOUT_MS]) / 1000
        answer = self._request_start(None)
        if answer is None or self._failure is not None:
            raise PeerError(f"the training has failed: {self._failure}")
        self.member = answer.member
        """The unique number (incarnation) of this process."""
        self.is_newcomer = answer.is_newcomer

    def _expelled(self, member: int) -> None:
        _end_process("the other ranks continue without this rank, because it did not respond in time")

    @override
    def _failed(self, reason: str) -> None:
        _end_process(reason)

    @override
    def close(self) -> None:
        """Report the end of this rank. The end is a failure if an exception ends the ``with`` block."""
        self._end(sys.exc_info()[1])

    def _end_at_exit(self) -> None:
        self._end(getattr(sys, "last_value", None))

    def _end(self, error: BaseException | None) -> None:
        if self._stop.is_set():
            return
        atexit.unregister(self._end_at_exit)
        is_success = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.ended(self.member, is_failure=not is_success)
        super().close()

    def disown(self) -> None:
        """Send nothing from a forked child process, because the connection belongs to the parent process."""
        self._stop = threading.Event()  # another thread may have held the lock of the event during the fork
        self._stop.set()
        self._store.disown()


def _end_process(reason: str) -> NoReturn:
    print(f"paceline: {reason}. This process ends", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):  # standard output is closed
        sys.stdout.flush()
    os._exit(1)


def coordinator_token(address: Address, variables: Environment) -> str:
    """Return the token of the ranks and of the coordinator at this address. Raises UsageError without a token."""
    return choose_secret(
        variables.token,
        is_local=is_loopback(address.host),
        where=address.netloc,
        runtime_dir=variables.runtime_dir,
    )


def announce_rank(variables: Environment, tls: TLS | None, timeout_s: float) -> OwnLauncher:
    """Report this process as a rank to the coordinator at ``PACELINE_COORDINATOR``. The coordinator may start later.

    Raises UsageError for a wrong address or a missing token, DeadlineError if the coordinator does not answer within
    `timeout_s` seconds, and the errors of :class:`OwnLauncher`.
    """
    assert variables.coordinator is not None
    with naming("PACELINE_COORDINATOR"):
        address = parse_place(variables.coordinator)
    token = coordinator_token(address, variables)
    name = f"the coordinator at {address.netloc} (PACELINE_COORDINATOR)"

    def on_wait() -> None:
        print(f"paceline: waiting up to {timeout_s:g} s for {name}", file=sys.stderr, flush=True)

    return reach(lambda: OwnLauncher(address, token, tls), timeout_s, name=name, on_wait=on_wait)


_open: weakref.WeakSet[OwnLauncher] = weakref.WeakSet()


def close_own_launchers() -> None:
    """Report the end of this process's ranks, in a process that continues. An exception is a failure of the rank."""
    for launcher in list(_open):
        launcher.close()


def _disown() -> None:
    for launcher in list(_open):
        launcher.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)

"""The state that all groups of a program share: the addresses of all ranks, and this rank's node."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from paceline.errors import (
    AddressError,
    CollectiveError,
    ConnectionLostError,
    DeadlineError,
    MismatchError,
    UsageError,
    name_ranks,
)
from paceline.meeting.group_names import EndedError, GroupNames
from paceline.meeting.node import Node, NodeInfo
from paceline.meeting.store import Store, exchange
from paceline.meeting.watching import is_alive
from paceline.transport import TLS

_MAX_CHECKED = 16


class JoinedGroup(Protocol):
    """The methods of a group that the world calls. The world closes all groups at the end."""

    def close(self) -> None:
        """Leave the group. Idempotent."""

    def disown(self) -> None:
        """Make the group unusable in a forked child process, because its connections belong to the parent process."""


class World:
    """All ranks of a program, as one rank uses them."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        token: str,
        host: str = "127.0.0.1",
        tls: TLS | None = None,
        name: str,
        timeout_s: float,
        algorithm: str | None = None,
    ) -> None:
        """Exchange the addresses of all ranks. Raises RankLostError if ranks are missing after the timeout.

        `algorithm` is the collective algorithm that the user selected on this rank. If the ranks' algorithms differ,
        all ranks raise MismatchError.
        """
        if not 0 <= rank < size:
            raise UsageError(f"got rank {rank} of {size}, expected one from 0 to {size - 1}")
        self.store, self.rank, self.size, self.name = store, rank, size, name
        self.group_names = GroupNames(store, rank, name, self.check_alive)
        self._groups: set[JoinedGroup] = set()
        self.is_closed = False
        self.node = Node(token, host=host, tls=tls)
        try:
            own = msgspec.structs.replace(self.node.info, algorithm=algorithm or "").encode()
            encoded = exchange(store, rank, size, own, time.monotonic() + timeout_s, description="the rendezvous")
            self.infos: tuple[NodeInfo, ...] = tuple(NodeInfo.decode(info) for info in encoded)
            self._check_algorithms()
        except BaseException:
            self.node.close()
            raise
        _open_worlds.add(self)

    def _check_algorithms(self) -> None:
        """Raise MismatchError if the ranks' algorithms differ. With different algorithms, ranks would wait forever."""
        sides: dict[str, list[int]] = {}
        for rank, info in enumerate(self.infos):
            sides.setdefault(info.algorithm, []).append(rank)
        if len(sides) > 1:
            demands = "; ".join(
                f"{name_ranks(ranks)} demanded {repr(algorithm) if algorithm else 'none'}"
                for algorithm, ranks in sides.items()
            )
            raise MismatchError(
                f"the ranks disagree about the algorithm: {demands}; set PACELINE_ALGORITHM to one value on all ranks"
            )

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Raise EndedError if some of the ranks have died or left, so that their addresses refuse connections."""
        ended = tuple(rank for rank in ranks[:_MAX_CHECKED] if not self.node.is_listening(self.infos[rank]))
        if ended:
            raise EndedError(f"{name_ranks(ended)} died or left before its group was created", ended)

    @contextlib.contextmanager
    def in_ranks(self, description: str) -> Iterator[None]:
        """Convert errors of the store into errors whose text has the number of the rank that serves the store."""
        try:
            yield
        except (ConnectionLostError, AddressError, DeadlineError) as error:
            server = self.store.server_rank
            if server is None:
                self.check_alive(range(self.size))
                raise CollectiveError(f"{description} could not be created: {error}") from error
            raise EndedError(
                f"rank {server}, which serves the store, died, left or stopped before {description} was created "
                f"({error})",
                (server,),
            ) from error

    def enter(self, group: JoinedGroup) -> None:
        self._groups.add(group)

    def leave(self, group: JoinedGroup) -> None:
        self._groups.discard(group)

    def close(self) -> None:
        """Leave the program. The other ranks detect this by the closed connections. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        _open_worlds.discard(self)
        for group in list(self._groups):
            group.close()
        self.node.close()
        self._clean_up_after_the_dead()
        self.store.close()

    def disown(self) -> None:
        """Forget the store, the node and the groups in a forked child process, because they belong to the parent
        process.
        """
        self.is_closed = True
        for group in self._groups:
            group.disown()

    def _clean_up_after_the_dead(self) -> None:
        for info in self.infos:
            is_local = info.memory_domain == self.node.info.memory_domain and info.endpoint.unix is not None
            if is_local and info.pid != os.getpid() and not is_alive(info.pid):
                assert info.endpoint.unix is not None
                folder = os.path.dirname(info.endpoint.unix.path)
                if os.path.basename(folder).startswith("paceline-"):  # bind_unix() has created this folder
                    with contextlib.suppress(OSError):
                        os.unlink(info.endpoint.unix.path)
                        os.rmdir(folder)


_open_worlds: weakref.WeakSet[World] = weakref.WeakSet()


@atexit.register
def _close_worlds() -> None:
    for world in list(_open_worlds):
        with contextlib.suppress(Exception):
            world.close()


def _disown_worlds() -> None:
    for world in list(_open_worlds):
        world.disown()
    _open_worlds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_worlds)

"""Links between ranks in threads of one process: socket pairs with buffers of any size."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from paceline.collectives.network.mesh import Link, Mesh
from paceline.errors import RankLostError

_T = TypeVar("_T")


class PairLink(Link):
    """One end of a socket pair."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank = rank
        self.socket = connected

    def fileno(self) -> int:
        return self.socket.fileno()

    def send_nowait(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RankLostError(f"rank {self.rank} has closed its link: {error}", (self.rank,)) from None

    def receive_nowait(self, buffer: memoryview) -> int:
        try:
            count = self.socket.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RankLostError(f"rank {self.rank} has closed its link: {error}", (self.rank,)) from None
        if not count:
            raise RankLostError(f"rank {self.rank} has closed its link", (self.rank,))
        return count

    def close(self) -> None:
        self.socket.close()


class PairLinks(Mesh):
    """The links of one rank. A lazy link opens when both ranks have requested it."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.rank = rank
        self.size = size
        self._board = board
        self._pairs: dict[int, PairLink] = {}

    def link(self, rank: int, deadline: float) -> PairLink:
        if rank not in self._pairs:
            self._pairs[rank] = PairLink(rank, self._board.end(self.rank, rank, deadline))
        return self._pairs[rank]

    def connected(self) -> Sequence[PairLink]:
        return list(self._pairs.values())

    def close(self) -> None:
        for link in self._pairs.values():
            link.close()


class _Board:
    """The socket pairs between all ranks."""

    def __init__(self, buffer_bytes: int | None, lazy: bool) -> None:
        self._buffer_bytes = buffer_bytes
        self._lazy = lazy
        self._changed = threading.Condition()
        self._ends: dict[tuple[int, int], socket.socket] = {}
        self._requested: set[tuple[int, int]] = set()

    def end(self, rank: int, other: int, deadline: float) -> socket.socket:
        with self._changed:
            self._requested.add((rank, other))
            self._changed.notify_all()
            if self._lazy and not self._changed.wait_for(
                lambda: (other, rank) in self._requested, deadline - time.monotonic()
            ):
                raise RankLostError(f"rank {other} did not connect", (other,))
            if (rank, other) not in self._ends:
                self._ends[rank, other], self._ends[other, rank] = socket.socketpair()
                for one in (self._ends[rank, other], self._ends[other, rank]):
                    one.setblocking(False)
                    if self._buffer_bytes is not None:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
            return self._ends[rank, other]

    def close(self) -> None:
        for end in self._ends.values():
            end.close()


def make_meshes(size: int, *, buffer_bytes: int | None = None, lazy: bool = False) -> list[PairLinks]:
    """Return the links of each rank, all connected unless ``lazy``. The caller closes them."""
    board = _Board(buffer_bytes, lazy)
    meshes = [PairLinks(rank, size, board) for rank in range(size)]
    if not lazy:
        for mesh in meshes:
            for other in range(size):
                if other != mesh.rank:
                    mesh.link(other, time.monotonic())
    return meshes


@contextmanager
def open_meshes(size: int, *, buffer_bytes: int | None = None, lazy: bool = False) -> Iterator[list[PairLinks]]:
    """Yield the links of `make_meshes`, and close the links at the end."""
    meshes = make_meshes(size, buffer_bytes=buffer_bytes, lazy=lazy)
    try:
        yield meshes
    finally:
        for mesh in meshes:
            mesh.close()
        meshes[0]._board.close()


def in_ranks(work: Callable[[int], _T], ranks: Sequence[int]) -> dict[int, _T | BaseException]:
    """Run ``work(rank)`` for each rank in its own thread; return the results or exceptions."""
    results: dict[int, _T | BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return results

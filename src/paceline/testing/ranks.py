"""Run the ranks of a group as threads of one process, and detect leaked resources."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from typing_extensions import override

from paceline.collectives import Group, MemoryStore, Store, join
from paceline.environment import Timeout, timedelta_of
from paceline.meeting.node import NodeInfo

_T = TypeVar("_T")

_TIMEOUT = timedelta(seconds=30)
_LEAVING_S = 5.0


def run_ranks(
    size: int,
    function: Callable[[Group], _T],
    *,
    hosts: Sequence[int] | None = None,
    within: Timeout = timedelta(seconds=60),
    **join_options: Any,
) -> list[_T]:
    """Run ``function(group)`` on ``size`` ranks, which are threads of this process, and return the results.

    ``hosts`` has the number of each rank's simulated host; ranks of different hosts share no memory and use TCP.
    ``join_options`` are those of :func:`paceline.collectives.join`. Raises AssertionError if ranks raise (the first
    error is the cause) or run longer than ``within`` (the text has their stacks). The text names these ranks.
    """
    store = MemoryStore()
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}
    options = {"token": "a token for tests", "timeout": _TIMEOUT, **join_options}

    def work(rank: int) -> None:
        try:
            own = store if hosts is None else StoreOfOneHost(store, rank, hosts)
            with join(own, rank, size, **options) as group:
                results[rank] = function(group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    within_s = timedelta_of(within).total_seconds()
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    lines = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
    late = [thread for thread in threads if thread.is_alive()]
    lines += [f"{thread.name} has not ended within {within_s:g} s:\n{_stack(thread)}" for thread in late]
    if lines:
        raise AssertionError("\n".join(lines)) from next(iter(errors.values()), None)
    return results


@contextmanager
def nothing_left() -> Iterator[None]:
    """Raise AssertionError if new threads or open files remain after some seconds."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    deadline = time.monotonic() + _LEAVING_S
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    assert not left, f"threads are left: {left}"
    gc.collect()  # the traceback of an error may keep a shared-memory mapping alive
    while (opened := _open_files() - files) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not opened, f"files are left open: {opened}"


def _open_files() -> set[str]:
    found = set()
    folder = Path("/proc/self/fd")
    for number in folder.iterdir() if folder.is_dir() else ():
        try:
            found.add(f"{number.name} {number.readlink()}")
        except OSError:
            pass  # the descriptor with which the directory itself was listed
    return found


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame, 6))


class StoreOfOneHost(Store):
    """A store that simulates hosts: ranks of different hosts share no memory and use no Unix sockets."""

    def __init__(self, store: Store, rank: int, hosts: Sequence[int]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts
        self.server_rank, self.place = store.server_rank, store.place

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        return [self._of_host(key, value) for key, value in zip(keys, self._store.collect(keys, deadline), strict=True)]

    def _of_host(self, key: str, value: bytes | None) -> bytes | None:
        place, _, name = key.rpartition("/")
        if place != "the rendezvous" or value is None:
            return value
        host = self._hosts[int(name.removeprefix("rank "))]
        if host == self._hosts[self._rank]:
            return value
        info = NodeInfo.decode(value)
        endpoint = msgspec.structs.replace(info.endpoint, unix=None)
        return msgspec.structs.replace(info, endpoint=endpoint, memory_domain=f"host {host}").encode()

    @override
    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    @override
    def delete(self, key: str) -> None:
        self._store.delete(key)

    @override
    def close(self) -> None:
        """Do nothing: the wrapped store stays open."""

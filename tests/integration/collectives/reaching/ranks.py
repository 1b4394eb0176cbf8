"""Ranks as threads of one process, and a check for resources that remain at the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from paceline.collectives.network.mesh import Mesh
from paceline.collectives.p2p.point_to_point import PointToPoint
from paceline.meeting.node import Node

_T = TypeVar("_T")
PATIENCE_S = 60.0
TOKEN = "a token for tests"


def soon(seconds: float = PATIENCE_S) -> float:
    """Return a deadline."""
    return time.monotonic() + seconds


def on_ranks(size: int, work: Callable[[int], _T]) -> list[_T]:
    """Run ``work(rank)`` for all ranks concurrently, each in a thread; return the results."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.result(PATIENCE_S) for future in futures]


@contextmanager
def nodes(size: int) -> Iterator[list[Node]]:
    """Yield nodes with one token, and close the nodes at the end."""
    made = [Node(TOKEN) for _ in range(size)]
    try:
        yield made
    finally:
        for node in made:
            node.close()


@contextmanager
def meshes(size: int, group: str = "all") -> Iterator[list[Mesh]]:
    """Yield the links of a group of threads, and close the links at the end."""
    with nodes(size) as made:
        infos = [node.info for node in made]
        links = [Mesh(node, group, rank, infos) for rank, node in enumerate(made)]
        try:
            yield links
        finally:
            for link in links:
                link.close()


@contextmanager
def talkers(size: int, group: str = "all", **options: Any) -> Iterator[list[PointToPoint]]:
    """Yield point-to-point ends for a group of threads, and close the ends at the end."""
    with nodes(size) as made:
        infos = [node.info for node in made]
        ends = [PointToPoint(node, group, rank, infos, **options) for rank, node in enumerate(made)]
        try:
            yield ends
        finally:
            for end in ends:
                end.close()


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if the block leaves threads or file descriptors."""
    threads = set(threading.enumerate())
    descriptors = _descriptors()
    yield
    deadline = soon(5.0)
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        for thread in set(threading.enumerate()) - threads:
            thread.join(0.1)
    assert not set(threading.enumerate()) - threads, "threads are left"
    left = _descriptors() - descriptors
    assert not left, f"descriptors are left: {left}"


def _descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            pass  # the descriptor of listdir itself
    return found

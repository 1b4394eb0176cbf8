"""Waits with a limit, so that a failed test ends by itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LIMIT_S = 60.0


def wait_until(condition: Callable[[], object], otherwise: str = "", timeout_s: float = LIMIT_S) -> None:
    """Wait for a condition; fail with `otherwise` at the timeout."""
    pause_s, deadline = 0.001, time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise or "the condition did not become true"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.02)  # a condition may send requests, or look for processes


def join(thread: threading.Thread, timeout_s: float = LIMIT_S) -> None:
    """Wait for the end of a thread."""
    thread.join(timeout_s)
    assert not thread.is_alive(), f"{thread.name} does not end"


@contextlib.contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[None]:
    """Run a function in a thread during the block, and wait for its end."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    try:
        yield
    finally:
        join(thread)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions concurrently; return their results, or raise the first error."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    if errors:
        raise errors[0]
    return results

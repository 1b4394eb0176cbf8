"""Background threads."""

import threading
from collections.abc import Callable
from typing import Any


def in_thread(
    target: Callable[..., Any], args: tuple[Any, ...] = (), name: str | None = None, daemon: bool = True
) -> threading.Thread:
    """Call a function in a new thread, and return the thread."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread

"""Signals that end this process, as exceptions in its main thread: none of them is lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_AGAIN_S: Final = 0.02


class Terminated(KeyboardInterrupt):
    """This process was told to end by a signal; it ends as after Ctrl-C, with the exit status that shells give."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def raise_on_sigterm() -> None:
    """Have SIGTERM raise Terminated in the main thread, so that ``finally`` and ``with`` do their work.

    So does SIGHUP, by which a terminal that is closed ends its programs, unless it is ignored, as nohup has it. An
    exception of these, or that of Ctrl-C, which is raised where none can be (in a callback of C code, as LLVM makes
    them while it compiles, or while an object is freed), is raised again a moment later.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, _raise)
        sys.unraisablehook = _send_again_or(sys.unraisablehook)


def raise_no_more() -> None:
    """Have the next signal end this process at once, which is about to end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _raise:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def _send_again_or(report: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a hook for exceptions that Python ignores: those of signals are sent again, `report` is told of others."""

    def hook(ignored: Any) -> None:
        error = ignored.exc_value
        if not isinstance(error, KeyboardInterrupt):
            report(ignored)
            return
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        main = threading.main_thread().ident
        assert main is not None
        again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, number))
        again.daemon = True
        again.start()

    return hook

"""Raise signals that end this process as exceptions in the main thread, so that no signal is lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_AGAIN_S: Final = 0.02


class Terminated(KeyboardInterrupt):
    """A signal ended this process. The process ends as after Ctrl-C, with the exit status that shells expect."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def raise_on_sigterm() -> None:
    """Raise Terminated in the main thread at SIGTERM, so that ``finally`` and ``with`` blocks run.

    SIGHUP, which a closing terminal sends, also raises Terminated unless it is ignored (nohup). Python ignores an
    exception raised in a callback of C code (for example LLVM's) or while an object is freed. If Python ignores
    Terminated or Ctrl-C's exception, this process sends the signal to itself again a moment later.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, _raise)
        sys.unraisablehook = _send_again_or(sys.unraisablehook)


def raise_no_more() -> None:
    """Let the next signal end this process immediately, because the process is about to end anyway."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _raise:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def _send_again_or(report: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a hook for ignored exceptions: send signals again, pass other exceptions to `report`."""

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

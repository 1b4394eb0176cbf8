"""SIGINT and SIGTERM end the process even if Python ignores the exception of the signal's handler."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.cli.termination import Terminated, raise_on_sigterm


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Set the handlers of a command, and restore the previous handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before, hook = {number: signal.getsignal(number) for number in numbers}, sys.unraisablehook
    raise_on_sigterm()
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


class _Freed:
    """An object that sends a signal while it is freed."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)


def _in_callback(number: int) -> None:
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("lose", [_in_callback, _Freed])
def test_an_ignored_exception_of_a_signal_is_raised_again(lose: Callable[[int], object], number: int) -> None:
    def signal_and_wait() -> None:
        lose(number)
        time.sleep(30.0)

    with pytest.raises(KeyboardInterrupt) as raised:
        signal_and_wait()
    assert isinstance(raised.value, Terminated) == (number == signal.SIGTERM)


def test_other_ignored_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: seen.append(ignored.exc_value))
    raise_on_sigterm()

    class Failing:
        def __del__(self) -> None:
            raise ValueError("lost")

    Failing()
    assert [str(error) for error in seen] == ["lost"]

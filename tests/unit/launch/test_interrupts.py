"""A signal during work that must not be interrupted raises its error later, at the next check or at the end."""

from __future__ import annotations

import os
import signal

import pytest
from tests.waiting import in_threads

from paceline.training.job_running import DeferredSignals


def interrupt() -> None:
    """Send SIGINT to this process, and wait until Python receives it."""
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_waits_for_the_check() -> None:
    with DeferredSignals() as signals:
        signals.check()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            signals.check()
        signals.check()  # each signal is raised once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_unchecked_signal_is_raised_at_the_end() -> None:
    done = []

    def work() -> None:
        with DeferredSignals():
            interrupt()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_a_second_signal_is_raised_immediately() -> None:
    done = []

    def work() -> None:
        with DeferredSignals():
            interrupt()
            interrupt()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failure_is_not_replaced_by_the_signal() -> None:
    def work() -> None:
        with DeferredSignals():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_signals_without_a_handler_are_not_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with DeferredSignals():
        assert signal.getsignal(signal.SIGTERM) is before


def test_deferred_signals_do_nothing_in_other_threads() -> None:
    def work() -> None:
        with DeferredSignals() as signals:
            signals.check()

    in_threads(work)

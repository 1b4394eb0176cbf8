from __future__ import annotations

import asyncio
import socket

import pytest

from paceline.transport import new_event_loop, spinning
from paceline.transport.spinning import Spinner


def test_spinning_stops_if_it_finds_nothing_and_is_retried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "num_cores", lambda: 2)
    monkeypatch.setattr(spinning, "SPIN_S", 0.0)
    num_polls = 0

    def find_nothing(timeout_ms: int) -> list[int]:
        nonlocal num_polls
        num_polls += 1
        return []

    spinner = Spinner()
    looked = []
    for _ in range(500):
        before = num_polls
        assert spinner.poll(find_nothing) == []
        looked.append(num_polls > before)
    assert [index for index, did in enumerate(looked) if did][:6] == [0, 2, 6, 14, 30, 62]
    assert 8 <= sum(looked) <= 14
    while not spinner.poll(lambda timeout_ms: [1]):
        pass
    assert spinner.poll(lambda timeout_ms: [2]) == [2]  # after one success, the next call spins too


def test_spinning_grows_after_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "num_cores", lambda: 2)
    now_s = answer_s = 0.0
    asleep: list[float | None] = []

    def ready(timeout: float | None) -> list[int]:
        nonlocal now_s
        if timeout != 0:
            asleep.append(timeout)
            now_s = answer_s
        now_s += 1e-6
        return [1] if now_s > answer_s else []

    def took_sleep(after_s: float) -> bool:
        nonlocal answer_s
        answer_s = now_s + after_s
        before = len(asleep)
        assert spinner.wait(ready, 5.0) == [1]
        return len(asleep) > before

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    spinner = Spinner()
    assert not took_sleep(30e-6)
    assert took_sleep(100e-6)  # longer than the first spinning time
    assert not took_sleep(100e-6)
    assert not took_sleep(150e-6)
    assert took_sleep(1e-3)  # much longer than the longest spinning time
    assert took_sleep(30e-6)  # so the next wait does not spin
    assert took_sleep(100e-6)
    assert not took_sleep(100e-6)
    assert asleep == [5.0] * 4


def test_on_one_core_no_thread_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "num_cores", lambda: 1)
    assert Spinner().poll(lambda timeout_ms: [1]) == []


def test_the_event_loop_runs_callbacks_and_sockets() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        loop = new_event_loop()

        async def receive() -> bytes:
            loop.call_later(0.01, right.send, b"late")
            return await asyncio.wait_for(loop.sock_recv(left, 10), 5)

        assert loop.run_until_complete(receive()) == b"late"
        loop.close()

from __future__ import annotations

import asyncio
import socket

import pytest

from paceline.transport import new_event_loop, spinning
from paceline.transport.spinning import Spinner


def test_looking_stops_where_it_does_not_pay_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "num_cores", lambda: 2)
    monkeypatch.setattr(spinning, "SPIN_S", 0.0)
    num_looks = 0

    def find_nothing(timeout_ms: int) -> list[int]:
        nonlocal num_looks
        num_looks += 1
        return []

    spinner = Spinner()
    looked = []
    for _ in range(500):
        before = num_looks
        assert spinner.look(find_nothing) == []
        looked.append(num_looks > before)
    assert [index for index, did in enumerate(looked) if did][:6] == [0, 2, 6, 14, 30, 62]
    assert 8 <= sum(looked) <= 14
    while not spinner.look(lambda timeout_ms: [1]):
        pass
    assert spinner.look(lambda timeout_ms: [2]) == [2]  # it pays again: at once


def test_on_one_core_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "num_cores", lambda: 1)
    assert Spinner().look(lambda timeout_ms: [1]) == []


def test_the_loop_is_a_loop() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        loop = new_event_loop()

        async def receive() -> bytes:
            loop.call_later(0.01, right.send, b"late")
            return await asyncio.wait_for(loop.sock_recv(left, 10), 5)

        assert loop.run_until_complete(receive()) == b"late"
        loop.close()

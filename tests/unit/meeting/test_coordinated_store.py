"""The coordinator's time limits."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import msgspec

from paceline.meeting.coordinator import NUM_RANKS, CoordinatedStore
from paceline.meeting.network_store import StoreCall
from paceline.protocol.launchers import LauncherHeartbeat, Launchers
from paceline.protocol.quorum import Coordinator
from paceline.transport.frames import Header

TIMEOUT_S = 0.4


def test_a_pause_of_the_coordinator_is_not_a_silence_of_the_launchers() -> None:
    async def run() -> tuple[bool, bool]:
        launchers = Launchers(1, timeout_s=TIMEOUT_S, start_by_s=math.inf)
        coordinator = Coordinator(range(1), min_ranks=0, max_ranks=1, report_timeout_s=1.0)
        store = CoordinatedStore(coordinator, launchers, lambda member: None)
        peer: Any = SimpleNamespace(
            hello=SimpleNamespace(extra={NUM_RANKS: 1}, name="node 0"), send=lambda *parts: None
        )
        launchers.new_member(0)
        body = msgspec.msgpack.encode(LauncherHeartbeat(0, 7))
        store.frame_received(peer, Header(kind=StoreCall.LAUNCHER), memoryview(b""), memoryview(body))
        time.sleep(2 * TIMEOUT_S)  # the machine is paused
        await asyncio.sleep(TIMEOUT_S / 8)
        is_needed_after_the_pause = launchers.are_needed
        await asyncio.sleep(2 * TIMEOUT_S)
        return is_needed_after_the_pause, launchers.are_needed

    assert asyncio.run(run()) == (True, False)

"""A process with a blocked event loop sends no heartbeats, even if its threads run."""

from __future__ import annotations

import asyncio
import threading

from tests.waiting import wait_until

from paceline.protocol import Role
from paceline.ps import SchedulerLink, messages
from paceline.ps.loop_watchdog import LoopWatchdog
from paceline.ps.scheduler.link import LinkHooks
from paceline.transport import Hello

from .harness import PATIENCE_S, Cluster


def test_a_blocked_loop_is_reported_once_and_again_when_it_continues() -> None:
    loop, notices = asyncio.new_event_loop(), list[str]()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        watchdog = LoopWatchdog(loop, notices.append)
        watchdog.patience_s = 0.05
        go_on = threading.Event()
        assert watchdog.is_running()
        loop.call_soon_threadsafe(go_on.wait, PATIENCE_S)
        wait_until(lambda: not watchdog.is_running())
        assert not watchdog.is_running()
        assert len(notices) == 1
        assert notices[0].startswith("the event loop was blocked for 0.")
        go_on.set()
        wait_until(watchdog.is_running)
        wait_until(lambda: watchdog.is_running() and len(notices) == 2)
        assert notices[1] == "the event loop continues"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


def test_a_member_with_a_blocked_event_loop_is_declared_dead() -> None:
    with Cluster(heartbeat_timeout_s=1.0) as cluster:
        is_well, expelled = threading.Event(), list[str]()
        is_well.set()

        def receive_notice(notice: object) -> None:
            if isinstance(notice, messages.Expelled):
                expelled.append(notice.reason)

        hello = Hello(role="worker", name="hung")
        link = SchedulerLink(
            cluster.transport, cluster.scheduler_address, hello, hooks=LinkHooks(receive_notice, is_well=is_well.is_set)
        )
        try:
            link.register(messages.Register(node="hung", role=Role.WORKER))
            cluster.served.call(lambda: None)
            assert not expelled
            is_well.clear()
            wait_until(lambda: bool(expelled))
        finally:
            link.close()

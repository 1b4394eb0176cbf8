"""The background thread of ``paceline.horovod``, with one rank."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
from paceline import collectives  # noqa: E402
from paceline.horovod import HorovodInternalError  # noqa: E402
from paceline.horovod.engine import HorovodEngine  # noqa: E402
from paceline.horovod.entries import TensorEntry  # noqa: E402
from paceline.horovod.wakeups import Wakeups  # noqa: E402
from paceline.protocol.negotiation.negotiator import Negotiator  # noqa: E402
from paceline.protocol.negotiation.requests import BARRIER, TensorRequest  # noqa: E402


def test_a_request_after_the_end_of_the_group_fails_as_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elastic training continues after HorovodInternalError only."""
    ended, requested = threading.Event(), threading.Event()
    wait = Wakeups.wait

    def end_group_and_wait(self: Wakeups, timeout: timedelta) -> int:
        group.abort()
        ended.set()
        requested.wait(30.0)
        return wait(self, timeout)

    monkeypatch.setattr(Wakeups, "wait", end_group_and_wait)
    group = collectives.init()
    engine = HorovodEngine(group, Negotiator(0, 1, cache_capacity=8, fusion_threshold_bytes=0), None)
    engine.start()
    assert ended.wait(30.0)
    request = TensorRequest("x", BARRIER)
    entry = TensorEntry(request, torch.empty(0))
    engine.submit({request.key: request}, [entry])
    requested.set()
    with pytest.raises(HorovodInternalError, match="a collective operation failed"):
        engine.wait(entry)
    engine.close()

"""The start of a server, until it is a member."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from paceline.errors import ConnectionLostError, PeerError
from paceline.launch.roles import check_settings, unless_stopped
from paceline.ps import messages

_SETTINGS = messages.ClusterSettings(consistency="eventual", stale="", num_servers=1, num_workers=1)


class Link:
    """A link whose calls fail when it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()

    def call(self) -> str:
        assert self.closed.wait(60)
        raise ConnectionLostError("closed")


def begin(call: Any, *, stops: bool) -> Any:
    async def run() -> Any:
        stop = asyncio.Event()
        if stops:
            stop.set()
        return await unless_stopped(link, stop, call or link.call)

    link: Any = Link()
    found = asyncio.run(run())
    assert link.closed.is_set() == stops
    return found


def test_a_stopping_server_does_not_wait_for_a_reply() -> None:
    assert begin(None, stops=True) is None


def test_replies_and_errors_are_passed_on() -> None:
    assert begin(lambda: 5, stops=False) == 5
    with pytest.raises(PeerError, match="no"):
        begin(lambda: (_ for _ in ()).throw(PeerError("no")), stops=False)


def test_a_server_joins_the_intended_cluster() -> None:
    check_settings(_SETTINGS, msgspec.structs.replace(_SETTINGS, cluster="a", num_servers=2), "there:1")
    with pytest.raises(PeerError, match="there:1 was restarted with other settings"):
        check_settings(_SETTINGS, msgspec.structs.replace(_SETTINGS, replicas=1), "there:1")

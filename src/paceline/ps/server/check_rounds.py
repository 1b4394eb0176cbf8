"""The schedule of a server's digests for its successors, one bucket after the other."""

from __future__ import annotations

import asyncio
import time

from paceline.protocol import ServerCore
from paceline.protocol.buckets import buckets_in
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import CHECK
from paceline.ps.server.chain_links import ChainLinks
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.transport import frame_parts


class CheckRounds:
    """The rounds of one server; `fail` is called with an exception after which it must not continue."""

    def __init__(self, core: ServerCore, links: ChainLinks | None, checks: ReplicaChecks, fail: Fail) -> None:
        self._core = core
        self._links = links
        self._checks = checks
        self._fail = fail
        self._timer: asyncio.TimerHandle | None = None
        self.targets: tuple[int, ...] = ()
        """The servers of the newest view."""

    def begin(self) -> None:
        """Start periodic comparisons."""
        self._later(self._checks.pause_s(None))

    def close(self) -> None:
        """Stop."""
        if self._timer is not None:
            self._timer.cancel()

    def _later(self, pause_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._next)

    @must_succeed
    def _next(self) -> None:
        """Send the next bucket's digest, and schedule the following one."""
        took_s = None
        found = self._checks.next(self._core, self.targets)
        if found is not None:
            began = time.perf_counter()
            self._send(*found)
            took_s = time.perf_counter() - began
        self._later(self._checks.pause_s(took_s))

    def check_all(self) -> int:
        """Send the digests of all buckets; return their number."""
        core = self._core
        found = [(target, bucket) for target in self.targets for bucket in buckets_in(core.checkable(target))]
        return sum(self._send(target, bucket) for target, bucket in found)

    def _send(self, target: int, bucket: int) -> bool:
        peer = None if self._links is None else self._links.peer(target)
        if peer is not None:
            info = self._checks.describe(self._core, bucket)
            peer.send(*frame_parts(CHECK, epoch=self._core.version, meta=messages.encode(info)))
        return peer is not None

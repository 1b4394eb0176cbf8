"""Pushes whose answers a server withholds, since too few replicas have them: each waits as long as its sender does.

The rules are :class:`paceline.protocol.replication.Replication`'s. What a server withholds is applied, here and on all
servers behind; whoever runs the cluster has said (`min_replicas`) that this is not enough. It is the error
NOT_ENOUGH_REPLICAS_AFTER_APPEND of Kafka's ``min.insync.replicas``.
"""

from __future__ import annotations

import asyncio
import time

from paceline.errors import DeadlineError
from paceline.protocol.replication import Replication
from paceline.ps.server.gatekeeper import name_of, timeout_s
from paceline.ps.server.pushes import ChainPush
from paceline.tables.server_tables import ServerTables
from paceline.transport import Peer

_EXPIRY_PERIOD_S = 0.25


class WithheldPushes:
    """The pushes of clients that a server has withheld, until they are released or their deadlines pass."""

    def __init__(self, tables: ServerTables, min_replicas: int) -> None:
        self._tables = tables
        self._min_replicas = min_replicas
        self._deadlines: dict[ChainPush, float] = {}
        self._expiry: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def hold(self, push: ChainPush, rules: Replication) -> None:
        """Refuse a push when its sender's time is over, unless it is released before."""
        if push.peer is None:
            return
        self._deadlines[push] = time.monotonic() + timeout_s(push.peer)
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_PERIOD_S, self._expire, rules)

    def release(self, push: ChainPush) -> None:
        """Forget a push: it is being answered."""
        self._deadlines.pop(push, None)

    def disconnected(self, peer: Peer, rules: Replication) -> None:
        """Forget what came on a connection: nobody hears an answer; who sends it again is withheld one."""
        for push in [push for push in self._deadlines if push.peer is peer]:
            del self._deadlines[push]
            rules.give_up(push)

    def close(self) -> None:
        """Stop the timer."""
        if self._expiry is not None:
            self._expiry.cancel()

    def _expire(self, rules: Replication) -> None:
        self._expiry = None
        now = time.monotonic()
        for push in [push for push, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[push]
            rules.give_up(push)
            if push.peer is not None and push.header is not None:
                push.peer.send_error(push.header, self._too_late(push, push.peer, rules))
        if self._deadlines:
            self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_PERIOD_S, self._expire, rules)

    def _too_late(self, push: ChainPush, peer: Peer, rules: Replication) -> DeadlineError:
        table = self._tables.find(push.pieces[0].table).spec.name
        return DeadlineError(
            f"{name_of(peer)} waited {timeout_s(peer):g} s for the acknowledgement of a push to table {table!r}: "
            f"{self.shortage(rules, push.buckets)}; the push is applied, and lost if server {self._tables.rank} fails "
            "before it has replicas enough"
        )

    def shortage(self, rules: Replication, buckets: int) -> str:
        """Return which bucket has too few replicas, in words; empty if none has."""
        found = rules.shortage(buckets)
        if found is None:
            return ""
        bucket, count = found
        has = {0: "no replica", 1: "1 replica"}.get(count, f"{count} replicas")
        return f"bucket {bucket} has {has}, and the cluster acknowledges with {self._min_replicas} (--min-replicas)"

"""Workers of rpc that are threads of one process, over real sockets."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from paceline.meeting.store import MemoryStore
from paceline.meeting.world import World
from paceline.rpc.agent import Agent
from paceline.rpc.allowed import Allowed
from paceline.rpc.api import meet_by_name
from paceline.rpc.workers import Introduction

TOKEN = "a token for tests only"
TIMEOUT = timedelta(seconds=10)


def make_agents(
    allow: str | Sequence[str],
    names: Sequence[str],
    *,
    tokens: Sequence[str] = (),
    pickle: bool = False,
    num_threads: int = 8,
) -> list[Agent]:
    """Return one agent per name.

    All agents permit the functions of `allow`. `tokens` has one token per agent, if they differ.
    """
    store = MemoryStore()
    allowed = [allow] if isinstance(allow, str) else allow

    def make(rank: int) -> Agent:
        token = tokens[rank] if tokens else TOKEN
        world = World(store, rank, len(names), token=token, name="rpc", timeout_s=10)
        try:
            own = Introduction(names[rank], pickle)
            agent = meet_by_name(world, token, own, Allowed(allowed), TIMEOUT, 10.0, num_threads)
        except BaseException:
            world.close()
            raise
        agent.start()
        return agent

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(make, range(len(names))))

"""Check that the hosts of a program can connect to one another, before all ranks connect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from paceline.errors import AddressError, CollectiveError, DeadlineError, RankLostError, name_ranks
from paceline.meeting.node import NodeInfo
from paceline.meeting.store import PrefixStore, await_all
from paceline.meeting.world import World
from paceline.transport import read_meta
from paceline.transport.client import open_socket, shut

_CONNECT_S: Final = 5.0
_MAX_THREADS: Final = 32
_MAX_PAIRS: Final = 8
"""The largest number of pairs of hosts in an error message."""
_VERDICT: Final = "verdict"


class _Unreachable(msgspec.Struct, frozen=True, array_like=True):
    """A host to which the sender cannot connect. `rank` is the first rank on this host."""

    rank: int
    error: str


def check_hosts(world: World, timeout_s: float) -> None:
    """Connect the first rank of each host to the first rank of each other host.

    Raises CollectiveError on every rank if hosts cannot reach one another, and RankLostError if ranks die during the
    check.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, info in enumerate(world.infos):
        ranks_of.setdefault(info.endpoint.host, []).append(rank)
    hosts = {ranks[0]: ranks for ranks in ranks_of.values()}
    if len(hosts) == 1:
        return
    deadline = time.monotonic() + timeout_s
    store = PrefixStore(world.store, "connections between hosts")
    if world.rank in hosts:
        unreachable = _find_unreachable(world, [rank for rank in hosts if rank != world.rank])
        store.set(f"{world.rank}", msgspec.msgpack.encode(unreachable))
    if world.rank == 0:
        found = _await(world, store, {rank: f"{rank}" for rank in hosts}, deadline)
        kind, name = tuple[_Unreachable, ...], "a report on connections between hosts"
        reports = {rank: read_meta(found[rank], kind, name) for rank in hosts}
        store.set(_VERDICT, _describe(world.infos, hosts, reports).encode())
    verdict = _await(world, store, {0: _VERDICT}, deadline)[0].decode()
    if verdict:
        raise CollectiveError(verdict)


def _find_unreachable(world: World, ranks: Sequence[int]) -> list[_Unreachable]:
    def error_of(rank: int) -> str | None:
        try:
            shut(open_socket(world.infos[rank].endpoint.tcp, _CONNECT_S))
        except (AddressError, DeadlineError) as error:
            return str(error)
        return None

    with ThreadPoolExecutor(min(len(ranks), _MAX_THREADS), thread_name_prefix="paceline-hosts") as pool:
        errors = zip(ranks, pool.map(error_of, ranks), strict=True)
        return [_Unreachable(rank, error) for rank, error in errors if error is not None]


def _await(world: World, store: PrefixStore, keys: dict[int, str], deadline: float) -> dict[int, bytes]:
    found, missing = await_all(store, keys, deadline, world.check_alive)
    if missing:
        raise RankLostError(f"{name_ranks(missing)} did not report on connections between hosts in time", missing)
    return found


def _describe(
    infos: Sequence[NodeInfo], hosts: dict[int, list[int]], reports: dict[int, tuple[_Unreachable, ...]]
) -> str:
    """Return an error message with the pairs of hosts that cannot connect; empty if there are none."""

    def name(rank: int) -> str:
        return f"{infos[rank].endpoint.tcp.host} ({name_ranks(hosts[rank])})"

    pairs = [
        f"{name(rank)} cannot connect to {name(other.rank)}: {other.error}"
        for rank, unreachable in reports.items()
        for other in unreachable
    ]
    if not pairs:
        return ""
    shown = "; ".join(pairs[:_MAX_PAIRS])
    more = f"; and {len(pairs) - _MAX_PAIRS} other pairs" if len(pairs) > _MAX_PAIRS else ""
    return f"hosts cannot reach one another: {shown}{more}. Check the firewalls and routes between these hosts"

"""Create the group of all ranks of a program."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np

from paceline.collectives.group import Group
from paceline.collectives.tuner import check_algorithm
from paceline.environment import Timeout, environment, naming, timedelta_of
from paceline.meeting.reachability import check_hosts
from paceline.meeting.rendezvous import rendezvous
from paceline.meeting.store import MemoryStore, Store
from paceline.meeting.world import World
from paceline.observe import recording
from paceline.transport import TLS, make_token

DEFAULT_TIMEOUT = timedelta(minutes=5)


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    address: str | None = None,
    token: str | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    algorithm: str | None = None,
    tls: TLS | None = None,
) -> Group:
    """Connect the ranks of this program and return the group of all ranks.

    By default, `rank`, `world_size` and `address` (``host:port``) come from the environment variables that PyTorch's
    launchers set: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. `token` is a secret that all ranks
    share (default: ``PACELINE_TOKEN``). Ranks on several hosts need a token. The default of `algorithm` is
    ``PACELINE_ALGORITHM``. `timeout`, a timedelta or a number of seconds, limits the time until all ranks are
    connected, and every later call. `tls` encrypts all TCP traffic (default: ``PACELINE_TLS_CERT``,
    ``PACELINE_TLS_KEY`` and ``PACELINE_TLS_CA``).

    Raises UsageError for invalid arguments, AddressError if the port is in use, AuthenticationError if another rank has
    a different token, DeadlineError if rank 0 does not answer, RankLostError if ranks are missing, MismatchError if the
    ranks' algorithms differ, and CollectiveError if hosts cannot reach one another.
    """
    timeout = timedelta_of(timeout)
    variables = environment()
    with naming(None if algorithm else "PACELINE_ALGORITHM"):
        check_algorithm(algorithm or variables.algorithm)
    tls = tls or TLS.of_environment(variables)
    recording.start(variables, rank=rank)
    meeting = rendezvous(rank, world_size, address, token, timeout.total_seconds(), variables=variables, tls=tls)
    try:
        return join(
            meeting.store,
            meeting.rank,
            meeting.world_size,
            token=meeting.token,
            host=meeting.host,
            tls=tls,
            timeout=timeout,
            algorithm=algorithm or variables.algorithm,
            checks_hosts=True,
        )
    except BaseException:
        meeting.close()
        raise


def join(
    store: Store,
    rank: int,
    size: int,
    *,
    token: str,
    host: str = "127.0.0.1",
    tls: TLS | None = None,
    name: str = "world",
    timeout: timedelta = DEFAULT_TIMEOUT,
    algorithm: str | None = None,
    checks_hosts: bool = False,
) -> Group:
    """Connect ranks that already share a rendezvous store, and return the group of all ranks.

    With `checks_hosts`, it also raises CollectiveError if hosts cannot reach one another.
    """
    check_algorithm(algorithm)
    timeout_s = timeout.total_seconds()
    world = World(
        store, rank, size, token=token, host=host, tls=tls, name=name, timeout_s=timeout_s, algorithm=algorithm
    )
    try:
        if checks_hosts:
            check_hosts(world, timeout_s)
        group = Group(world, range(size), name, timeout=timeout, algorithm=algorithm)
    except BaseException:
        world.close()
        raise
    group._owns_world = True
    return group


def load_kernels() -> None:
    """Load the compiled kernels by running a group of two ranks, so that the first real calls do not wait for this."""
    store, token = MemoryStore(), make_token()

    def work(rank: int) -> None:
        with join(store, rank, 2, token=token) as group:
            for dtype in (np.float32, np.float64):
                group.all_reduce(np.ones(1, dtype), "max")
            group.broadcast(np.ones(1, np.float32))

    other = threading.Thread(target=work, args=(1,), daemon=True)
    other.start()
    work(0)
    other.join()

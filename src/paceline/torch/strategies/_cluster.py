"""The parameter servers of a training, as its strategy meets them."""

from __future__ import annotations

from datetime import timedelta

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.ps import Client
from paceline.transport import SocketTransport

_TIMEOUT = timedelta(minutes=1)


def connect_workers(name: str, rank: int, timeout: timedelta = _TIMEOUT) -> Client:
    """Return a client of the cluster that the environment names, as worker `rank`; answers come within `timeout`.

    Raises UsageError if the environment of strategy `name` has no parameter servers.
    """
    told = environment()
    if told.scheduler is None or told.token is None:
        missing = "PACELINE_SCHEDULER" if told.scheduler is None else "PACELINE_TOKEN"
        raise UsageError(
            f"rank {rank}: strategy {name} keeps parameters on servers, and the environment names none ({missing} is "
            f"not set): start the program with `paceline run --strategy {name} --servers 1 SCRIPT`"
        )
    return Client(SocketTransport(told.token), told.scheduler, rank=rank, timeout_s=timeout.total_seconds())

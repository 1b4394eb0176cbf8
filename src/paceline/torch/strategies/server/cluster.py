"""The parameter servers of a training, as its strategy meets them."""

from __future__ import annotations

import weakref
from datetime import timedelta

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.protocol import Consistency
from paceline.ps import Client
from paceline.transport import TLS, SocketTransport

_TIMEOUT = timedelta(minutes=1)
_clients: weakref.WeakSet[Client] = weakref.WeakSet()
"""Those of this process's strategies."""


def check_is_first(name: str) -> None:
    """Raise UsageError if this process, one rank of a launcher's, has a strategy with servers that is open."""
    if environment().rank is not None and any(not client.servers.is_closed for client in _clients):
        raise UsageError(
            f"strategy {name}: this process has a strategy with servers already, and is one worker of them, which "
            "trains one model: for several models start the program with `paceline run --strategy all-reduce`, and "
            "make a strategy for each"
        )


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
    tls = TLS.of_files(told.tls_cert, told.tls_key, told.tls_ca)
    client = Client.connect(
        SocketTransport(told.token, tls=tls), told.scheduler, rank=rank, timeout_s=timeout.total_seconds()
    )
    _clients.add(client)
    return client


def check_cluster(
    client: Client, name: str, consistency: Consistency | None, replicas: int | None, min_replicas: int | None = None
) -> None:
    """Raise UsageError unless the servers are as strategy `name` was told that they are; None: however they are.

    They may have more `replicas` and `min_replicas`. How sequential consistency joins the ranks' gradients is left
    aside.
    """
    for option, value in (("replicas", replicas), ("min_replicas", min_replicas)):
        if value is not None and value < 0:
            raise UsageError(f"rank {client.rank}: strategy {name} was made with {option}={value}: expected 0 or more")
    there, has = client.settings, client.consistency
    is_other = consistency is not None and (type(consistency), consistency.tau) != (type(has), has.tau)
    if not is_other and (replicas or 0) <= there.replicas and (min_replicas or 0) <= there.min_replicas:
        return
    given = {"consistency": consistency, "replicas": replicas, "min_replicas": min_replicas}
    told = ", ".join(f"{option}={value}" for option, value in given.items() if value is not None)
    needed = max(there.min_replicas, min_replicas or 0)
    copies = max(there.replicas, replicas or 0, needed)
    options = f"--servers {max(there.num_servers, copies + 1)}" + (f" --replicas {copies}" if copies else "")
    options += f" --min-replicas {needed}" if needed else ""
    options += f" --consistency {consistency or has}"
    has_min = f", min_replicas={there.min_replicas}" if needed else ""
    raise UsageError(
        f"rank {client.rank}: strategy {name} was made with {told}, and its servers were started with "
        f"consistency={has}, replicas={there.replicas}{has_min}: start the program with `paceline run --strategy "
        f"{name} {options} SCRIPT`, or leave {' and '.join(o for o, value in given.items() if value is not None)} out"
    )

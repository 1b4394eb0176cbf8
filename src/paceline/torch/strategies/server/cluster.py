"""Connect a strategy to the training's parameter servers."""

from __future__ import annotations

import weakref
from datetime import timedelta

from paceline.environment import environment, naming
from paceline.errors import UsageError
from paceline.protocol import Consistency
from paceline.ps import Client
from paceline.transport import TLS, Address, SocketTransport
from paceline.transport.security.authentication import check_token

_TIMEOUT = timedelta(minutes=1)
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def check_is_first(name: str) -> None:
    """Raise UsageError if this process is a launcher's rank and already has an open strategy with servers."""
    if environment().rank is not None and open_clients():
        raise UsageError(
            f"strategy {name}: this process already has a strategy with servers, which trains one model: for several "
            "models start the program with `paceline run --strategy all-reduce`, and create a strategy for each"
        )


def open_clients() -> list[Client]:
    """Return the connections of this process's strategies to their servers."""
    return [client for client in _clients if not client.servers.is_closed]


def connect_workers(name: str, rank: int | None, timeout: timedelta = _TIMEOUT) -> Client:
    """Connect as worker `rank` to the cluster in the environment. Raises UsageError without a cluster."""
    settings = environment()
    if settings.scheduler is None or settings.token is None:
        missing = "PACELINE_SCHEDULER" if settings.scheduler is None else "PACELINE_TOKEN"
        raise UsageError(
            f"rank {rank or 0}: strategy {name} stores parameters on servers, but the environment names none "
            f"({missing} is not set): start the program with `paceline run --strategy {name} --servers 1 SCRIPT`"
        )
    tls = TLS.of_environment(settings)
    check_token(settings.token, "PACELINE_TOKEN")
    with naming("PACELINE_SCHEDULER"):
        Address.parse(settings.scheduler)
    client = Client.connect(
        SocketTransport(settings.token, tls=tls), settings.scheduler, rank=rank, timeout_s=timeout.total_seconds()
    )
    _clients.add(client)
    return client


def check_cluster(
    client: Client, name: str, consistency: Consistency | None, replicas: int | None, min_replicas: int | None = None
) -> None:
    """Raise UsageError unless the servers have the requested settings (or more replicas). None accepts any value."""
    for option, value in (("replicas", replicas), ("min_replicas", min_replicas)):
        if value is not None and value < 0:
            raise UsageError(
                f"rank {client.rank}: strategy {name} was created with {option}={value}: expected 0 or more"
            )
    actual, has = client.settings, client.consistency
    is_other = consistency is not None and (type(consistency), consistency.tau) != (type(has), has.tau)
    if not is_other and (replicas or 0) <= actual.replicas and (min_replicas or 0) <= actual.min_replicas:
        return
    given = {"consistency": consistency, "replicas": replicas, "min_replicas": min_replicas}
    requested = ", ".join(f"{option}={value}" for option, value in given.items() if value is not None)
    needed = max(actual.min_replicas, min_replicas or 0)
    copies = max(actual.replicas, replicas or 0, needed)
    options = f"--servers {max(actual.num_servers, copies + 1)}" + (f" --replicas {copies}" if copies else "")
    options += f" --min-replicas {needed}" if needed else ""
    options += f" --consistency {consistency or has}"
    has_min = f", min_replicas={actual.min_replicas}" if needed else ""
    raise UsageError(
        f"rank {client.rank}: strategy {name} was created with {requested}, but its servers were started with "
        f"consistency={has}, replicas={actual.replicas}{has_min}: start the program with `paceline run --strategy "
        f"{name} {options} SCRIPT`, or leave {' and '.join(o for o, value in given.items() if value is not None)} out"
    )

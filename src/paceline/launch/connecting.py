"""Joining a cluster that runs, from a program of one's own."""

from __future__ import annotations

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.ps import Client
from paceline.transport import TLS, SocketTransport

from .kernels import prepare_kernels


def connect(
    scheduler: str | None = None,
    *,
    token: str | None = None,
    tls: TLS | None = None,
    observer: bool = False,
    rank: int | None = None,
    timeout_s: float = 60.0,
) -> Client:
    """Join the cluster whose scheduler listens at ``host:port``; close the client, or use it as a context manager.

    Without `scheduler` and `token` they are taken from PACELINE_SCHEDULER and PACELINE_TOKEN; without `tls` it is taken
    from PACELINE_TLS_CERT, PACELINE_TLS_KEY and PACELINE_TLS_CA. An `observer` reads and writes outside the iterations;
    a worker takes the next free rank, or `rank`. Raises UsageError if it is not said where the cluster is, AddressError
    if nobody listens there, AuthenticationError for a wrong token.
    """
    told = environment()
    scheduler, token = scheduler or told.scheduler, token or told.token
    if not scheduler or not token:
        raise UsageError(
            "which cluster? pass its scheduler's address and its token, or set PACELINE_SCHEDULER and PACELINE_TOKEN"
        )
    tls = tls or TLS.of_files(told.tls_cert, told.tls_key, told.tls_ca)
    prepare_kernels()
    return Client.connect(SocketTransport(token, tls=tls), scheduler, observer=observer, rank=rank, timeout_s=timeout_s)

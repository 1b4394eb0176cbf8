"""Join a running cluster from your own program."""

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

    The defaults of `scheduler`, `token` and `tls` are the variables PACELINE_SCHEDULER, PACELINE_TOKEN, and
    PACELINE_TLS_CERT, PACELINE_TLS_KEY and PACELINE_TLS_CA. An `observer` reads and writes outside the iterations. A
    worker gets `rank`, or the next free one. Raises UsageError without an address or token, AddressError if no
    scheduler listens there, AuthenticationError for a wrong token.
    """
    settings = environment()
    scheduler, token = scheduler or settings.scheduler, token or settings.token
    if not scheduler or not token:
        raise UsageError("no scheduler or no token: pass both, or set PACELINE_SCHEDULER and PACELINE_TOKEN")
    tls = tls or TLS.of_files(settings.tls_cert, settings.tls_key, settings.tls_ca)
    prepare_kernels()
    return Client.connect(SocketTransport(token, tls=tls), scheduler, observer=observer, rank=rank, timeout_s=timeout_s)

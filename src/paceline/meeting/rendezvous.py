"""Rendezvous: the ranks of a program meet in a store, which rank 0 serves at a known address.

The address is ``MASTER_ADDR:MASTER_PORT``. Under mpirun and Slurm, :func:`default_place` computes a default address.
Under torchrun this port is in use, because torchrun's agent serves PyTorch's own store there
(``TORCHELASTIC_USE_AGENT_STORE``). In this case rank 0 uses the first free port of the next eight. The other ranks try
these ports in turn, until a store of this run answers. ``TORCHELASTIC_RUN_ID`` and the number of restarts identify a
run.

All ranks need one token (``PACELINE_TOKEN``). If all ranks are on one machine, the token is optional: see
:mod:`paceline.meeting.credentials`.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.environment import Environment, environment, naming
from paceline.errors import (
    AddressError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    PeerError,
    ProtocolError,
    UsageError,
)
from paceline.meeting.credentials import choose_secret
from paceline.meeting.network_store import NetworkStore, StoreServer
from paceline.meeting.store import MemoryStore, Store
from paceline.transport.addresses import LOOPBACK, Address, announced_host
from paceline.transport.backoff import Backoff
from paceline.transport.security.authentication import Hello, make_token
from paceline.transport.tls.contexts import TLS

_NUM_AGENT_PORTS = 8
_ATTEMPT_S = 5.0
_SHORT_ATTEMPT_S = 1.0
"""The timeout of an attempt to connect if there are several addresses. Another program at an address may be silent."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # the range of default ports, below the ports that systems assign to clients


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The result of the rendezvous for one rank: its rank, the size of the program, the store and the token."""

    store: Store
    rank: int
    world_size: int
    local_rank: int | None = None
    """The number of this process among the ranks of this machine; None if the launcher does not set it."""
    local_world_size: int | None = None
    address: Address | None = None
    """The address of the store; None if the program has one rank."""
    token: str = field(repr=False)
    host: str = LOOPBACK
    """The address of this machine that other ranks use."""

    def close(self) -> None:
        """Close the store. Rank 0 first waits up to two seconds for the other ranks to disconnect. Idempotent."""
        self.store.close()


def rendezvous(
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    token: str | None = None,
    timeout_s: float = 300.0,
    *,
    variables: Environment | None = None,
    tls: TLS | None = None,
) -> Meeting:
    """Create the store of this program on rank 0, or connect to it on the other ranks.

    Missing arguments come from environment variables (``variables``). Rank 0 serves the store at ``address``
    (``host:port``). The other ranks retry for ``timeout_s`` seconds, so the ranks may start in any order. The function
    does not wait for all ranks. :func:`.store.exchange` waits for them.

    Raises UsageError if numbers are invalid, the address or token is missing, or two programs use one address;
    AddressError if rank 0 cannot listen there; AuthenticationError if the tokens differ; DeadlineError if rank 0 does
    not answer in time; and ProtocolError if another program answers.
    """
    variables = environment() if variables is None else variables
    rank, world_size = find_rank(variables, rank, world_size)
    if world_size == 1:
        own = token or variables.token or make_token()
        return Meeting(store=MemoryStore(), rank=0, world_size=1, local_rank=0, local_world_size=1, token=own)
    places = _places(address, world_size, variables)
    token = choose_secret(
        token or variables.token,
        is_local=is_loopback(places[0].host) or variables.local_world_size == world_size,
        where=places[0].netloc,
        runtime_dir=variables.runtime_dir,
    )
    hello = Hello(role="rank", rank=rank, extra={"world_size": world_size, "run": variables.run_id or ""})
    if rank == 0:
        server = _serve(places, token, hello, tls)
        try:
            everywhere = LOOPBACK if tls is None else own_host(places[0].host)  # the host in the certificate
            reached = Address("tcp", everywhere if server.is_everywhere else server.address.host, server.address.port)
            store = NetworkStore(reached, token, hello, timeout_s=timeout_s, server=server, answer_s=timeout_s, tls=tls)
        except BaseException:
            server.close()
            raise
    else:
        store = _find(places, token, hello, timeout_s, tls)
    try:
        _check_in(store, rank, world_size)
    except BaseException:
        store.close()
        raise
    return Meeting(
        store=store,
        rank=rank,
        world_size=world_size,
        local_rank=variables.local_rank,
        local_world_size=variables.local_world_size,
        address=Address("tcp", places[0].host, store.address.port),
        token=token,
        host=own_host(places[0].host),
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or ``localhost``. Other host names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_host(rendezvous_host: str) -> str:
    """Return the address of this machine on the route to the rendezvous. Other ranks connect to this address."""
    if is_loopback(rendezvous_host):
        return "::1" if ":" in rendezvous_host else LOOPBACK
    try:
        family, _, _, _, place = socket.getaddrinfo(rendezvous_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing, but the system chooses a route and a local address
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"the rendezvous host {rendezvous_host!r} is unknown or unreachable ({error}); check MASTER_ADDR"
        ) from None
    # Debian maps a machine's own name to 127.0.1.1, which other machines cannot use.
    return announced_host("0.0.0.0") if is_loopback(found) else found


def find_rank(variables: Environment, rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return the rank and the world size: the given numbers, else the launcher's. Raises UsageError if one is missing.

    Without both numbers, this process is the only rank.
    """
    rank = variables.rank if rank is None else rank
    world_size = variables.world_size if world_size is None else world_size
    if rank is None and world_size in (None, 1):
        return 0, 1
    if rank is None or world_size is None:
        given = f"world size is {world_size} and the rank" if rank is None else f"rank is {rank} and the world size"
        raise UsageError(f"the {given} is missing. Pass both, or set both RANK and WORLD_SIZE, as torchrun does")
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"got rank {rank} of {world_size}, expected a rank from 0 to the world size - 1")
    return rank, world_size


def _places(address: str | None, world_size: int, variables: Environment) -> list[Address]:
    if address is not None:
        return [parse_place(address)]
    place = default_place(world_size, variables)
    if not variables.has_agent_store:
        return [place]
    return [Address("tcp", place.host, place.port + shift) for shift in range(1, _NUM_AGENT_PORTS + 1)]


def parse_place(text: str) -> Address:
    """Parse the address at which processes meet. Raises AddressError or UsageError."""
    place = Address.parse(text)
    if place.scheme != "tcp" or not place.port:
        raise UsageError(f"got {text!r}, expected host:port with a port from 1 up")
    return place


def default_place(world_size: int, variables: Environment) -> Address:
    """Return the address at which the ranks meet, ``MASTER_ADDR:MASTER_PORT``. Raises UsageError if it is unknown.

    If all ranks are on this machine, the default host is the loopback address. Under mpirun and Slurm, the default port
    is computed from the id of the job.
    """
    host, port = variables.master_addr, variables.master_port
    if host is None and variables.local_world_size == world_size:
        host = LOOPBACK
    if port is None and variables.job:
        port = port_of_job(variables.job)
    if host is None or not port:
        missing = " and ".join(
            name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port or None)) if value is None
        )
        raise UsageError(
            f"rank {variables.rank} of {world_size}: the launcher set no address for the ranks to meet: set {missing}, "
            "the same on every rank (the host of rank 0 and a free port on it), or pass the address as host:port"
        )
    with naming("MASTER_ADDR"):
        return Address("tcp", host, port)


def port_of_job(job: str) -> int:
    """Return the default port at which the ranks of a job meet. It is computed from the job's id."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


class _Server(StoreServer):
    """The server of the store. `is_everywhere` is true if the server listens on every address of this machine."""

    def __init__(self, place: Address, token: str, hello: Hello, tls: TLS | None) -> None:
        # If the host name is not an address of this machine, or is a loopback address here, the other ranks connect to
        # another address of this machine. So the server must listen on all its addresses.
        self.is_everywhere = not is_loopback(place.host) and not _is_own(place.host)
        super().__init__(Address("tcp", "0.0.0.0", place.port) if self.is_everywhere else place, token, hello, tls)


def _is_own(host: str) -> bool:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
            return not is_loopback(str(place[0]))
    except OSError:
        return False


def _serve(places: Sequence[Address], token: str, hello: Hello, tls: TLS | None) -> _Server:
    for place in places:
        try:
            return _Server(place, token, hello, tls)
        except AddressError as error:
            if not _is_in_use(error):
                raise AddressError(f"rank 0 cannot serve the rendezvous: {error}") from None
    if len(places) > 1:
        raise AddressError(
            f"rank 0 cannot serve the rendezvous: torchrun's agent uses MASTER_PORT, and all ports from "
            f"{places[0].port} to {places[-1].port} of {places[0].host} are in use; pass torchrun another --master-port"
        )
    _check_for_another_program(places[0], token, hello, tls)
    raise AddressError(
        f"rank 0 cannot serve the rendezvous at {places[0].netloc}: the port is in use by another program; choose "
        "another MASTER_PORT, the same on every rank"
    )


def _check_for_another_program(place: Address, token: str, hello: Hello, tls: TLS | None) -> None:
    """Raise UsageError if the rank 0 of another Paceline program serves its store at this address."""
    try:
        other = NetworkStore(place, token, hello, timeout_s=1.0, tls=tls)
    except (PeerError, AddressError):
        return
    try:
        _check_in(other, hello.rank, int(hello.extra["world_size"]))
    finally:
        other.close()


def _is_in_use(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE


def _find(places: Sequence[Address], token: str, hello: Hello, timeout_s: float, tls: TLS | None) -> NetworkStore:
    start = time.monotonic()
    failure: Exception | None = None
    attempt_s = _ATTEMPT_S if len(places) == 1 else _SHORT_ATTEMPT_S
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, spread=0.5)
    while True:
        for place in places:
            left = start + timeout_s - time.monotonic()
            try:
                connect_s = max(min(left, attempt_s), 0.01)
                store = NetworkStore(place, token, hello, timeout_s=connect_s, answer_s=timeout_s, tls=tls)
            except (AddressError, ConnectionLostError, DeadlineError) as error:
                failure = failure if isinstance(error, AddressError) and failure is not None else error
            except AuthenticationError as error:
                if len(places) == 1:
                    raise
                failure = error
            except ProtocolError:
                if len(places) == 1:
                    raise ProtocolError(
                        f"the program that listens at {place.netloc} is not a Paceline rendezvous; choose another "
                        "MASTER_PORT, the same on every rank"
                    ) from None
            else:
                if len(places) == 1 or store.peer.extra.get("run") == hello.extra["run"]:
                    return store
                store.close()
        pause_s = backoff.next_s()
        if time.monotonic() - start + pause_s > timeout_s:
            raise _not_served(places, timeout_s, failure)
        time.sleep(pause_s)


def _not_served(places: Sequence[Address], timeout_s: float, failure: Exception | None) -> Exception:
    where = places[0].netloc if len(places) == 1 else f"{places[0].netloc} to {places[-1].port}"
    if isinstance(failure, AuthenticationError):
        return failure
    return DeadlineError(
        f"rank 0 has not served the rendezvous at {where} within {timeout_s:g} s; check that it was started, and that "
        f"MASTER_ADDR and MASTER_PORT are the same on every rank (last: {failure})"
    )


def _check_in(store: NetworkStore, rank: int, world_size: int) -> None:
    where = store.address.netloc
    other_size = store.peer.extra.get("world_size")
    if other_size != world_size:
        raise UsageError(
            f"this program has {world_size} ranks, but the program at {where} has {other_size}: two programs use one "
            "rendezvous; set another MASTER_PORT for one of the programs"
        )
    try:
        store.set(f"rank {rank}", secrets.token_bytes(16))
    except UsageError:
        raise UsageError(
            f"rank {rank} of {world_size} is registered already: this process has joined before (create one strategy, "
            f"or group of all ranks, and keep it), or two programs use the rendezvous {where}; set another MASTER_PORT "
            "for one of the programs"
        ) from None

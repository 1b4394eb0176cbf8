"""Serve the coordinator of an elastic training whose ranks start without ``paceline run``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from paceline.environment import environment
from paceline.errors import PeerError, UsageError
from paceline.launch.run.elastic import REPORT_TIMEOUT_S
from paceline.meeting.coordinator import OPTIONS, TIMEOUT_MS, CoordinatorServer
from paceline.meeting.own_launcher import coordinator_token
from paceline.protocol.launchers import OwnLaunchers
from paceline.protocol.quorum import Coordinator
from paceline.strategies import ElasticFlags, ElasticOptions, choose_elastic
from paceline.transport import TLS, Address
from paceline.transport.addresses import announced_host

_POLL_S: Final = 0.2


def run_coordinator(
    flags: ElasticFlags,
    *,
    max_ranks: int | None,
    address: str,
    tls: TLS | None,
    start_timeout_s: float,
    timeout_s: float,
    on_ready: Callable[[Address], None],
    on_note: Callable[[str], None],
) -> None:
    """Serve the coordinator until the training has ended on all ranks.

    The training begins with `max_ranks` ranks. If ranks are missing `start_timeout_s` seconds after the first rank, it
    begins with the present ranks. Without `max_ranks`, it begins with ``--min-ranks`` ranks, and any number of ranks
    may join later. A rank without a message for `timeout_s` seconds is lost. Calls `on_ready` with the address for the
    ranks, and `on_note` with notes for the user.

    Raises UsageError for wrong options and without a token, AddressError if the address is not free, and PeerError if
    the training fails.
    """
    if flags.min_ranks is None:
        raise UsageError("--min-ranks is missing. Pass --min-ranks 1, or more")
    if max_ranks is not None and max_ranks < flags.min_ranks:
        raise UsageError(f"--max-ranks {max_ranks}: expected --min-ranks ({flags.min_ranks}) or more")
    options = choose_elastic(flags, max_ranks or flags.min_ranks)
    assert options is not None
    place = Address.parse(address)
    with start_coordinator(
        options,
        place,
        coordinator_token(place, environment()),
        tls,
        max_ranks=max_ranks or sys.maxsize,
        start_timeout_s=start_timeout_s,
        timeout_s=timeout_s,
    ) as server:
        on_ready(Address("tcp", announced_host(server.address.host), server.address.port))
        has_ended = False
        while not has_ended:
            time.sleep(_POLL_S)
            has_ended = server.has_ended
            for note in server.take_notes():
                on_note(note)
            if server.failure is not None:
                raise PeerError(f"the training has failed: {server.failure}")


def start_coordinator(
    options: ElasticOptions,
    address: Address,
    token: str,
    tls: TLS | None,
    *,
    max_ranks: int,
    start_timeout_s: float,
    timeout_s: float,
) -> CoordinatorServer:
    """Start a coordinator for ranks that start without ``paceline run``, as described for :func:`run_coordinator`.

    Raises AddressError if the address is not free.
    """
    rules = Coordinator(
        min_ranks=options.min_ranks,
        max_ranks=max_ranks,
        report_timeout_s=REPORT_TIMEOUT_S,
        num_places=options.num_ranks,
        start_timeout_s=start_timeout_s,
        max_changes=options.max_changes,
    )
    launchers = OwnLaunchers(timeout_s=timeout_s)
    extra: dict[str, int | str] = {OPTIONS: options.encode(), TIMEOUT_MS: round(1000 * timeout_s)}
    return CoordinatorServer(rules, launchers, address, token, tls, lambda member: None, extra=extra)

"""The rendezvous of ranks, and its errors."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from tests.waiting import in_thread

from paceline.environment import Environment
from paceline.errors import (
    AddressError,
    AuthenticationError,
    DeadlineError,
    PacelineError,
    ProtocolError,
    UsageError,
)
from paceline.meeting.rendezvous import Meeting, is_loopback, own_host, rendezvous

from .ranks import PATIENCE_S, TOKEN, on_ranks, soon

NOTHING = Environment()


def free_ports(num: int = 1) -> int:
    """Return the first of ``num`` neighbouring ports that are free."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for shift in range(1, num):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + shift))
            except (OSError, OverflowError):
                continue
            return port


def meet(rank: int, size: int, port: int, *, token: str | None = None, timeout_s: float = PATIENCE_S) -> Meeting:
    return rendezvous(rank, size, f"127.0.0.1:{port}", token, timeout_s, variables=NOTHING)


@contextmanager
def met(size: int, port: int) -> Iterator[list[Meeting]]:
    meetings = on_ranks(size, lambda rank: meet(rank, size, port))
    try:
        yield meetings
    finally:
        for meeting in reversed(meetings):
            meeting.close()


def test_ranks_join_in_any_order() -> None:
    port = free_ports()
    with ThreadPoolExecutor(2) as pool:
        other_ranks = [pool.submit(meet, rank, 3, port) for rank in (1, 2)]
        first = meet(0, 3, port)
        meetings = [first, *(other.result(PATIENCE_S) for other in other_ranks)]
    first.store.set("key", b"value")
    for rank, meeting in enumerate(meetings):
        assert (meeting.rank, meeting.world_size, meeting.host) == (rank, 3, "127.0.0.1")
        assert meeting.store.get("key", soon()) == b"value"
        assert meeting.token not in repr(meeting)
    for meeting in reversed(meetings):
        meeting.close()


def test_a_single_rank_needs_no_rendezvous() -> None:
    for meeting in (rendezvous(variables=NOTHING), rendezvous(0, 1, "10.0.0.1:1", variables=NOTHING)):
        meeting.store.set("key", b"value")
        assert (meeting.rank, meeting.world_size, meeting.address) == (0, 1, None)
        assert meeting.token
        meeting.close()


def environment_of(rank: int, port: int, run: str = "run/0", **other: object) -> Environment:
    values: dict[str, object] = {"world_size": 2, "master_addr": "127.0.0.1", "run_id": run, **other}
    return Environment(rank=rank, master_port=port, **values)  # type: ignore[arg-type]


def test_the_environment_completes_the_arguments() -> None:
    port = free_ports()
    meetings = on_ranks(2, lambda rank: rendezvous(variables=environment_of(rank, port, local_rank=rank)))
    assert [(meeting.rank, meeting.local_rank) for meeting in meetings] == [(0, 0), (1, 1)]
    for meeting in reversed(meetings):
        meeting.close()


def test_ranks_on_one_host_need_no_address() -> None:
    port = free_ports()
    meetings = on_ranks(
        2, lambda rank: rendezvous(variables=environment_of(rank, port, master_addr=None, local_world_size=2))
    )
    for meeting in reversed(meetings):
        meeting.close()


def test_two_programs_under_torchrun_are_separate() -> None:
    port = free_ports(5)
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):

        def both(number: int) -> Meeting:
            run, rank = divmod(number, 2)
            return rendezvous(
                variables=environment_of(rank, port, f"run {run}", has_agent_store=True), timeout_s=PATIENCE_S
            )

        # The next port belongs to another program, which sends nothing.
        meetings = on_ranks(4, both)
    places = [meeting.address for meeting in meetings]
    assert places[0] == places[1] != places[2] == places[3]
    for meeting in reversed(meetings):
        meeting.close()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Environment(rank=0), "the world size is missing"),
        (Environment(world_size=2), "the rank is missing"),
        (Environment(rank=2, world_size=2), "rank 2 of 2"),
        (Environment(rank=0, world_size=0), "rank 0 of 0"),
        (Environment(rank=0, world_size=2), "MASTER_ADDR and MASTER_PORT"),
        (Environment(rank=0, world_size=2, master_addr="localhost"), "set MASTER_PORT,"),
        (Environment(rank=0, world_size=2, local_world_size=2), "set MASTER_PORT,"),
        (Environment(rank=0, world_size=2, master_addr="10.0.0.1", master_port=1), "PACELINE_TOKEN"),
    ],
)
def test_missing_settings_are_reported(environment: Environment, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rendezvous(variables=environment)


@pytest.mark.parametrize("address", ["unix:///tmp/x", "127.0.0.1:0", "nonsense"])
def test_invalid_addresses_are_rejected(address: str) -> None:
    with pytest.raises(PacelineError, match=address):
        rendezvous(0, 2, address, variables=NOTHING)


def test_the_port_of_another_program_is_reported() -> None:
    message = "in use by another program"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(AddressError, match=message):
        meet(0, 2, other.getsockname()[1])


def test_two_programs_at_one_rendezvous() -> None:
    port = free_ports()
    with met(2, port):
        for rank in range(2):
            with pytest.raises(
                UsageError, match=f"rank {rank} of 2 is registered already: .* two programs use the rendezvous"
            ):
                meet(rank, 2, port)
            with pytest.raises(UsageError, match=r"this program has 4 ranks.* has 2"):
                meet(rank, 4, port)


def test_another_token_is_rejected() -> None:
    port = free_ports()
    with met(2, port), pytest.raises(AuthenticationError, match="refused the token") as refused:
        meet(1, 2, port, token="another token for tests")
    assert "another token for" not in str(refused.value)


def test_a_missing_listener_is_reported() -> None:
    port = free_ports()
    with pytest.raises(DeadlineError, match=rf"rank 0 has not served the rendezvous at 127\.0\.0\.1:{port} within"):
        meet(1, 2, port, timeout_s=0.1)


def test_a_listener_of_another_program_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            connected, _ = other.accept()
            with connected:
                connected.sendall(b"SSH-2.0-OpenSSH_9.6 and so on, for more than forty bytes\r\n")

        with in_thread(speak), pytest.raises(ProtocolError, match=r"is not a Paceline rendezvous.*MASTER_PORT"):
            meet(1, 2, other.getsockname()[1])


def test_a_silent_listener_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match="before its first frame"):
            meet(1, 2, other.getsockname()[1], timeout_s=0.2)
        assert time.monotonic() - start < 20


def test_rank_0_may_start_late() -> None:
    port = free_ports()
    waiting: Future[Meeting]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, 1, 2, port)
        with pytest.raises(DeadlineError):
            meet(1, 2, port, timeout_s=0.1)  # the other rank has already tried to connect
        first = meet(0, 2, port)
        waiting.result(PATIENCE_S).close()
        first.close()


def test_hosts_of_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "localhost", "::1")))
    assert not any(map(is_loopback, ("10.0.0.1", "node7", "0.0.0.0", "fe80::1")))
    assert (own_host("localhost"), own_host("::1")) == ("127.0.0.1", "::1")
    assert not is_loopback(own_host("192.0.2.1")) or own_host("192.0.2.1") == socket.gethostname()


def test_a_reachable_local_host_name() -> None:
    own = own_host("192.0.2.1")
    if own == socket.gethostname():
        pytest.skip("this machine has no way out, so no address but loopback")
    port = free_ports()
    meetings = on_ranks(2, lambda rank: rendezvous(rank, 2, f"{own}:{port}", TOKEN, PATIENCE_S, variables=NOTHING))
    for meeting in reversed(meetings):
        assert meeting.host == own
        assert meeting.address is not None
        assert meeting.address.host == own
        meeting.close()

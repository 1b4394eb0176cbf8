"""TLS between the ranks of several hosts: all traffic is encrypted, and wrong certificates are rejected."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from paceline.collectives import Group
from paceline.environment import Environment
from paceline.errors import AuthenticationError, PacelineError, RankLostError, UsageError
from paceline.meeting.node import Node
from paceline.meeting.rendezvous import rendezvous
from paceline.testing import COLLECTIVE_CHECKS, nothing_left, run_ranks
from paceline.transport import TLS, client

TOKEN = "a token for tests"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TLS]:
    folder: Path = tmp_path_factory.mktemp("tls")
    found = {}
    for name in ("ours", "foreign"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / f"{name}-ca.pem"))
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
        found[name] = TLS(cert=folder / f"{name}.pem", ca=folder / f"{name}-ca.pem")
    return found


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize(
    "check",
    [
        "check_programs",
        "check_send_receive",
        pytest.param("check_subgroups", marks=pytest.mark.thorough),
        pytest.param("check_threads", marks=pytest.mark.thorough),
    ],
)
def test_the_checks_pass_with_tls(certificates: dict[str, TLS], check: str) -> None:
    run_ranks(3, COLLECTIVE_CHECKS[check], hosts=[0, 0, 1], tls=certificates["ours"])


def test_all_traffic_is_encrypted(certificates: dict[str, TLS], monkeypatch: pytest.MonkeyPatch) -> None:
    """The TCP traffic of the ranks contains neither their data nor their calls in plain text."""
    real = client.open_socket

    def relayed(address: Any, timeout_s: float, **options: Any) -> socket.socket:
        connected = real(address, timeout_s, **options)
        if address.scheme == "unix":
            return connected
        own_end, peer_end = socket.socketpair()
        for one, other in ((peer_end, connected), (connected, peer_end)):
            threading.Thread(target=_copy, args=(one, other, seen), daemon=True).start()
        return own_end

    seen: list[bytes] = []
    monkeypatch.setattr("paceline.transport.streams.open_socket", relayed)
    secret = b"the secret of a gradient" * 100

    def talk(group: Group) -> None:
        given = np.frombuffer(secret, np.uint8).copy()
        group.all_gather(given)
        group.send(given, 1 - group.rank)
        group.recv(given, 1 - group.rank)

    run_ranks(2, talk, hosts=[0, 1], tls=certificates["ours"])
    received = b"".join(seen)
    assert len(received) > 4 * len(secret)
    assert secret[:12] not in received
    assert b"all_gather" not in received


def _copy(one: socket.socket, other: socket.socket, seen: list[bytes]) -> None:
    try:
        while data := one.recv(1 << 16):
            seen.append(data)
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    finally:
        time.sleep(0.1)
        one.close()


def test_a_leaving_rank_is_named(certificates: dict[str, TLS]) -> None:
    def call(group: Group) -> None:
        group.all_reduce(np.ones(3))
        if group.rank == 1:
            return
        with pytest.raises(RankLostError) as lost:
            group.recv(np.ones(3), 1)
        assert lost.value.ranks == (1,)

    run_ranks(2, call, hosts=[0, 1], tls=certificates["ours"])


def test_a_foreign_certificate_is_rejected_with_one_sentence(certificates: dict[str, TLS]) -> None:
    own_node, foreign = Node(TOKEN, tls=certificates["ours"]), Node(TOKEN, tls=certificates["foreign"])
    try:
        for one, other in ((own_node, foreign), (foreign, own_node)):
            info = _only_tcp(other)
            with pytest.raises(AuthenticationError, match=r"no TLS connection .* certificate .*--tls-ca") as refused:
                one.connect(info, "group", 0, "p2p", time.monotonic() + 10)
            assert "\n" not in str(refused.value)
    finally:
        own_node.close()
        foreign.close()


def _only_tcp(node: Node) -> Any:
    import msgspec

    return msgspec.structs.replace(node.info, endpoint=msgspec.structs.replace(node.info.endpoint, unix=None))


def test_the_rendezvous_uses_tls(certificates: dict[str, TLS]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"

    def meet(rank: int, tls: TLS) -> Any:
        return rendezvous(rank, 3, place, TOKEN, 10.0, variables=Environment(), tls=tls)

    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(meet, rank, certificates["ours"]) for rank in range(2)]
        first, second = (meeting.result() for meeting in meetings)
        first.store.set("key", b"value")
        assert second.store.get("key", time.monotonic() + 10) == b"value"
        with pytest.raises(PacelineError, match="certificate"):
            meet(2, certificates["foreign"])
        second.close()
        first.close()


def test_a_node_needs_a_certificate(certificates: dict[str, TLS]) -> None:
    with pytest.raises(UsageError, match="a server needs a certificate for TLS"):
        Node(TOKEN, tls=TLS(ca=certificates["ours"].ca))

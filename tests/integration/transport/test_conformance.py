"""The public conformance suite on every transport."""

from __future__ import annotations

import pytest
from tests.faulty import FaultPlan, FaultyTransport
from tests.memory_transport import MemoryTransport

from paceline.testing import CHECKS, check_transport
from paceline.testing.transports import MakeTransport
from paceline.transport import TLS, SocketTransport

UNIX, TCP, SEALED, ENCRYPTED = "unix", "tcp", "sealed", "tls"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("medium", [UNIX, TCP, SEALED, ENCRYPTED, "memory", "faulty"])
def test_transport_conforms(medium: str, check: str, certificates: dict[str, TLS]) -> None:
    shared = MemoryTransport()

    def make_tls(token: str) -> SocketTransport:
        return SocketTransport(token, tls=certificates["ours"])

    makers: dict[str, MakeTransport] = {
        UNIX: SocketTransport,
        TCP: SocketTransport,
        SEALED: lambda token: SocketTransport(token, always_sealed=True),
        ENCRYPTED: make_tls,
        "memory": shared.with_token,
        "faulty": lambda token: FaultyTransport(SocketTransport(token), FaultPlan()),
    }
    check_transport(makers[medium], only=check, unix=medium != TCP)

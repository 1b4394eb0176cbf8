from __future__ import annotations

import time

import pytest

from paceline.errors import ConnectionLostError, DeadlineError, UsageError
from paceline.testing import EchoHandler, Fault, FaultPlan, FaultyTransport, serve_in_thread
from paceline.testing.transports import ECHO, SILENT
from paceline.transport import Hello, MemoryTransport, SocketTransport, Transport


@pytest.fixture(params=["sockets", "memory"])
def inner(request: pytest.FixtureRequest) -> Transport:
    return SocketTransport("token") if request.param == "sockets" else MemoryTransport("token")


def test_each_fault_happens_where_it_was_planned(inner: Transport) -> None:
    faults = [
        Fault(action="drop", rank=1, step=0, kind=ECHO),
        Fault(action="duplicate", rank=1, step=1, kind=ECHO),
        Fault(action="delay", rank=1, step=4, delay_s=0.05),
    ]
    plan = FaultPlan(faults)
    transport = FaultyTransport(inner, plan)
    with serve_in_thread(EchoHandler(), transport) as served:
        other = transport.connect(served.endpoint, Hello(role="worker", rank=0))
        channel = transport.connect(served.endpoint, Hello(role="worker", rank=1))
        other.send_frame(ECHO)
        assert other.receive_header(5).body_bytes == 0

        channel.send_frame(SILENT)
        channel.send_frame(ECHO, request=0)
        with pytest.raises(DeadlineError):
            channel.receive_header(0.05)
        channel.send_frame(ECHO, request=1, body=b"twice")
        for _ in range(2):
            frame = channel.receive_frame(5)
            assert (frame.header.request, bytes(frame.body)) == (1, b"twice")
        assert plan.fired == faults[:2]
        with pytest.raises(UsageError, match="never happened"):
            plan.check_all_fired()
        channel.send_frame(ECHO, request=2)
        start = time.monotonic()
        channel.send_frame(ECHO, request=3)
        assert time.monotonic() - start >= 0.05
        assert [channel.receive_header(5).request for _ in range(2)] == [2, 3]
        other.close()
        channel.close()
    plan.check_all_fired()


def test_cut_before_and_after(inner: Transport) -> None:
    plan = FaultPlan(
        [
            Fault(action="cut", rank=0, step=1),
            Fault(action="cut", rank=0, step=2, when="after"),
        ]
    )
    transport = FaultyTransport(inner, plan)
    handler = EchoHandler()
    with serve_in_thread(handler, transport) as served:
        channel = transport.connect(served.endpoint, Hello(role="worker"))
        channel.send_frame(SILENT)
        with pytest.raises(ConnectionLostError, match="was cut"):
            channel.send_frame(SILENT)
        handler.wait_until(lambda: handler.reasons == [None])
        assert handler.num_frames == 1

        channel = transport.connect(served.endpoint, Hello(role="worker", incarnation=1))
        channel.send_frame(SILENT)
        with pytest.raises(ConnectionLostError):
            channel.receive_header(5)
        handler.wait_until(lambda: handler.num_frames == 2 and len(handler.reasons) == 2)
    plan.check_all_fired()


def test_other_roles_are_left_alone(inner: Transport) -> None:
    plan = FaultPlan([Fault(action="drop", rank=0, step=0)])
    plan.add(Fault(action="drop", rank=0, step=0, role="server"))
    transport = FaultyTransport(inner, plan)
    with serve_in_thread(EchoHandler(), transport) as served:
        channel = transport.connect(served.endpoint, Hello(role="server"))
        channel.send_frame(ECHO, request=1)
        channel.send_frame(ECHO, request=2)
        assert channel.receive_header(5).request == 2
        channel.close()
    assert [fault.role for fault in plan.fired] == ["server"]

"""The public test kit: conformance suites, faults on purpose, servers in a thread."""

from paceline.testing.serving import Served, serve_in_thread
from paceline.testing.transports import CHECKS, EchoHandler, check_transport
from paceline.transport import Fault, FaultPlan, FaultyTransport

__all__ = [
    "CHECKS",
    "EchoHandler",
    "Fault",
    "FaultPlan",
    "FaultyTransport",
    "Served",
    "check_transport",
    "serve_in_thread",
]

"""The public test kit: suites that check implementations of an interface, and servers in a thread."""

from paceline.testing.collectives import COLLECTIVE_CHECKS, check_collectives
from paceline.testing.engines import ENGINE_CHECKS, check_engine
from paceline.testing.ranks import nothing_left, run_ranks
from paceline.testing.serving import Served, serve_in_thread
from paceline.testing.transports import CHECKS, EchoHandler, check_transport

__all__ = [
    "CHECKS",
    "COLLECTIVE_CHECKS",
    "ENGINE_CHECKS",
    "EchoHandler",
    "Served",
    "check_collectives",
    "check_engine",
    "check_transport",
    "nothing_left",
    "run_ranks",
    "serve_in_thread",
]

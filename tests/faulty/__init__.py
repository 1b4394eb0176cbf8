"""A transport with planned faults."""

from tests.faulty.plan import Fault, FaultPlan
from tests.faulty.transport import FaultyTransport

__all__ = ["Fault", "FaultPlan", "FaultyTransport"]

"""The error that Horovod's users expect of collective operations."""

from __future__ import annotations

from paceline.errors import PeerError


class HorovodInternalError(PeerError, RuntimeError):
    """A collective operation failed: the ranks' requests differ, a rank was lost, or a rank called ``shutdown``."""

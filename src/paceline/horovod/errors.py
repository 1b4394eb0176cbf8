"""Horovod's exceptions for collective operations and for elastic training."""

from __future__ import annotations

from paceline.errors import PeerError


class HorovodInternalError(PeerError, RuntimeError):
    """A collective operation failed: the ranks' requests differ, a rank was lost, or a rank called ``shutdown``."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  (Horovod's name)
    """New ranks wait to join an elastic training. :func:`paceline.horovod.elastic.run` handles this exception."""

    def __init__(self, skip_sync: bool = False) -> None:
        """In Horovod, `skip_sync` means that no rank needs a state. In Paceline, it is always False."""
        super().__init__()
        self.skip_sync = skip_sync

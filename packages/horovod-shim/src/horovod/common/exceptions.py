"""The exceptions."""

from paceline.horovod import HorovodInternalError

__all__ = ["HorovodInternalError"]

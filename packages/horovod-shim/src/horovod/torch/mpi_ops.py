"""The operations."""

from paceline.horovod import *  # noqa: F403

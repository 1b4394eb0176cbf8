"""The API for PyTorch."""

from paceline.horovod import *  # noqa: F403

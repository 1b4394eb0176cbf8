"""The states of elastic training."""

from paceline.horovod.elastic import ObjectState, State

__all__ = ["ObjectState", "State"]

"""The state of elastic training."""

from paceline.horovod.elastic import TorchState

__all__ = ["TorchState"]

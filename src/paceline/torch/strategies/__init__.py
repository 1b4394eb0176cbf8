"""Strategies for distributing one training loop: a file per strategy, over a small base class."""

from paceline.torch.strategies.all_reduce import AllReduce
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.choosing import strategy
from paceline.torch.strategies.hybrid import Hybrid
from paceline.torch.strategies.one_device import OneDevice
from paceline.torch.strategies.pipeline.strategy import Pipeline
from paceline.torch.strategies.replicas.central_storage import CentralStorage
from paceline.torch.strategies.replicas.mirrored import Mirrored
from paceline.torch.strategies.server.parameter_server import ParameterServer
from paceline.torch.strategies.sharded.strategy import Sharded

__all__ = [
    "AllReduce",
    "CentralStorage",
    "Hybrid",
    "Mirrored",
    "OneDevice",
    "ParameterServer",
    "Pipeline",
    "Sharded",
    "Strategy",
    "strategy",
]

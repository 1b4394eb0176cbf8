"""Paceline for PyTorch: strategies for training loops, embeddings without a vocabulary, a torch.distributed backend.

>>> import torch
>>> import paceline.torch as pt
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> strategy = pt.strategy()                                  # the launcher's choice; one device without a launcher
>>> model, optimizer = strategy.prepare(model, optimizer)
>>> strategy.name
'one-device'

``paceline`` is also a backend of ``torch.distributed``. The name is available as soon as Paceline is installed:

>>> import torch.distributed as dist
>>> dist.init_process_group("paceline", rank=0, world_size=1, store=dist.HashStore())
>>> tensor = torch.ones(2)
>>> dist.all_reduce(tensor)
>>> tensor.tolist()
[1.0, 1.0]
>>> dist.destroy_process_group()

DistributedDataParallel, ``fully_shard``, device meshes and all collectives can use this backend. Tensors on the CPU use
Paceline's collectives; CUDA tensors use an NCCL group of the same ranks, which is created at the first call with a CUDA
tensor.

Public names are imported at first use, because one strategy does not need the modules of the others.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("paceline.torch needs PyTorch, which is not installed: pip install 'paceline[torch]'") from error

from typing import TYPE_CHECKING

from paceline.autoload import BACKEND, register
from paceline.on_demand import import_on_demand
from paceline.torch.backend.process_group import PacelineProcessGroup
from paceline.torch.compiling import keep_out_of_graphs
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.choosing import strategy

if TYPE_CHECKING:
    from paceline.torch.embeddings import Embedding, EmbeddingBag
    from paceline.torch.gradient_filters import filter_hook
    from paceline.torch.partitioning.partitioned import PartitionedModel, partition
    from paceline.torch.strategies.all_reduce import AllReduce
    from paceline.torch.strategies.hybrid import Hybrid
    from paceline.torch.strategies.one_device import OneDevice
    from paceline.torch.strategies.pipeline.strategy import Pipeline
    from paceline.torch.strategies.replicas.central_storage import CentralStorage
    from paceline.torch.strategies.replicas.mirrored import Mirrored
    from paceline.torch.strategies.server.parameter_server import ParameterServer
    from paceline.torch.strategies.sharded.strategy import Sharded

__all__ = [
    "AllReduce",
    "BACKEND",
    "CentralStorage",
    "Embedding",
    "EmbeddingBag",
    "Hybrid",
    "Mirrored",
    "OneDevice",
    "PacelineProcessGroup",
    "ParameterServer",
    "PartitionedModel",
    "Pipeline",
    "Sharded",
    "Strategy",
    "filter_hook",
    "partition",
    "register",
    "strategy",
]

__getattr__ = import_on_demand(
    __name__,
    {
        ".embeddings": ("Embedding", "EmbeddingBag"),
        ".gradient_filters": ("filter_hook",),
        ".partitioning.partitioned": ("PartitionedModel", "partition"),
        ".strategies.all_reduce": ("AllReduce",),
        ".strategies.hybrid": ("Hybrid",),
        ".strategies.one_device": ("OneDevice",),
        ".strategies.pipeline.strategy": ("Pipeline",),
        ".strategies.replicas.central_storage": ("CentralStorage",),
        ".strategies.replicas.mirrored": ("Mirrored",),
        ".strategies.server.parameter_server": ("ParameterServer",),
        ".strategies.sharded.strategy": ("Sharded",),
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register()
keep_out_of_graphs()

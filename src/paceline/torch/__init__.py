"""Paceline for PyTorch: importing this registers ``paceline`` as a backend of ``torch.distributed``.

>>> import torch, torch.distributed as dist
>>> import paceline.torch
>>> dist.init_process_group("paceline", rank=0, world_size=1, store=dist.HashStore())
>>> tensor = torch.ones(2)
>>> dist.all_reduce(tensor)
>>> tensor.tolist()
[1.0, 1.0]
>>> dist.destroy_process_group()

Nothing else in a program changes: DistributedDataParallel, ``fully_shard``, device meshes, functional collectives and
objects go through it. Tensors on the CPU go by Paceline's collectives; CUDA tensors by an NCCL group of the same ranks,
which is made when the first one comes.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("paceline.torch needs PyTorch, which is not installed: pip install 'paceline[torch]'") from error

from paceline.torch._registration import BACKEND, register
from paceline.torch.process_group import PacelineProcessGroup

__all__ = ["BACKEND", "PacelineProcessGroup", "register"]

register()

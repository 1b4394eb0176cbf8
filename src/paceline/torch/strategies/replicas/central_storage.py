"""One process with the variables on one device, and replicas of the model on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.torch.strategies.base import choose_device
from paceline.torch.strategies.replicas.replica_set import ReplicaValues
from paceline.torch.strategies.replicas.strategy import ReplicaStrategy


class CentralStorage(ReplicaStrategy):
    """The variables and the optimizer's state are on the device `storage`; replicas on several devices compute.

    A replica fetches the variables in every forward and frees them after backward; its gradients are copied to the
    storage device and added there, and the optimizer updates the variables there. Other devices need no memory for the
    optimizer's state, at the price of a copy of the variables in every step. Replicas on the storage device share the
    variables: on a machine without CUDA this equals :class:`~paceline.torch.strategies.replicas.mirrored.Mirrored`.

    `replicas`, `devices`, `device`, `seed` and errors are as for Mirrored.
    """

    name: ClassVar[str] = "central-storage"

    def __init__(
        self,
        *,
        replicas: int | None = None,
        devices: Sequence[torch.device | str] | None = None,
        device: torch.device | str | None = None,
        storage: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__(replicas=replicas, devices=devices, device=device, seed=seed)
        self.storage = choose_device(storage, 0)

    @override
    def replica_values(self, optimizers: Sequence[Optimizer]) -> ReplicaValues:
        return Fetched(self.devices, self.storage)


class Fetched(ReplicaValues):
    """Parameters that each replica fetches for one forward and its backward."""

    def __init__(self, devices: Sequence[torch.device], storage: torch.device) -> None:
        self._devices = devices
        self._storage = storage

    def is_shared(self, replica: int) -> bool:
        return self._devices[replica] == self._storage

    def fetch(self, replica: int, parameter: nn.Parameter) -> torch.Tensor:
        if self.is_shared(replica):
            return parameter.detach()
        return parameter.detach().to(self._devices[replica], non_blocking=True, copy=True)

"""One process: one device has the parameters and buffers, and replicas of the model compute on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.torch.strategies.devices import choose_device
from paceline.torch.strategies.replicas.replica_set import ReplicaValues
from paceline.torch.strategies.replicas.strategy import ReplicaStrategy


class CentralStorage(ReplicaStrategy):
    """Replicas compute on several devices. The device `storage` has the parameters and the optimizer's state.

    A replica copies the parameters to its device in every forward, and frees them after backward. Its gradients are
    copied to the storage device and added there, and the optimizer updates the parameters there. So other devices need
    no memory for the optimizer's state, but each step copies the parameters. Replicas on the storage device use the
    parameters directly. Without CUDA this equals :class:`~paceline.torch.strategies.replicas.mirrored.Mirrored`.

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
    """Copies the parameters to each replica's device for one forward and its backward."""

    def __init__(self, devices: Sequence[torch.device], storage: torch.device) -> None:
        self._devices = devices
        self._storage = storage

    def is_shared(self, replica: int) -> bool:
        return self._devices[replica] == self._storage

    def fetch(self, replica: int, parameter: nn.Parameter) -> torch.Tensor:
        if self.is_shared(replica):
            return parameter.detach()
        return parameter.detach().to(self._devices[replica], non_blocking=True, copy=True)

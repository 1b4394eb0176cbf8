"""Base of the strategies with replicas in one process: choose devices, and prepare the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.devices import choose_device
from paceline.torch.strategies.one_device import only_rank
from paceline.torch.strategies.replicas.replica_set import Replicas, ReplicaValues

MOST_BY_DEFAULT = 4
"""Largest default number of replicas on a CPU. More replicas would cost more time to sum gradients."""


class ReplicaStrategy(Strategy):
    """Abstract: a replica of the model on each of several devices, in threads; see :class:`Mirrored`."""

    shards_data: ClassVar[bool] = False

    def __init__(
        self,
        *,
        replicas: int | None = None,
        devices: Sequence[torch.device | str] | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        self.devices = replica_devices(self.name, replicas, devices, device)
        """The device of each replica. A batch is split into at most one part per replica."""
        super().__init__(only_rank(self.name), device=self.devices[0], seed=seed)
        self._replicas: list[Replicas] = []

    def close(self) -> None:
        """Restore the model's own forward, and end the replicas' threads. Idempotent."""
        for replicas in self._replicas:
            replicas.close()
        super().close()

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        if self.embedder is not None:
            self.embedder.step_with(optimizers)
        values = self.replica_values(optimizers)
        self._replicas += [Replicas(model, self.devices, values) for model in models]
        return models, optimizers

    @abstractmethod
    def replica_values(self, optimizers: Sequence[Optimizer]) -> ReplicaValues:
        """Return the object that provides parameters to the replicas. `optimizers` update these parameters."""


def replica_devices(
    strategy: str,
    replicas: int | None,
    devices: Sequence[torch.device | str] | None,
    device: torch.device | str | None,
) -> tuple[torch.device, ...]:
    if devices is not None:
        if isinstance(devices, str) or not devices:
            raise UsageError(
                f"strategy {strategy}: devices={devices!r}: expected a list of one or more devices, as ['cpu', 'cpu']"
            )
        if device is not None or replicas not in (None, len(devices)):
            raise UsageError(
                f"strategy {strategy}: got {len(devices)} devices together with device={device!r} and "
                f"replicas={replicas!r}: pass only devices, one for each replica"
            )
        return tuple(choose_device(one, 0) for one in devices)
    source, wanted = "replicas", replicas
    if wanted is None:
        source, wanted = "PACELINE_REPLICAS", environment().replicas
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
        raise UsageError(f"strategy {strategy}: {source}={wanted!r}: expected a whole number from 1 up")
    first = choose_device(device, 0)
    if first.type == "cpu":
        return (first,) * (wanted or min(MOST_BY_DEFAULT, torch.get_num_threads()))
    if first.type != "cuda" or (device is not None and torch.device(device).index is not None):
        return (first,) * (wanted or 1)
    num_cuda = torch.cuda.device_count()
    return tuple(torch.device("cuda", i % num_cuda) for i in range(wanted or num_cuda))

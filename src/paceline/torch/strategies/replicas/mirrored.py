"""One process, several devices: each device has a replica of the model and a copy of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.torch.strategies.replicas.replica_set import ReplicaValues
from paceline.torch.strategies.replicas.strategy import ReplicaStrategy


class Mirrored(ReplicaStrategy):
    """Replicas of the model on several devices, in threads of one process. Each computes a part of the batch.

    The model's parameters are on the first device. Each other device has a copy, which is updated in the first forward
    after ``optimizer.step()``. Replicas on one device share its copy. The replicas' gradients are added on the first
    device. So a loss that is a mean over the model's output has the gradient of the complete batch, as under
    :class:`~paceline.torch.strategies.one_device.OneDevice`. Layers with statistics of the batch (BatchNorm) use only
    their replica's part.

    `devices` are the replicas' devices. A device may occur several times. Instead, `replicas` may be the number of
    replicas. They use the CUDA devices in a cycle or, without CUDA, an equal share of the CPU's cores each. The default
    number comes from ``paceline run --replicas`` or ``PACELINE_REPLICAS``; otherwise it is the number of CUDA devices
    or, without CUDA, of cores (at most 4). `device` selects the kind ``cpu`` or ``cuda``, or one device for all.

    Raises UsageError for 0 replicas, missing devices, and contradictory settings.
    """

    name: ClassVar[str] = "mirrored"
    _mirrors: Sequence[Mirrors] = ()

    @override
    def replica_values(self, optimizers: Sequence[Optimizer]) -> ReplicaValues:
        mirrors = Mirrors(self.devices)
        mirrors.follow(optimizers)
        self._mirrors = [*self._mirrors, mirrors]
        return mirrors

    @override
    def _scatter_values(self, values: Mapping[str, torch.Tensor]) -> None:
        super()._scatter_values(values)
        for mirrors in self._mirrors:
            mirrors.update()


_State = tuple[int | None, int, int]


class Mirrors(ReplicaValues):
    """Keeps copies of the parameters on every device except the first.

    The first forward after an optimizer step updates all copies, even if the optimizer writes through ``.data``. Any
    other write in place changes the parameter's version, and the next forward then updates its copy. Without an
    optimizer, each forward makes new copies.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._num_steps: int | None = None  # number of steps of all optimizers; None without an optimizer
        self._copies: dict[tuple[int, int], tuple[nn.Parameter, torch.Tensor, _State]] = {}
        """By (replica, id of the parameter): the parameter, its copy, and its :meth:`_state` when it was copied."""

    def is_shared(self, replica: int) -> bool:
        return self._devices[replica] == self._devices[0]

    def fetch(self, replica: int, parameter: nn.Parameter) -> torch.Tensor:
        if self.is_shared(replica):
            return parameter.detach()
        if self._num_steps is None:
            return parameter.detach().to(self._devices[replica], copy=True)
        found = self._copies.get((replica, id(parameter)))
        if found is None or found[1].shape != parameter.shape or found[1].dtype != parameter.dtype:
            copy = parameter.detach().to(self._devices[replica], copy=True)
            self._copies[replica, id(parameter)] = (parameter, copy, self._state(parameter))
            return copy.detach()
        if found[2] != self._state(parameter):
            self._write(replica, parameter, found[1])
        return found[1].detach()

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the steps of `optimizers`. Without optimizers, the program writes the values itself: count nothing."""
        if not optimizers:
            return
        self._num_steps = 0

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            assert self._num_steps is not None
            self._num_steps += 1

        for optimizer in optimizers:
            optimizer.register_step_post_hook(after_step)

    @torch.no_grad()
    def update(self) -> None:
        for (replica, _), (parameter, copy, _) in list(self._copies.items()):
            if copy.shape == parameter.shape:
                self._write(replica, parameter, copy)

    def _write(self, replica: int, parameter: nn.Parameter, copy: torch.Tensor) -> None:
        copy.copy_(parameter.detach(), non_blocking=True)
        self._copies[replica, id(parameter)] = (parameter, copy, self._state(parameter))

    def _state(self, parameter: nn.Parameter) -> _State:
        """Return a value that changes at an optimizer step, at a write in place, and when the memory is replaced."""
        return self._num_steps, parameter._version, parameter.data_ptr()

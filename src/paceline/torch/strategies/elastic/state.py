"""Transfer a training's state from one rank to newcomers: model, optimizers, schedulers and the loaders' positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from paceline.collectives import Group
from paceline.torch.strategies.all_reduce import describe_entry, share_optimizer_state
from paceline.torch.strategies.base import Strategy, state_of
from paceline.torch.strategies.checkpoints import options_of_group
from paceline.torch.strategies.json_values import from_json, like, to_json

_ALIGNMENT: Final = 16
"""Alignment of tensors in a message, in bytes: a multiple of the size of every dtype's elements."""


def broadcast_copies(group: Group, tensors: Sequence[torch.Tensor], root: int) -> list[torch.Tensor]:
    """Return copies of the tensors of the rank `root`, on the CPU. Send all tensors in one message."""
    if not tensors:
        return []
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    message = torch.empty(sum(sizes), dtype=torch.uint8)
    copies = [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(torch.split(message, sizes), tensors, strict=True)
    ]
    if group.rank == root:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
    if group.size > 1:
        group.broadcast(message, root=root)
    return copies


class TransferredState:
    """A copy of a training's state: sent by one rank, received and loaded by newcomers."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._values: dict[str, torch.Tensor] = {}
        self._states: list[dict[int, dict[str, Any]]] = []
        self._registered: dict[str, torch.Tensor] = {}
        self._description: dict[str, Any] = {}

    def share(self, group: Group, source: int) -> None:
        """Receive the state of the rank `source`.

        Every rank of the group must call this method, and repeat the call after a failure.
        """
        strategy, is_source = self._strategy, group.rank == source
        assert strategy.module is not None
        states, tensors = strategy.registered.encode() if is_source else ({}, {})
        if is_source:
            described = {name: describe_entry(tensor) for name, tensor in tensors.items()}
            own = {**self.describe(), "registered": states, "tensors": described}
        self._description = from_json(group.broadcast_object(own if is_source else None, root=source))
        if not is_source:
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                for name, (dtype, shape) in self._description["tensors"].items()
            }
        copies = broadcast_copies(group, list(tensors.values()), source)
        self._registered = dict(zip(tensors, copies, strict=True))
        values = state_of(strategy.module)
        self._values = dict(zip(values, broadcast_copies(group, list(values.values()), source), strict=True))
        self._states = [
            share_optimizer_state(group, strategy.gather_optimizer_state(number) if is_source else {}, source)
            for number in range(len(strategy.optimizers))
        ]

    def describe(self) -> Any:
        """Return the options of optimizers and the states of schedulers and loaders, as JSON values.

        Raises UsageError for a value in a scheduler's state that JSON does not support.
        """
        strategy = self._strategy
        groups = [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in strategy.optimizers
        ]
        return to_json(
            {
                "optimizers": groups,
                "schedulers": [scheduler.state_dict() for scheduler in strategy.schedulers],
                "loaders": [loader.state_dict() for loader in strategy.loaders],
            },
            "the state for new ranks",
        )

    def load(self) -> None:
        """Load the received state into this rank's model, optimizers, schedulers and loaders."""
        strategy = self._strategy
        strategy._scatter_values(self._values)
        for number, (optimizer, groups) in enumerate(
            zip(strategy.optimizers, self._description["optimizers"], strict=True)
        ):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options_of_group(group, options))
            strategy._scatter_optimizer_state(self._states[number], number)
        for scheduler, state in zip(strategy.schedulers, self._description["schedulers"], strict=True):
            scheduler.load_state_dict(like(scheduler.state_dict(), state))
        strategy.registered.check_complete(self._description["registered"])
        strategy.registered.load(self._description["registered"], self._registered)
        for loader, position in zip(strategy.loaders, self._description["loaders"], strict=True):
            loader.load_state_dict(position)

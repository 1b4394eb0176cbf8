"""Transfer a training's state from one rank to newcomers: model, optimizers, schedulers and the loaders' positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch

from paceline.collectives import Group
from paceline.collectives.elastic import ElasticGroup
from paceline.protocol.healing import HealingProgress, next_part, split_into_parts
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.checkpoints import options_of_group
from paceline.torch.strategies.elastic.chunks import StateChunks, StateTensors
from paceline.torch.strategies.json_values import from_json, like, to_json
from paceline.transport import register_type

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


class StateTransfer:
    """Transfers the training's state to newcomers (:mod:`paceline.protocol.healing`).

    A newcomer uses one object until it is ready. A ready rank uses a new object between any two steps.
    """

    def __init__(self, strategy: Strategy, *, is_newcomer: bool = False) -> None:
        self._strategy = strategy
        self._progress = HealingProgress() if is_newcomer else None
        self._tensors: StateTensors | None = None
        self._chunks: StateChunks | None = None
        """The chunks of rank 0 or of a newcomer."""
        self._part: tuple[int, int, int] | None = None
        """First chunk, end, and number of bytes of the next part; None if newcomers receive everything."""
        self._description: dict[str, Any] | None = None
        """The last description that a newcomer has received, until :meth:`load`."""
        self._rest: list[torch.Tensor] = []
        """The received values of the tensors that are in no chunk."""
        self._has_positions = False
        """Whether a newcomer has received the positions of the loaders. From then on, it updates them itself."""

    def share(self, group: Group, *, is_urgent: bool) -> bool:
        """Choose the next part, or give the whole state to the newcomers. Return whether newcomers have the state.

        All ranks must make this call, and repeat it after a failure. If `is_urgent`, the newcomers receive the whole
        state.
        """
        reports = [report for report in group.all_gather_objects(self._progress) if report is not None]
        progress = [msgspec.convert(report, register_type(HealingProgress)) for report in reports]
        header: list[Any] | None = None
        if group.rank == 0:
            self._tensors = StateTensors(self._strategy)
            self._chunks = self._tensors.chunks()
            part = next_part(progress, self._chunks.sizes, is_urgent=is_urgent)
            fields = None if part is None else [part.start, part.stop, self._chunks.num_bytes(part)]
            has_description = part is None or any(newcomer.num_received is None for newcomer in progress)
            header = [fields, {**self._tensors.describe(), "values": self.describe()} if has_description else None]
        self._part, description = group.broadcast_object(header, root=0)
        if description is not None:
            self._share_description(group, description)
        if self._part is None:
            self._share_differences(group, progress, description["sizes"])
        return self._part is None

    def _share_description(self, group: Group, description: dict[str, Any]) -> None:
        """Send the tensors that are in no chunk to all ranks. Newcomers create the described tensors."""
        if group.rank == 0:
            assert self._tensors is not None
            rest = [self._tensors.by_name[name] for name in description["rest"]]
        else:
            types = [description["tensors"][name] for name in description["rest"]]
            rest = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for dtype, shape, *_ in types]
        copies = broadcast_copies(group, rest, 0)
        if self._progress is not None and (self._part is None or self._progress.num_received is None):
            self._description, self._rest = description, copies
            self._tensors = StateTensors(self._strategy)
            self._tensors.adopt(description)
            self._chunks = self._tensors.chunks()

    def _share_differences(self, group: Group, progress: list[HealingProgress], sizes: list[int]) -> None:
        """Send the chunks that differ between rank 0 and a newcomer."""
        count = min(max(newcomer.num_received or 0 for newcomer in progress), len(sizes))
        checksums = np.zeros(count, np.uint64) if self._chunks is None else self._chunks.checksums(count)
        root_checksums = group.broadcast(checksums.copy(), root=0) if count else checksums
        differs = np.zeros(len(sizes))  # float64, as in votes, because the kernel for this dtype is already loaded
        if self._progress is not None:
            differs[:count] = checksums != root_checksums
            differs[self._progress.num_received or 0 :] = 1
        numbers = np.flatnonzero(group.all_reduce(differs, "max")).tolist()
        for part in split_into_parts(numbers, sizes):
            if self._chunks is not None and self._progress is None:
                message = self._chunks.pack(part)
            else:
                message = torch.empty(sum(sizes[number] for number in part), dtype=torch.uint8)
            group.broadcast(message, root=0)
            if self._chunks is not None and self._progress is not None:
                self._chunks.unpack(message, part)

    def share_part(self, group: ElasticGroup) -> None:
        """Send the next part from rank 0 to newcomers, in the background."""
        if self._part is None or self._chunks is None:
            return
        first, end, num_bytes = self._part
        if self._progress is None:
            group.send_part(self._chunks.pack(range(first, end)))
        elif self._chunks.num_bytes(range(first, end)) == num_bytes:
            message = torch.empty(num_bytes, dtype=torch.uint8)
            group.receive_part(message, partial(self._load_part, message, first, end))
        else:  # the other ranks' optimizers have created tensors since the description
            self._progress = HealingProgress()

    def _load_part(self, message: torch.Tensor, first: int, end: int, waited_s: float) -> None:
        assert self._chunks is not None
        assert self._progress is not None
        self._chunks.unpack(message, range(first, end))
        self._progress = self._progress.after_part(end, len(message), waited_s)

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
        """On a newcomer, load the values that :meth:`share` has received. Chunks need no load, they are in place."""
        description, self._description = self._description, None
        if description is None:
            return
        assert self._tensors is not None
        assert self._progress is not None
        strategy, values = self._strategy, from_json(description["values"])
        self._progress = HealingProgress(self._progress.num_received or 0)
        for name, tensor in zip(description["rest"], self._rest, strict=True):
            self._tensors.by_name[name].copy_(tensor)
        for optimizer, groups in zip(strategy.optimizers, values["optimizers"], strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options_of_group(group, options))
        for scheduler, state in zip(strategy.schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(like(scheduler.state_dict(), state))
        self._load_registered(self._tensors, description)
        if not self._has_positions:
            self._has_positions = True
            for loader, position in zip(strategy.loaders, values["loaders"], strict=True):
                loader.load_state_dict(position)

    def _load_registered(self, tensors: StateTensors, description: dict[str, Any]) -> None:
        """Load the registered states, unless their tensors are in place or some of their chunks are missing."""
        registered, states = self._strategy.registered, description["registered"]
        registered.check_complete(states)
        own_states, own_tensors = registered.encode()
        for name, state in states.items():
            paths = [path for path in tensors.by_name if path.startswith(f"registered/{name}/")]
            received = {path.removeprefix("registered/"): tensors.by_name[path] for path in paths}
            is_in_place = own_states.get(name) == state and all(
                tensor.data_ptr() == own_tensors[path].data_ptr() for path, tensor in received.items()
            )
            if not is_in_place and (self._part is None or tensors.rest.issuperset(paths)):
                registered.load({name: from_json(state)}, received)

"""Transfer a training's state from one rank to newcomers: model, optimizers, schedulers and the loaders' positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from paceline.collectives import Group
from paceline.collectives.elastic import ElasticGroup
from paceline.errors import UsageError
from paceline.protocol.healing import MOST_BYTES, HealingProgress, HealingStep, next_step, split_into_parts
from paceline.torch.strategies.agreement import describe_other_names
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

    A rank uses one object until all newcomers are ready.
    """

    def __init__(self, strategy: Strategy, *, is_newcomer: bool = False) -> None:
        self._strategy = strategy
        self._progress = HealingProgress() if is_newcomer else None
        self._tensors: StateTensors | None = None
        self._chunks: StateChunks | None = None
        """The chunks of rank 0 or of a newcomer."""
        self._step = HealingStep()
        """The last transfer that rank 0 has chosen."""
        self._part_bytes = 0
        """The number of bytes of its part."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """The memory of the parts. It is used again, because the first access to new memory is slow."""
        self._description: dict[str, Any] | None = None
        """On a newcomer, the last received description; None after :meth:`load`."""
        self._rest: list[torch.Tensor] = []
        """The received values of the tensors that are in no chunk."""
        self._has_positions = False
        """Whether a newcomer has received the positions of the loaders. From then on, it updates them itself."""

    @property
    def is_over(self) -> bool:
        """Whether the newcomers have received the whole state."""
        return self._step.is_last

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
            sizes = self._chunks.sizes
            num_updated = self._chunks.count_before(self._tensors.num_updated)
            part, compared, is_last = next_step(progress, sizes, num_updated, is_urgent=is_urgent)
            numbers = [part.start, part.stop, compared.start, compared.stop, self._chunks.num_bytes(part), len(sizes)]
            header = [numbers, is_last, None]
            if is_last or any(newcomer.num_received is None for newcomer in progress):
                header[2] = {**self._tensors.describe(), "values": self.describe()}
        numbers, is_last, description = group.broadcast_object(header, root=0)
        first, end, first_compared, end_compared, self._part_bytes, num_chunks = numbers
        self._step = HealingStep(range(first, end), range(first_compared, end_compared), is_last)
        if description is not None:
            self._share_description(group, description)
        if is_last:
            self._share_differences(group, description["sizes"])
        elif self._step.compared:
            differs = self._compare(group, num_chunks)
            if self._progress is not None:
                self._progress = self._progress.after_comparison(end_compared, is_equal=not differs.any())
        return bool(is_last)

    def _share_description(self, group: Group, description: dict[str, Any]) -> None:
        """Send the tensors that are in no chunk to all ranks. Newcomers create the described tensors."""
        if group.rank == 0:
            assert self._tensors is not None
            rest = [self._tensors.by_name[name] for name in description["rest"]]
        else:
            types = [description["tensors"][name] for name in description["rest"]]
            rest = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for dtype, shape, *_ in types]
        copies = broadcast_copies(group, rest, 0)
        if self._progress is not None and (self._step.is_last or self._progress.num_received is None):
            self._description, self._rest = description, copies
            self._tensors = StateTensors(self._strategy)
            self._tensors.adopt(description)
            self._chunks = self._tensors.chunks()

    def _compare(self, group: Group, num_chunks: int) -> npt.NDArray[np.float64]:
        """Return 1 for each of the `num_chunks` chunks that differs between rank 0 and a newcomer, or is missing."""
        compared = self._step.compared
        is_known = self._chunks is not None and len(self._chunks.sizes) == num_chunks
        checksums = np.zeros(len(compared), np.uint64)
        if self._chunks is not None and is_known:
            checksums = self._chunks.checksums(compared)
        root_checksums = group.broadcast(checksums.copy(), root=0) if compared else checksums
        differs = np.zeros(num_chunks)  # float64, as in votes, because the kernel for this dtype is already loaded
        if self._progress is not None:
            differs[compared.start : compared.stop] = (checksums != root_checksums) | (not is_known)
            differs[self._progress.num_received or 0 :] = 1
        return np.asarray(group.all_reduce(differs, "max"))

    def _share_differences(self, group: Group, sizes: list[int]) -> None:
        """Send the chunks that differ between rank 0 and a newcomer, or that a newcomer has not received."""
        numbers = np.flatnonzero(self._compare(group, len(sizes))).tolist()
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
        part = self._step.part
        if not part or self._chunks is None:
            return
        if len(self._buffer) < self._part_bytes:
            self._buffer = torch.empty(max(self._part_bytes, MOST_BYTES), dtype=torch.uint8)
        message = self._buffer[: self._part_bytes]
        if self._progress is None:
            group.send_part(self._chunks.pack(part, message))
        elif self._chunks.num_bytes(part) == self._part_bytes:
            group.receive_part(message, partial(self._load_part, message, part))
        else:  # the other ranks' optimizers have created tensors since the description
            self._progress = HealingProgress()

    def _load_part(self, message: torch.Tensor, part: range, waited_s: float) -> None:
        assert self._chunks is not None
        assert self._progress is not None
        self._chunks.unpack(message, part)
        self._progress = self._progress.after_part(part.stop, len(message), waited_s)

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
                "iterations": strategy.iterations,
            },
            "the state for new ranks",
        )

    def load(self) -> None:
        """On a newcomer, load the values that :meth:`share` has received. Chunks are already in the tensors."""
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
        if self._step.is_last:
            strategy.join_iterations(values["iterations"])

    def _load_registered(self, tensors: StateTensors, description: dict[str, Any]) -> None:
        """Load the registered states, unless their tensors are in place or some of their chunks are missing."""
        strategy, registered, states = self._strategy, self._strategy.registered, description["registered"]
        if registered.names != [*states]:
            raise UsageError(describe_other_names(strategy.rank, registered.names, [*states]))
        own_states, own_tensors = registered.encode()
        for name, state in states.items():
            paths = [path for path in tensors.by_name if path.startswith(f"registered/{name}/")]
            received = {path.removeprefix("registered/"): tensors.by_name[path] for path in paths}
            is_in_place = own_states.get(name) == state and all(
                tensor.data_ptr() == own_tensors[path].data_ptr() for path, tensor in received.items()
            )
            if not is_in_place and (self._step.is_last or tensors.rest.issuperset(paths)):
                registered.load({name: from_json(state)}, received)

"""What ranks of a pipeline send one another: values forward, gradients back, each under a tag of its own.

Shapes are the same in every step of one kind of batch. So a value's description goes before it only when a kind is
new; from then on its receiver has the room ready, and asks ahead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UsageError
from paceline.torch.strategies.pipeline.run.values import put_together, take_apart, tensors_of

_MAX_TENSORS: Final = 14
_LENGTH, _TEXT = 14, 15
_MAX_MICROBATCHES: Final = 1 << 12
FORWARD, BACK = 0, 1


class Messages:
    """The messages of one rank in one step."""

    def __init__(self, group: Any, device: torch.device, known: dict[tuple[int, int], Any], *, is_new: bool) -> None:
        """`known` are the descriptions of values, by (route, microbatch), for this kind of batch.

        A kind that `is_new` fills it: descriptions are sent.
        """
        self._group = group
        self._device = device
        self._known = known
        self._is_new = is_new
        self._sending: list[tuple[Any, Tensor]] = []
        self._asked: dict[tuple[int, int, int, int], list[tuple[Any, Tensor]]] = {}

    def send_value(self, value: Any, what: str, route: int, microbatch: int, to: int) -> None:
        """Begin to send a value to a rank. Raises UsageError for one that cannot travel."""
        description, tensors = take_apart(value, what)
        if len(tensors) > _MAX_TENSORS:
            raise UsageError(f"{what} has {len(tensors)} tensors, at most {_MAX_TENSORS} can travel as one value")
        if self._is_new:
            text = torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)
            self._send(torch.tensor([len(text)]), to, _tag(route, microbatch, FORWARD, _LENGTH))
            self._send(text, to, _tag(route, microbatch, FORWARD, _TEXT))
        for number, tensor in enumerate(tensors):
            self._send(tensor.detach().contiguous(), to, _tag(route, microbatch, FORWARD, number))

    def ask_value(self, route: int, microbatch: int, source: int) -> None:
        """Make room for a value that will come, if its shapes are known."""
        key = (route, microbatch, FORWARD, source)
        if self._is_new or key in self._asked:
            return
        self._ask(key, tensors_of(self._known[route, microbatch]))

    def receive_value(self, route: int, microbatch: int, source: int) -> Any:
        """Return a value when it has come: its tensors are leaves that need a gradient where the source's did."""
        key = (route, microbatch, FORWARD, source)
        if self._is_new:
            length = torch.zeros(1, dtype=torch.int64)
            self._receive(length, source, _tag(route, microbatch, FORWARD, _LENGTH)).wait()
            text = torch.zeros(int(length), dtype=torch.uint8)
            self._receive(text, source, _tag(route, microbatch, FORWARD, _TEXT)).wait()
            self._known[route, microbatch] = json.loads(bytes(text.tolist()))
        description = self._known[route, microbatch]
        metas = tensors_of(description)
        if key not in self._asked:
            self._ask(key, metas)
        tensors = self._take(key)
        grads = torch.is_grad_enabled()
        for tensor, (_, _, needs_grad) in zip(tensors, metas, strict=True):
            tensor.requires_grad_(needs_grad and grads)
        return put_together(description, tensors)

    def send_grads(self, grads: Sequence[Tensor], route: int, microbatch: int, to: int) -> None:
        """Begin to send the gradients of a value's tensors, of those that need one, back to where it came from."""
        for number, grad in enumerate(grads):
            self._send(grad.contiguous(), to, _tag(route, microbatch, BACK, number))

    def ask_grads(self, like: Sequence[Tensor], route: int, microbatch: int, source: int) -> None:
        """Make room for gradients that will come, of tensors like these."""
        key = (route, microbatch, BACK, source)
        if key not in self._asked:
            self._ask(key, [(tensor.dtype, list(tensor.shape), False) for tensor in like])

    def receive_grads(self, like: Sequence[Tensor], route: int, microbatch: int, source: int) -> list[Tensor]:
        """Return gradients when they have come."""
        self.ask_grads(like, route, microbatch, source)
        return self._take((route, microbatch, BACK, source))

    def wait_sends(self, *, wait: bool) -> None:
        """Let go of what has been sent; with `wait`, when all of it has been."""
        left = []
        for work, tensor in self._sending:
            if wait:
                work.wait()
            elif not work.is_completed():
                left.append((work, tensor))
        self._sending = left

    def _ask(self, key: tuple[int, int, int, int], metas: Sequence[tuple[torch.dtype, list[int], bool]]) -> None:
        route, microbatch, direction, source = key
        self._asked[key] = []
        for number, (dtype, shape, _) in enumerate(metas):
            room = torch.empty(shape, dtype=dtype, device=self._device)
            work = self._receive(room, source, _tag(route, microbatch, direction, number))
            self._asked[key].append((work, room))

    def _take(self, key: tuple[int, int, int, int]) -> list[Tensor]:
        tensors = []
        for work, tensor in self._asked.pop(key):
            work.wait()
            tensors.append(tensor)
        return tensors

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self._sending.append((dist.isend(tensor, group=self._group, tag=tag, group_dst=to), tensor))

    def _receive(self, room: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(room, group=self._group, tag=tag, group_src=source)


def _tag(route: int, microbatch: int, direction: int, tensor: int) -> int:
    """Return the number that a message goes under: no two of a step between the same ranks have the same."""
    return ((route * _MAX_MICROBATCHES + microbatch) * 2 + direction) * (_TEXT + 1) + tensor

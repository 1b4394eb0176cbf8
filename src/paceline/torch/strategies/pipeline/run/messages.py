"""Exchange values (in forwards) and gradients (in backwards) between the ranks of a pipeline. Each message has a unique
tag. Shapes are equal in all steps with the same kind of batch. So descriptions of values are sent only for the first
batch of a kind. For later batches, receives are started before the values are needed.
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

    def __init__(self, group: Any, known: dict[tuple[int, int], Any], *, is_new: bool) -> None:
        """`known` has the descriptions of values by (route, microbatch).

        With `is_new`, messages contain descriptions.
        """
        self._group = group
        self._known = known
        self._is_new = is_new
        self._sending: list[tuple[Any, Tensor]] = []
        self._posted: dict[tuple[int, int, int, int], list[tuple[Any, Tensor]]] = {}

    def send_value(self, value: Any, label: str, route: int, microbatch: int, to: int) -> None:
        """Start to send a value to a rank. Raises UsageError for a value that cannot be sent."""
        description, tensors = take_apart(value, label)
        if len(tensors) > _MAX_TENSORS:
            raise UsageError(f"{label} has {len(tensors)} tensors: a value may have at most {_MAX_TENSORS}")
        if self._is_new:
            text = torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)
            self._send(torch.tensor([len(text)]), to, _tag(route, microbatch, FORWARD, _LENGTH))
            self._send(text, to, _tag(route, microbatch, FORWARD, _TEXT))
        for number, tensor in enumerate(tensors):
            self._send(tensor.detach().contiguous(), to, _tag(route, microbatch, FORWARD, number))

    def post_value(self, route: int, microbatch: int, source: int) -> None:
        key = (route, microbatch, FORWARD, source)
        if self._is_new or key in self._posted:
            return
        self._post(key, tensors_of(self._known[route, microbatch]))

    def receive_value(self, route: int, microbatch: int, source: int) -> Any:
        """Wait for a value. Its tensors become leaves of autograd, and need gradients as the sender's tensors do."""
        key = (route, microbatch, FORWARD, source)
        if self._is_new:
            length = torch.zeros(1, dtype=torch.int64)
            self._receive(length, source, _tag(route, microbatch, FORWARD, _LENGTH)).wait()
            text = torch.zeros(int(length), dtype=torch.uint8)
            self._receive(text, source, _tag(route, microbatch, FORWARD, _TEXT)).wait()
            self._known[route, microbatch] = json.loads(bytes(text.tolist()))
        description = self._known[route, microbatch]
        metas = tensors_of(description)
        if key not in self._posted:
            self._post(key, metas)
        tensors = self._wait_for(key)
        grads = torch.is_grad_enabled()
        for tensor, (_, _, needs_grad) in zip(tensors, metas, strict=True):
            tensor.requires_grad_(needs_grad and grads)
        return put_together(description, tensors)

    def send_grads(self, grads: Sequence[Tensor], route: int, microbatch: int, to: int) -> None:
        """Start to send gradients to the source of a value: one for each tensor of the value that needs a gradient."""
        for number, grad in enumerate(grads):
            self._send(grad.contiguous(), to, _tag(route, microbatch, BACK, number))

    def post_grads(self, like: Sequence[Tensor], route: int, microbatch: int, source: int) -> None:
        """Start to receive gradients for tensors with the shapes of `like`."""
        key = (route, microbatch, BACK, source)
        if key not in self._posted:
            self._post(key, [(tensor.dtype, list(tensor.shape), False) for tensor in like])

    def receive_grads(self, like: Sequence[Tensor], route: int, microbatch: int, source: int) -> list[Tensor]:
        self.post_grads(like, route, microbatch, source)
        return self._wait_for((route, microbatch, BACK, source))

    def wait_sends(self, *, wait: bool) -> None:
        """Release tensors whose send has ended; with `wait`, wait for the end of all sends."""
        pending = []
        for work, tensor in self._sending:
            if wait:
                work.wait()
            elif not work.is_completed():
                pending.append((work, tensor))
        self._sending = pending

    def _post(self, key: tuple[int, int, int, int], metas: Sequence[tuple[torch.dtype, list[int], bool]]) -> None:
        route, microbatch, direction, source = key
        self._posted[key] = []
        for number, (dtype, shape, _) in enumerate(metas):
            buffer = torch.empty(shape, dtype=dtype)
            work = self._receive(buffer, source, _tag(route, microbatch, direction, number))
            self._posted[key].append((work, buffer))

    def _wait_for(self, key: tuple[int, int, int, int]) -> list[Tensor]:
        tensors = []
        for work, tensor in self._posted.pop(key):
            work.wait()
            tensors.append(tensor)
        return tensors

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self._sending.append((dist.isend(tensor, group=self._group, tag=tag, group_dst=to), tensor))

    def _receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(buffer, group=self._group, tag=tag, group_src=source)


def _tag(route: int, microbatch: int, direction: int, tensor: int) -> int:
    """Return a tag that is unique among the messages of a step between two ranks."""
    return ((route * _MAX_MICROBATCHES + microbatch) * 2 + direction) * (_TEXT + 1) + tensor

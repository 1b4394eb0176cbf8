"""Compute gradients through remote calls: the backward pass follows the calls of the forward pass in reverse.

Within a :func:`context`, each process records the tensors that it sends and receives if they require a gradient.
:func:`backward` computes the gradients in this process's part of the graph, and sends the gradients of received tensors
to their senders. Each sender continues the backward pass from the tensors that it sent, and replies when its part is
done. Gradients are added to the context instead of ``.grad``, so that contexts do not affect each other.

The recorded graph is that of ``torch.distributed.autograd`` (design note "Distributed Autograd Design"). In PyTorch, a
process waits for the gradients of all messages of a context, so every message must contribute to the result. In
Paceline, a process handles the gradients of each message separately, so some messages may not contribute. The price: if
the outputs of a part of the graph were sent in k messages, backward runs through this part k times.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError, ProtocolError, UsageError
from paceline.rpc.allowed import allow, qualified_name
from paceline.rpc.futures import wait_all
from paceline.rpc.running import current_agent, current_context, in_context

_logger = logging.getLogger("paceline.rpc")
_RANK_SHIFT = 32


class GradientContext:
    """An autograd context in this process: its recorded messages and its gradients."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.lock = threading.Lock()
        self._sent: dict[int, list[torch.Tensor]] = {}
        self._received: dict[int, tuple[torch.Tensor, int, int, int]] = {}
        self._num_received: dict[tuple[int, int], int] = {}
        self._numbers = itertools.count(1)

    def record_sent(self, to: int, tensors: Sequence[torch.Tensor]) -> int:
        with self.lock:
            self.workers.add(to)
            if not tensors:
                return 0
            message = next(self._numbers)
            self._sent[message] = list(tensors)
            return message

    def record_received(self, sender: int, message: int, tensors: Sequence[torch.Tensor]) -> None:
        with self.lock:
            self._num_received[sender, message] = len(tensors)
            for index, tensor in enumerate(tensors):
                self._received[id(tensor)] = (tensor, sender, message, index)

    def sent(self, message: int) -> list[torch.Tensor]:
        with self.lock:
            if message not in self._sent:
                raise ProtocolError(f"got gradients for message {message}, which this process has not sent")
            return self._sent[message]

    def gather(
        self, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> dict[tuple[int, int], list[torch.Tensor | None]]:
        remote: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        with self.lock:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is None:
                    continue
                origin = self._received.get(id(leaf))
                if origin is not None:
                    _, sender, message, index = origin
                    values = remote.setdefault((sender, message), [None] * self._num_received[sender, message])
                    values[index] = gradient
                elif leaf in self.gradients:
                    self.gradients[leaf] = self.gradients[leaf] + gradient
                else:
                    self.gradients[leaf] = gradient.detach()
        return remote


class GradientContexts:
    """The autograd contexts in which this process takes part. Thread-safe."""

    def __init__(self) -> None:
        self._contexts: dict[int, GradientContext] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def new(self, rank: int) -> int:
        number = rank << _RANK_SHIFT | next(self._numbers)
        self.part(number)
        return number

    def part(self, number: int) -> GradientContext:
        with self._lock:
            found = self._contexts.get(number)
            if found is None:
                found = self._contexts[number] = GradientContext(number)
            return found

    def existing(self, number: int) -> GradientContext:
        with self._lock:
            if number not in self._contexts:
                raise UsageError(
                    f"autograd context {number} does not exist here: it has ended, or this process received no message"
                )
            return self._contexts[number]

    def gradients(self, number: int) -> dict[torch.Tensor, torch.Tensor]:
        with self._lock:
            found = self._contexts.get(number)
        if found is None:
            return {}
        with found.lock:
            return dict(found.gradients)

    def pop(self, number: int) -> GradientContext | None:
        with self._lock:
            return self._contexts.pop(number, None)

    def remove_worker(self, rank: int) -> None:
        with self._lock:
            for number in [number for number in self._contexts if number >> _RANK_SHIFT == rank]:
                del self._contexts[number]


contexts = GradientContexts()


@contextlib.contextmanager
def context() -> Iterator[int]:
    """Record this thread's remote calls during a ``with`` block for a backward pass.

    ``as`` binds the number of the context. Remote calls that the called functions make are recorded too. At the end of
    the block all processes delete the context. A context cannot contain another context.
    """
    agent = current_agent()
    if current_context():
        raise UsageError("this thread is in an autograd context already; contexts do not nest")
    number = contexts.new(agent.rank)
    try:
        with in_context(number):
            yield number
    finally:
        drop(number)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of `roots` in all processes of the context.

    Each root has one element. The function returns when all gradients are computed. A second call adds its gradients to
    the gradients of the first call. Graphs are always kept until the context ends, so `retain_graph` has no effect.
    Raises UsageError if a root does not require a gradient, and raises the exceptions of other processes.
    """
    part = contexts.existing(context_id)
    passed: Any = roots
    if isinstance(passed, torch.Tensor) or not passed:
        raise UsageError("roots must be a list of at least one tensor: backward(context_id, [loss])")
    for root in roots:
        if not root.requires_grad or root.numel() != 1:
            raise UsageError(
                f"got a root of shape {list(root.shape)}{'' if root.requires_grad else ' that requires no gradient'}, "
                "expected a tensor of one element that requires a gradient, for example a loss"
            )
    _run_backward(part, list(roots), [torch.ones_like(root) for root in roots])


def backward_of_root(root: Any, context_id: int, retain_graph: bool) -> None:
    """Start a backward pass from the tensor ``root``, in the process that owns it, for :meth:`RRef.backward`."""
    if not isinstance(root, torch.Tensor):
        raise UsageError(f"backward() was called on an RRef to {type(root).__name__}, expected a tensor")
    if context_id == -1:
        root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        backward(context_id, [root], retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradient of each parameter of this process in a context."""
    contexts.existing(context_id)
    return contexts.gradients(context_id)


@allow
def continue_backward(context_id: int, message: int, gradients: Sequence[torch.Tensor | None]) -> None:
    """Continue a backward pass in this process.

    The pass continues from the tensors of a message that this process has sent. `gradients` are their gradients.
    """
    part = contexts.existing(context_id)
    tensors = part.sent(message)
    if len(gradients) != len(tensors):
        raise ProtocolError(f"got {len(gradients)} gradients for a message of {len(tensors)} tensors")
    pairs = [(tensor, gradient) for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None]
    _run_backward(part, [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


@allow
def drop(context_id: int) -> None:
    part = contexts.pop(context_id)
    if part is None:
        return
    agent = current_agent()
    for worker in part.workers - {agent.rank}:
        with in_context(0):
            try:
                agent.call(worker, qualified_name(drop), (context_id,), None)
            except PacelineError as error:
                _logger.debug("an autograd context could not be ended: %s", error)


def _run_backward(part: GradientContext, outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    leaves = leaves_of(outputs)
    if not leaves:
        return
    found = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)
    agent = current_agent()
    pending = []
    with in_context(0):
        for (worker, message), sent in part.gather(leaves, found).items():
            pending.append(agent.call(worker, qualified_name(continue_backward), (part.number, message, sent), None))
        wait_all(pending)


def leaves_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves: dict[torch.Tensor, None] = {}
    seen: set[torch.autograd.graph.Node] = set()
    stack = []
    for output in outputs:
        if output.grad_fn is not None:
            stack.append(output.grad_fn)
        elif output.requires_grad:
            leaves[output] = None
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves[variable] = None
        stack += [following for following, _ in node.next_functions if following is not None]
    return list(leaves)

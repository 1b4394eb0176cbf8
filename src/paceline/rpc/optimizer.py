"""An optimizer for parameters in several processes, which uses the gradients of an autograd context."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.rpc.allowed import allow, qualified_name
from paceline.rpc.autograd import get_gradients
from paceline.rpc.futures import wait_all
from paceline.rpc.rref import RRef
from paceline.rpc.running import current_agent, in_context

_stepping = threading.Lock()
"""The lock that an optimizer step holds while it uses ``.grad`` of this process's parameters."""


class DistributedOptimizer:
    """Updates parameters in the processes that own them, like ``torch.distributed.optim.DistributedOptimizer``.

    ``with rpc.autograd.context() as c: ...; rpc.autograd.backward(c, [loss]); optimizer.step(c)``.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params_rref: Sequence[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        """Create an ``optimizer_class(parameters, *args, **kwargs)`` on each worker that owns some of the parameters.

        The class must be defined in ``torch.optim`` or in a module that all these workers allow.
        """
        if not params_rref:
            raise UsageError("the optimizer got no parameters; pass a list of RRefs to parameters")
        agent = current_agent()
        by_owner: dict[int, list[RRef[Any]]] = {}
        for rref in params_rref:
            by_owner.setdefault(rref.reference.owner, []).append(rref)
        name = qualified_name(optimizer_class)
        with in_context(0):
            self._optimizers = [
                agent.remote(owner, qualified_name(_make), (name, rrefs, args, kwargs), None)
                for owner, rrefs in by_owner.items()
            ]
            check = qualified_name(_check)
            wait_all([agent.call(rref.reference.owner, check, (rref,), None) for rref in self._optimizers])

    def step(self, context_id: int) -> None:
        """Update all parameters with the gradients of an autograd context.

        Parameters without a gradient do not change.
        """
        agent = current_agent()
        with in_context(0):
            pending = [
                agent.call(rref.reference.owner, qualified_name(_step), (rref, context_id), None)
                for rref in self._optimizers
            ]
            wait_all(pending)


class LocalOptimizer:
    """The optimizer for the parameters of one process. All optimizers of a process run their steps one at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def step(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        with _stepping:
            for parameter in self._parameters:
                parameter.grad = gradients.get(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


@allow
def _make(name: str, rrefs: Sequence[RRef[Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> LocalOptimizer:
    module, _, path = name.partition(":")
    found = getattr(torch.optim, path, None) if module.startswith("torch.optim.") else None
    kind = found if found is not None else current_agent().allowed.resolve(name)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(f"{name} is not a subclass of torch.optim.Optimizer")
    parameters = [rref.local_value() for rref in rrefs]
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor) or not parameter.is_leaf:
            raise UsageError(f"an RRef refers to {type(parameter).__name__}, expected a parameter")
    return LocalOptimizer(kind(parameters, *args, **kwargs), parameters)


@allow
def _check(optimizer: RRef[LocalOptimizer]) -> None:
    optimizer.local_value()


@allow
def _step(optimizer: RRef[LocalOptimizer], context_id: int) -> None:
    optimizer.local_value().step(get_gradients(context_id))

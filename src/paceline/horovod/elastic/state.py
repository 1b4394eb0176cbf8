"""The state of an elastic training: values that all ranks get from rank 0, and restore after a failure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from paceline.horovod.context import rank
from paceline.horovod.errors import HostsUpdatedInterrupt
from paceline.horovod.membership import elastic_group
from paceline.horovod.objects import broadcast_object, broadcast_parameters
from paceline.horovod.reductions import Max, allreduce


class State:
    """The base class of states. A subclass defines :meth:`save`, :meth:`restore` and :meth:`sync`."""

    num_commits = 0
    """The number of calls of :meth:`commit` on this rank."""

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank
    ) -> None:
        """`bcast_object` returns the object of rank 0. `get_rank` has no effect; Horovod's subclasses pass it."""
        self._broadcast = bcast_object
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to call after each change of the ranks, for example to set the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call :meth:`reset` and the reset callbacks. :func:`run` calls this method after a change of the ranks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, and raise HostsUpdatedInterrupt if new ranks wait. All ranks must call this method."""
        self.save()
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if new ranks wait. All ranks must call this method."""
        group = elastic_group()
        if group is not None and allreduce(torch.tensor(int(group.newcomers_wait)), name="elastic.newcomers", op=Max):
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keep a copy of the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last saved copy of the state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send the state of rank 0 to all ranks, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt a subclass to a change of the ranks. The default does nothing."""


class ObjectState(State):
    """A state of named values, which are attributes of this object.

    :meth:`sync` sends the ``state_dict`` of each model, and of each other value that has ``state_dict`` and
    ``load_state_dict``, such as an optimizer, a scheduler or a sampler. It sends the remaining values by
    :func:`~paceline.horovod.broadcast_object`.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
            self._saved[name] = _copy(value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_saved", ()) and _is_stateful(value):
            self._saved[name] = _copy(value)  # a new object cannot load the old object's state

    @override
    def save(self) -> None:
        self._saved = {name: _copy(getattr(self, name)) for name in self._saved}

    @override
    def restore(self) -> None:
        for name, saved in self._saved.items():
            value = getattr(self, name)
            if _is_stateful(value):
                value.load_state_dict(copy.deepcopy(saved))
            else:
                setattr(self, name, copy.deepcopy(saved))

    @override
    def sync(self) -> None:
        plain_values: dict[str, Any] = {}
        for name in self._saved:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif _is_stateful(value):
                value.load_state_dict(self._broadcast(value.state_dict()))
            else:
                plain_values[name] = value
        for name, value in self._broadcast(plain_values).items():
            setattr(self, name, value)
        self.save()


class TorchState(ObjectState):
    """The state of a training with PyTorch. Pass further models, optimizers and values by name."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _copy(value: Any) -> Any:
    return copy.deepcopy(value.state_dict() if _is_stateful(value) else value)

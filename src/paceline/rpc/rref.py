"""RRef: a reference to an object that one process owns and other processes use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from msgspec.msgpack import Ext

from paceline.environment import Timeout
from paceline.errors import ProtocolError, UsageError
from paceline.rpc.allowed import allow, qualified_name
from paceline.rpc.counting import ReferenceId
from paceline.rpc.futures import Future
from paceline.rpc.references import Holding
from paceline.rpc.running import LocalWorker, current_agent
from paceline.rpc.wire.codec import REFERENCE, CannotSendError, Decoding, Encoding, add_kind
from paceline.rpc.workers import WorkerInfo

_Value = TypeVar("_Value")
_Begin = Callable[[str, Sequence[Any], dict[str, Any]], Any]


class RRef(Generic[_Value]):
    """A reference to an object that one worker owns. An RRef keeps the object alive, and can be sent to other workers.

    ``RRef(value)`` creates a reference to an object of this process.
    """

    __slots__ = ("__weakref__", "_agent", "_holding")

    def __init__(self, value: _Value, type_hint: Any = None) -> None:
        """`type_hint` has no effect. It exists because programs for torch.distributed.rpc may pass it."""
        agent = current_agent()
        self._agent = agent
        self._holding = agent.own(value)

    @classmethod
    def of_holding(cls, holding: Holding, agent: LocalWorker) -> RRef[Any]:
        rref: RRef[Any] = cls.__new__(cls)
        rref._agent, rref._holding = agent, holding
        return rref

    @property
    def agent(self) -> LocalWorker:
        return self._agent

    @property
    def reference(self) -> ReferenceId:
        return self._holding.reference

    @property
    def creation(self) -> Future[Any] | None:
        """The reply to the call that created the object; None if another process created it."""
        return self._holding.creation

    def owner(self) -> WorkerInfo:
        """Return the worker that owns the object."""
        return self._agent.directory.workers[self.reference.owner]

    def owner_name(self) -> str:
        """Return the owner's name."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Return whether this process owns the object."""
        return self.reference.owner == self._agent.rank

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has confirmed the object's creation."""
        return self.creation is None or (self.creation.done() and self.creation.exception() is None)

    def to_here(self, timeout: Timeout | None = None) -> _Value:
        """Wait until the object exists, and return a copy of it. In the owner's process, return the object itself.

        Raises the exception that prevented the object's creation, DeadlineError after `timeout`, ConnectionLostError if
        the owner died, or UsageError if the object was freed.
        """
        value: _Value = self._agent.fetch(self, timeout).wait(self._agent.seconds_of(timeout))
        return value

    def local_value(self) -> _Value:
        """Return the object itself. Raises UsageError in processes that do not own the object."""
        if not self.is_owner():
            raise UsageError(
                f"local_value() was called on worker {self._agent.name!r}, but the object lives on "
                f"{self.owner_name()!r}; call to_here() for a copy, or run a function on the owner"
            )
        value: _Value = self._agent.table.value(self.reference).wait(self._agent.seconds_of(None))
        return value

    def rpc_sync(self, timeout: Timeout | None = None) -> Methods:
        """Return a proxy: ``rref.rpc_sync().method(1)`` calls the object's method at its owner and waits for the
        result.
        """
        return Methods(self, functools.partial(_call_and_wait, self._agent, self, timeout))

    def rpc_async(self, timeout: Timeout | None = None) -> Methods:
        """Return a proxy: ``rref.rpc_async().method(1)`` calls the object's method and returns a :class:`Future`."""
        return Methods(self, functools.partial(_call, self._agent, self, timeout))

    def remote(self, timeout: Timeout | None = None) -> Methods:
        """Return a proxy: ``rref.remote().method(1)`` calls the object's method and returns an :class:`RRef`."""
        return Methods(self, functools.partial(_make, self._agent, self, timeout))

    def backward(self, context_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the referenced tensor, which must have one element, in an autograd context.

        See :func:`paceline.rpc.autograd.backward`. Without `context_id`, the owner adds the gradients to ``.grad``.
        """
        if self.is_owner():
            from paceline.rpc.autograd import backward_of_root

            backward_of_root(self.local_value(), context_id, retain_graph)
        else:
            call = qualified_name(_backward_at_owner)
            self._agent.call(self.reference.owner, call, (self, context_id, retain_graph), None).wait()

    def __reduce__(self) -> Any:
        raise TypeError("an RRef cannot be pickled or copied; pass it to a call as an argument")

    def __repr__(self) -> str:
        _, creator, number = self.reference
        return f"RRef(object {creator}.{number} of worker {self.owner_name()!r})"


@allow
def _backward_at_owner(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)


class Methods:
    """A proxy whose attributes are the methods of a remote object."""

    def __init__(self, rref: RRef[Any], call: _Begin) -> None:
        self._rref, self._call = rref, call

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        return RemoteMethod(self._rref, name, self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)


class RemoteMethod:
    """A method of a remote object. The caller calls it, or passes it to ``rpc_async`` and similar functions."""

    __slots__ = ("_call", "name", "rref")

    def __init__(self, rref: RRef[Any], name: str, call: _Begin) -> None:
        self.rref, self.name, self._call = rref, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.name, args, kwargs)


def _call(
    agent: LocalWorker, rref: RRef[Any], timeout: Timeout | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Future[Any]:
    return agent.call(rref.reference.owner, (rref, name), args, kwargs, timeout)


def _call_and_wait(
    agent: LocalWorker, rref: RRef[Any], timeout: Timeout | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    return agent.call(rref.reference.owner, (rref, name), args, kwargs, timeout, is_blocking=True).wait()


def _make(
    agent: LocalWorker, rref: RRef[Any], timeout: Timeout | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    return agent.remote(rref.reference.owner, (rref, name), args, kwargs, timeout)


def _pack_reference(encoding: Encoding, value: RRef[Any]) -> Any:
    if value.agent is not encoding.agent:
        raise CannotSendError("it is an RRef of an rpc session that was shut down; create it again")
    encoding.references.append(value)
    return Ext(REFERENCE, encoding.nested(list(value.reference)))


def _unpack_reference(decoding: Decoding, data: memoryview) -> RRef[Any]:
    agent: LocalWorker | None = decoding.agent
    if agent is None:
        raise ProtocolError("got an RRef where RRefs are not supported")
    return RRef.of_holding(agent.table.receive(decoding.nested(data)), agent)


add_kind(REFERENCE, (RRef,), _pack_reference, _unpack_reference)

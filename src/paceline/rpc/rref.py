"""RRef: a reference to an object that lives in one process, its owner, and is used from many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec.msgpack import Ext

from paceline.errors import ProtocolError, UsageError
from paceline.rpc.codec import REFERENCE, Decoding, Encoding, add_kind, cannot_send
from paceline.rpc.counting import ReferenceId
from paceline.rpc.futures import Future
from paceline.rpc.references import Holding
from paceline.rpc.running import current_agent

if TYPE_CHECKING:
    from paceline.rpc.agent import Agent
    from paceline.rpc.workers import WorkerInfo

_Value = TypeVar("_Value")


class RRef(Generic[_Value]):
    """A reference to an object of one worker; it may be passed to others, and keeps the object alive.

    ``RRef(value)`` refers to an object of this process.
    """

    __slots__ = ("__weakref__", "_agent", "_holding")

    def __init__(self, value: _Value) -> None:
        agent = current_agent()
        self._agent = agent
        self._holding = agent.own(value)

    @classmethod
    def of_holding(cls, holding: Holding, agent: Agent) -> RRef[Any]:
        """Return a reference to an object that this process holds."""
        rref: RRef[Any] = cls.__new__(cls)
        rref._agent, rref._holding = agent, holding
        return rref

    @property
    def agent(self) -> Agent:
        """Return the part in rpc that this is of."""
        return self._agent

    @property
    def reference(self) -> ReferenceId:
        """Which object this is."""
        return self._holding.reference

    @property
    def made(self) -> Future[Any] | None:
        """Return the answer to the call that made the object, where this process has asked another one for it."""
        return self._holding.made

    def owner(self) -> WorkerInfo:
        """Return the worker where the object lives."""
        return self._agent.worker_of(self.reference.owner)

    def owner_name(self) -> str:
        """Return that worker's name."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Return whether the object lives in this process."""
        return self.reference.owner == self._agent.rank

    def to_here(self, timeout: timedelta | None = None) -> _Value:
        """Return a copy of the object; at its owner, the object itself. Waits until it has been made.

        Raises what its making raised, DeadlineError, ConnectionLostError (the owner died) or UsageError (it is gone).
        """
        value: _Value = self._agent.fetch(self, timeout).wait(self._agent.timeout if timeout is None else timeout)
        return value

    def local_value(self) -> _Value:
        """Return the object, at its owner. Raises UsageError elsewhere."""
        if not self.is_owner():
            raise UsageError(
                f"local_value() was called on worker {self._agent.name!r}, the object lives on {self.owner_name()!r}; "
                "call to_here() for a copy, or run a function there"
            )
        value: _Value = self._agent.local_value(self.reference).wait(self._agent.timeout)
        return value

    def rpc_sync(self, timeout: timedelta | None = None) -> Methods:
        """Return what calls a method of the object at its owner and waits: ``rref.rpc_sync().method(1)``."""
        return Methods(functools.partial(_call_and_wait, self._agent, self, timeout))

    def rpc_async(self, timeout: timedelta | None = None) -> Methods:
        """Return what calls a method of the object at its owner, and gives a :class:`Future` of the result."""
        return Methods(functools.partial(_call, self._agent, self, timeout))

    def remote(self, timeout: timedelta | None = None) -> Methods:
        """Return what calls a method of the object at its owner, and gives an :class:`RRef` to the result."""
        return Methods(functools.partial(_make, self._agent, self, timeout))

    def __repr__(self) -> str:
        _, creator, number = self.reference
        return f"RRef(object {creator}.{number} of worker {self.owner_name()!r})"


class Methods:
    """The methods of an object elsewhere, by name."""

    def __init__(self, call: Callable[[str, Sequence[Any], dict[str, Any]], Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(_pass_on, self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object itself."""
        return self._call("__call__", args, kwargs)


def _pass_on(call: Callable[[str, Sequence[Any], dict[str, Any]], Any], name: str, *args: Any, **kwargs: Any) -> Any:
    return call(name, args, kwargs)


def _call(
    agent: Agent, rref: RRef[Any], timeout: timedelta | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Future[Any]:
    return agent.call(rref.reference.owner, (rref, name), args, kwargs, timeout)


def _call_and_wait(
    agent: Agent, rref: RRef[Any], timeout: timedelta | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    return agent.call(rref.reference.owner, (rref, name), args, kwargs, timeout, is_awaited=True).wait()


def _make(
    agent: Agent, rref: RRef[Any], timeout: timedelta | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> RRef[Any]:
    return agent.remote(rref.reference.owner, (rref, name), args, kwargs, timeout)


def _pack_reference(encoding: Encoding, value: RRef[Any]) -> Any:
    if value.agent is not encoding.agent:
        raise cannot_send("it is an RRef of an rpc that was shut down; make it again")
    encoding.references.append(value)
    return Ext(REFERENCE, encoding.nested(list(value.reference)))


def _unpack_reference(decoding: Decoding, data: memoryview) -> RRef[Any]:
    agent: Agent | None = decoding.agent
    if agent is None:
        raise ProtocolError("got an RRef where none can be")
    return RRef.of_holding(agent.table.receive(decoding.nested(data)), agent)


add_kind(REFERENCE, (RRef,), _pack_reference, _unpack_reference)

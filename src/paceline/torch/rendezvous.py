"""The rendezvous backend ``paceline`` of torchrun: its agents meet at Paceline's scheduler or coordinator.

    torchrun --nnodes 1:4 --max-restarts 3 --rdzv-backend paceline --rdzv-endpoint node0:7337 train.py

torchrun's own :class:`DynamicRendezvousHandler` decides which nodes train. This module only stores its state. If the
server is unreachable, the agents continue with the last state that they have seen. When a new server has started at
the same address, the first agent that connects gives it this state.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Final, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
    create_handler,
)
from typing_extensions import override

from paceline.environment import environment, naming
from paceline.errors import AddressError, ConnectionLostError, DeadlineError, PacelineError
from paceline.meeting.network_store import AGENT, NetworkStore
from paceline.meeting.own_launcher import coordinator_token
from paceline.meeting.rendezvous import parse_place
from paceline.transport import TLS, Address
from paceline.transport.backoff import reach
from paceline.transport.security.authentication import Hello

_Result = TypeVar("_Result")
_ANSWER_S: Final = 3.0
"""Time limit of a request. torchrun declares a node lost that has not written the state for 15 seconds."""
_PATIENCE_S: Final = 60.0
"""The time for which agents wait for the server."""
_CHECK_S: Final = 2.0
"""The interval at which a waiting agent checks that the server has its values."""


class ServerStore(NetworkStore):
    """The agent's access to the server, which may end and start again between two calls or during a call.

    Calls of the main thread wait up to `patience_s` for the server. Other threads do not wait, because they write
    torchrun's heartbeats, and torchrun continues without them.
    """

    def __init__(self, address: Address, token: str, tls: TLS | None, patience_s: float) -> None:
        self._patience_s = patience_s
        hello = Hello(role=AGENT, name="torchrun")
        super().__init__(address, token, hello, timeout_s=_ANSWER_S, answer_s=_ANSWER_S, tls=tls)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        return self._repeat(lambda: NetworkStore.collect(self, keys, deadline))

    @override
    def replace(self, key: str, expected: bytes | None, value: bytes) -> tuple[bool, bytes | None]:
        return self._repeat(lambda: NetworkStore.replace(self, key, expected, value))

    def read_now(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is not set. Do not wait for the server."""
        return self._on_live_connection(lambda: NetworkStore.collect(self, [key], time.monotonic())[0])

    def _repeat(self, call: Callable[[], _Result]) -> _Result:
        patience_s = self._patience_s if threading.current_thread() is threading.main_thread() else 0.0
        return reach(lambda: self._on_live_connection(call), patience_s, name=f"the scheduler at {self.place}")

    def _on_live_connection(self, call: Callable[[], _Result]) -> _Result:
        """Repeat a call that fails on connections to an earlier server."""
        while self._idle:
            with contextlib.suppress(ConnectionLostError):
                return call()
        return call()


class Backend(RendezvousBackend):
    """Stores the state of one rendezvous under one key. The fencing token of a state is the state itself."""

    def __init__(self, store: ServerStore, run_id: str) -> None:
        self._store, self._key = store, f"torchrun {run_id}"
        self._last: bytes | None = None
        """The last state that this agent has seen."""

    @property
    @override
    def name(self) -> str:
        return "paceline"

    @override
    def get_state(self) -> tuple[bytes, Token] | None:
        try:
            state = self._store.read_now(self._key) if self._last else self._store.collect([self._key], 0.0)[0]
            if state is None and self._last is not None:  # a new server
                _, state = self._store.replace(self._key, None, with_new_heartbeats(self._last))
        except PacelineError as error:
            if self._last is not None and isinstance(error, (AddressError, ConnectionLostError, DeadlineError)):
                return with_new_heartbeats(self._last), self._last
            raise RendezvousConnectionError(str(error)) from error
        self._last = state
        return None if state is None else (state, state)

    @override
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool]:
        expected = token if isinstance(token, bytes) else None
        try:
            _, current = self._store.replace(self._key, expected, state)
            if current is None:  # a new server
                _, current = self._store.replace(self._key, None, state)
        except PacelineError as error:
            raise RendezvousConnectionError(str(error)) from error
        assert current is not None
        self._last = current
        return current, current, current == state


def with_new_heartbeats(state: bytes) -> bytes:
    """Return an encoded state of torchrun in which all nodes have written a heartbeat now.

    Without a server, nodes could not write heartbeats, so torchrun would declare them lost.
    """
    found: Any = pickle.loads(state)  # torchrun decodes it in the same way
    now = datetime.now(timezone.utc)
    found.last_heartbeats = dict.fromkeys(found.last_heartbeats, now)
    return pickle.dumps(found)


class AgentStore(Store):
    """The store with which the agents of a rendezvous number their workers, on Paceline's server.

    Values may be written repeatedly.
    """

    def __init__(self, store: ServerStore) -> None:
        super().__init__()
        self._store = store
        self._written: dict[str, bytes] = {}
        """This agent's values, for a new server."""

    def _update(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        return self._store.update(key, change)

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self._written[key] = self._update(key, lambda _: value.encode() if isinstance(value, str) else value)

    @override
    def add(self, key: str, amount: int) -> int:
        return int(self._update(key, lambda value: str(int(value or 0) + amount).encode()))

    @override
    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    @override
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._collect(keys, self.timeout)  # type: ignore[attr-defined]  # torch's types lack it

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._store.collect(keys, time.monotonic())

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._collect(keys, timeout or self.timeout)  # type: ignore[attr-defined]

    def _collect(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            values = self._store.collect(keys, min(deadline, time.monotonic() + _CHECK_S))
            found = [value for value in values if value is not None]
            if len(found) == len(keys):
                return found
            if time.monotonic() >= deadline:
                missing = keys[values.index(None)]
                raise DistStoreError(f"no agent has set {missing!r} within {timeout.total_seconds():g} s")
            for key, value in self._written.items():  # a new server lacks them, and other agents may wait for them
                self._store.replace(key, None, value)


def create(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create torchrun's handler of a rendezvous at ``--rdzv-endpoint``.

    The token is ``PACELINE_TOKEN``. Without it, agents and server must be on one machine. Raises UsageError for a wrong
    address or a missing token, DeadlineError if no server answers, and AuthenticationError for a wrong token.
    """
    settings = environment()
    with naming("--rdzv-endpoint"):
        address = parse_place(params.endpoint)
    token, tls = coordinator_token(address, settings), TLS.of_environment(settings)
    name = f"the scheduler at {address.netloc} (--rdzv-endpoint)"
    store = reach(lambda: ServerStore(address, token, tls, _PATIENCE_S), _PATIENCE_S, name=name)
    return create_handler(AgentStore(store), Backend(store, params.run_id), params)

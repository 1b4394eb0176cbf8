"""torchrun's agents meet at Paceline's server, which may end and start again."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any, Final

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from paceline.errors import UsageError
from paceline.meeting.network_store import StoreServer
from paceline.torch.rendezvous import AgentStore, Backend, ServerStore, create
from paceline.transport import Address
from paceline.transport.security.authentication import Hello

TOKEN: Final = "a token of the tests of torchrun"


class Server:
    """A server that can end, and start again without its values at the same address."""

    def __init__(self) -> None:
        self._place = Address("tcp", "127.0.0.1", 0)
        self.start()

    def start(self) -> None:
        self._server = StoreServer(self._place, TOKEN, Hello(role="scheduler"))
        self._place = self._server.address

    def end(self) -> None:
        self._server.close()

    def restart(self) -> None:
        self.end()
        self.start()

    def connect(self) -> ServerStore:
        return ServerStore(self._place, TOKEN, None, patience_s=0.5)

    @property
    def endpoint(self) -> str:
        return self._place.netloc


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.end()


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[[], ServerStore]]:
    stores: list[ServerStore] = []

    def new() -> ServerStore:
        stores.append(server.connect())
        return stores[-1]

    yield new
    for store in stores:
        store.close()


def state(round: int, heartbeat: datetime | None = None) -> bytes:
    found = _RendezvousState()
    found.round = round
    found.last_heartbeats = {_NodeDesc("here", 1, 1): heartbeat or datetime.now(timezone.utc)}
    return pickle.dumps(found)


def round_of(found: tuple[bytes, Any] | None) -> int:
    assert found is not None
    return int(pickle.loads(found[0]).round)


def test_only_the_agent_with_the_current_state_changes_it(connect: Callable[[], ServerStore]) -> None:
    first, second = Backend(connect(), "run"), Backend(connect(), "run")
    assert first.get_state() is None
    old, token, is_set = first.set_state(state(1))
    assert is_set
    assert second.set_state(state(2)) == (old, token, False)
    assert second.set_state(state(3), token)[2]
    assert first.set_state(state(4), token)[2] is False
    assert round_of(first.get_state()) == 3
    assert Backend(connect(), "another run").get_state() is None


def test_a_new_server_receives_the_state_with_new_heartbeats(
    server: Server, connect: Callable[[], ServerStore]
) -> None:
    first, second = Backend(connect(), "run"), Backend(connect(), "run")
    long_ago = datetime.now(timezone.utc) - timedelta(hours=1)
    token = first.set_state(state(5, long_ago))[1]
    second.get_state()
    server.restart()
    assert second.set_state(state(6), token)[2], "an agent that writes first"
    server.restart()
    found = first.get_state()
    assert round_of(found) == 5
    assert found is not None
    assert min(pickle.loads(found[0]).last_heartbeats.values()) > long_ago + timedelta(minutes=50)
    assert second.get_state() == found, "the state of the first agent counts"


def test_without_a_server_agents_see_the_last_state_and_cannot_write(
    server: Server, connect: Callable[[], ServerStore]
) -> None:
    with_state, without_state = Backend(connect(), "run"), Backend(connect(), "run")
    with_state.set_state(state(7))
    server.end()
    assert round_of(with_state.get_state()) == 7
    for call in (lambda: with_state.set_state(state(8)), without_state.get_state):
        with pytest.raises(RendezvousConnectionError, match="127"):
            call()
    server.start()
    assert round_of(with_state.get_state()) == 7


def test_agents_share_values(connect: Callable[[], ServerStore]) -> None:
    stores = [AgentStore(connect()) for _ in range(4)]
    prefixed = [PrefixStore("round 1", store) for store in stores]
    with ThreadPoolExecutor() as pool:
        numbers = [*pool.map(lambda store: store.add("members", 1), prefixed)]
    assert sorted(numbers) == [1, 2, 3, 4]
    prefixed[0].set("a", "1")
    prefixed[1].set("a", "2")
    stores[1].multi_set(["round 1/b"], [b"3"])
    assert prefixed[2].multi_get(["a", "b"]) == [b"2", b"3"]
    prefixed[3].wait(["a"], timedelta(seconds=1))
    assert stores[0].check(["round 1/a"])
    assert not stores[0].check(["a"])
    prefixed[0].set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreError, match="nothing"):
        prefixed[0].get("nothing")


def test_nodes_form_a_world(
    server: Server, connect: Callable[[], ServerStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    monkeypatch.setattr("paceline.torch.rendezvous.ServerStore", lambda *place, **options: connect())
    options = {"last_call_timeout": 1, "join_timeout": 20}
    parameters = RendezvousParameters("paceline", server.endpoint, "run", 2, 2, "127.0.0.1", **options)
    handlers = [create(parameters) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        worlds = [*pool.map(lambda handler: handler.next_rendezvous(), handlers)]
    assert sorted((world.rank, world.world_size) for world in worlds) == [(0, 2), (1, 2)]
    for handler in handlers:
        assert handler.shutdown()


def test_a_new_server_receives_the_values_that_agents_wait_for(
    server: Server, connect: Callable[[], ServerStore]
) -> None:
    stores = [AgentStore(connect()) for _ in range(2)]
    stores[0].set("0", "first")
    server.restart()
    stores[1].set("1", "second")

    def read(store: AgentStore) -> list[bytes]:
        store.set_timeout(timedelta(seconds=20))
        return store.multi_get(["0", "1"])

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(read, stores)] == [[b"first", b"second"]] * 2


@pytest.mark.parametrize("endpoint", ["127.0.0.1:0", "node0", ""])
def test_an_endpoint_without_a_port_is_an_error(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        create(RendezvousParameters("paceline", endpoint, "run", 1, 2))

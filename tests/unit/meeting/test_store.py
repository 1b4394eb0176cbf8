"""The store of keys and values through which ranks exchange data."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.errors import AuthenticationError, DeadlineError, GroupClosedError, RankLostError, UsageError
from paceline.meeting.group_names import GroupNames
from paceline.meeting.network_store import NetworkStore, StoreServer
from paceline.meeting.store import MemoryStore, PrefixStore, SealedStore, Store, exchange
from paceline.transport import Address, Hello

_TOKEN = "a token for tests"
PATIENCE_S = 60.0


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def served() -> NetworkStore:
    hello = Hello(role="rank")
    server = StoreServer(Address("tcp", "127.0.0.1", 0), _TOKEN, hello)
    return NetworkStore(server.address, _TOKEN, hello, timeout_s=PATIENCE_S, server=server)


@pytest.fixture(params=["memory", "prefix", "network", "sealed"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    threads = threading.active_count()
    made: Store = served() if request.param == "network" else MemoryStore()
    if request.param == "sealed":
        made = SealedStore(made, _TOKEN)
    yield PrefixStore(made, "part") if request.param == "prefix" else made
    made.close()
    made.close()
    assert threading.active_count() == threads


def test_stored_values_are_returned(store: Store) -> None:
    store.set("key", b"value")
    store.set("empty", b"")
    store.set("large", bytes(1 << 20))
    assert store.get("key", soon()) == b"value"
    assert store.get("key", 0.0) == b"value"
    assert store.get("empty", soon()) == b""
    assert store.get("large", soon()) == bytes(1 << 20)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of policies, in Python 3.14
def test_a_store_is_served_with_another_default_event_loop() -> None:
    uvloop = pytest.importorskip("uvloop")
    policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        store = served()
        store.set("key", b"value")
        assert store.get("key", soon()) == b"value"
        store.close()
    finally:
        asyncio.set_event_loop_policy(policy)


def test_a_key_is_written_once(store: Store) -> None:
    store.set("key", b"value")
    store.set("key", b"value")
    with pytest.raises(UsageError, match=r"'.*key' is already set"):
        store.set("key", b"other")
    assert store.get("key", soon()) == b"value"
    store.delete("key")
    store.delete("key")
    store.set("key", b"other")
    assert store.get("key", soon()) == b"other"


def test_a_get_waits_for_the_key_and_delays_no_other_call(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.get, f"key {number // 2}", soon()) for number in range(8)]
        for number in range(4):
            store.set(f"key {number}", b"%d" % number)
        assert [future.result(PATIENCE_S) for future in waiting] == [b"%d" % (number // 2) for number in range(8)]


@pytest.mark.parametrize("wait_s", [0.05, -1.0])
def test_a_missing_key_is_named(store: Store, wait_s: float) -> None:
    with pytest.raises(DeadlineError, match=r"'.*address of rank 3'.* not set"):
        store.get("address of rank 3", soon(wait_s))
    store.set("address of rank 3", b"here")
    assert store.get("address of rank 3", soon()) == b"here"


def test_stores_with_different_prefixes_are_separate() -> None:
    whole = MemoryStore()
    first, second = PrefixStore(whole, "first"), PrefixStore(whole, "second")
    first.set("key", b"1")
    second.set("key", b"2")
    assert first.get("key", soon()) == b"1"
    assert whole.get("second/key", soon()) == b"2"
    first.close()
    assert second.get("key", soon()) == b"2"


def test_a_sealed_store_rejects_values_written_without_the_token() -> None:
    open_to_all = MemoryStore()
    store, stranger = SealedStore(open_to_all, _TOKEN), SealedStore(open_to_all, "another token")
    store.set("address of rank 0", b"here")
    with pytest.raises(AuthenticationError, match="without this program's token; set PACELINE_TOKEN"):
        stranger.get("address of rank 0", soon())
    open_to_all.set("address of rank 2", open_to_all.get("address of rank 0", soon()))  # copied
    open_to_all.set("address of rank 3", b"")
    for rank in (2, 3):
        with pytest.raises(AuthenticationError):
            store.get(f"address of rank {rank}", soon())


def test_exchange_returns_all_values_to_every_rank(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        values = [
            pool.submit(exchange, store, rank, 4, b"%d" % rank, soon(), description="group 'all'") for rank in range(4)
        ]
        assert [value.result() for value in values] == [[b"0", b"1", b"2", b"3"]] * 4


def test_exchange_names_missing_ranks(store: Store) -> None:
    store.set("group 'all'/rank 2", b"2")
    with pytest.raises(RankLostError, match="ranks 1 and 3 of 4 did not come to group 'all'") as lost:
        exchange(store, 0, 4, b"0", soon(0.05), description="group 'all'")
    assert lost.value.ranks == (1, 3)


def test_collect_waits_for_all_keys_and_returns_none_for_missing_keys(store: Store) -> None:
    store.set("a", b"1")
    assert store.collect(["a", "b"], 0.0) == [b"1", None]
    assert store.collect(["b", "a"], soon(0.05)) == [None, b"1"]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store.collect, ["a", "b", "c"], soon()) for _ in range(3)]
        store.set("b", b"")
        store.set("c", b"3")
        assert [future.result(PATIENCE_S) for future in waiting] == [[b"1", b"", b"3"]] * 3
    assert store.collect([], 0.0) == []


def test_an_exchange_checks_periodically_whether_the_missing_ranks_live(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.meeting.store._FIRST_CHECK_S", 0.05)
    monkeypatch.setattr("paceline.meeting.store._CHECK_INTERVAL_S", 0.05)
    checks: list[Sequence[int]] = []

    def check(missing: Sequence[int]) -> None:
        checks.append(missing)
        if len(checks) == 3:
            raise ZeroDivisionError

    store.set("here/rank 2", b"2")
    with pytest.raises(ZeroDivisionError):
        exchange(store, 0, 3, b"0", soon(), description="here", check=check)
    assert checks == [(1,)] * 3


def test_an_exchange_over_the_network_takes_two_requests_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 16
    owner = served()
    joiners = [
        NetworkStore(owner.address, _TOKEN, Hello(role="rank", rank=rank), timeout_s=PATIENCE_S)
        for rank in range(1, size)
    ]
    requests: list[object] = []
    real = NetworkStore.call

    def count(*given: Any, **parts: Any) -> Any:
        requests.append(given[1])
        return real(*given, **parts)

    monkeypatch.setattr(NetworkStore, "call", count)
    with ThreadPoolExecutor(size) as pool:
        values = [
            pool.submit(exchange, store, rank, size, b"%d" % rank, soon(), description="it")
            for rank, store in enumerate([owner, *joiners])
        ]
        assert all(value.result(PATIENCE_S) == [b"%d" % rank for rank in range(size)] for value in values)
    assert len(requests) == 2 * size
    for store in [*joiners, owner]:
        store.close()


def test_the_network_store_requires_the_token() -> None:
    store = served()
    with pytest.raises(AuthenticationError):
        NetworkStore(store.address, "another token for tests", Hello(role="rank", rank=1), timeout_s=PATIENCE_S)
    store.close()


def test_closing_wakes_waiting_threads() -> None:
    owner = served()
    other = NetworkStore(owner.address, _TOKEN, Hello(role="rank", rank=1), timeout_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.get, "never", soon())
        other.set("key", b"")  # the get may not have its connection yet; both calls may use separate connections
        other.close()
        with pytest.raises(GroupClosedError):
            waiting.result(PATIENCE_S)
    with pytest.raises(GroupClosedError):
        other.set("key", b"")
    owner.close()


def test_the_owner_waits_until_other_ranks_have_closed_the_store() -> None:
    owner = served()
    other = NetworkStore(owner.address, _TOKEN, Hello(role="rank", rank=1), timeout_s=PATIENCE_S)
    owner.set("key", b"value")
    closing = threading.Thread(target=owner.close)
    closing.start()
    assert other.get("key", soon()) == b"value"
    other.close()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_late_rank_reads_the_numbers_of_the_right_groups() -> None:
    """One rank creates all its groups before the other rank reads the number of the first group."""
    store = MemoryStore()
    is_made = threading.Event()

    class Late(PrefixStore):
        def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
            assert is_made.wait(PATIENCE_S)
            return super().collect(keys, deadline)

    def make(rank: int) -> list[str]:
        names = GroupNames(Late(store, "all") if rank else PrefixStore(store, "all"), rank, "all", lambda _: None)
        made = []
        for _ in range(3):
            with names.next((0, 1), "", PATIENCE_S) as name:
                made.append(name)
        is_made.set()
        return made

    with ThreadPoolExecutor(2) as pool:
        made = [future.result(2 * PATIENCE_S) for future in [pool.submit(make, rank) for rank in range(2)]]
    assert made == [["all/0,1#1", "all/0,1#2", "all/0,1#3"]] * 2

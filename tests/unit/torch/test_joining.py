"""Ranks that share one of PyTorch's stores, which accepts every client, derive a common token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore  # noqa: E402

from paceline.environment import Environment  # noqa: E402
from paceline.errors import AuthenticationError, PacelineError, UsageError  # noqa: E402
from paceline.meeting.credentials import user_key  # noqa: E402
from paceline.testing import nothing_left  # noqa: E402
from paceline.torch.backend.registration import join_through  # noqa: E402

TIMEOUT = timedelta(seconds=20)
SECRET = "a secret of this user"


def values_of(store: Store) -> str:
    """Return all values that a process without the token can read, as text."""
    found = [store.get(key) for key in store.list_keys()] if isinstance(store, TCPStore) else []
    return "\n".join(
        f"{value.decode(errors='replace')} {bytes.fromhex(value[1:].decode()) if value[:1] == b'=' else b''!r}"
        for value in found
    )


def joined(stores: list[Store], environments: list[Environment]) -> list[BaseException | int]:
    """Join through the stores, all-reduce and leave; return the sum or the error of every rank."""

    def rank(number: int) -> BaseException | int:
        try:
            group = join_through(stores[number], number, len(stores), "test", TIMEOUT, variables=environments[number])
        except PacelineError as error:
            return error
        with group:
            return sum(map(int, group.all_gather_objects(number + 1)))

    with nothing_left(), ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(rank, range(len(stores))))


def test_ranks_join_with_a_token_that_is_not_in_the_store() -> None:
    served = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    clients = [TCPStore("127.0.0.1", served.port, None, False, timedelta(seconds=10)) for _ in range(2)]
    seen: list[str] = []

    def join_rank(number: int) -> int:
        group = join_through(clients[number], number, 2, "test", TIMEOUT, variables=Environment(token=SECRET))
        with group:
            group.barrier()
            if number == 0:
                seen.append(values_of(served))
            return sum(group.all_gather_objects(1))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join_rank, range(2))) == [2, 2]
    (text,) = seen
    assert "memory_domain" in text  # the store contains the description of each rank
    assert SECRET not in text


def test_the_variable_of_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(UsageError, match=r"PACELINE_ALGORITHM: .*'typo'"):
        join_through(HashStore(), 0, 1, "test", TIMEOUT, variables=Environment(token=SECRET, algorithm="typo"))


@pytest.mark.parametrize("tokens", [("one secret of many", "another secret of many"), (None, SECRET), (SECRET, None)])
def test_another_token_is_refused(tmp_path: Path, tokens: tuple[str | None, str | None]) -> None:
    environments = [Environment(token=token, runtime_dir=tmp_path) for token in tokens]
    for result in joined([HashStore()] * 2, environments):
        assert isinstance(result, AuthenticationError)
        assert "set PACELINE_TOKEN" in str(result)


def test_the_key_of_the_user_replaces_the_token_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    store = FileStore(str(tmp_path / "store"), 2)
    assert joined([store] * 2, [Environment(runtime_dir=tmp_path)] * 2) == [3, 3]
    assert user_key(tmp_path).hex().encode() not in (tmp_path / "store").read_bytes()
    environments = [Environment(runtime_dir=folder) for folder in (tmp_path, tmp_path / "other")]
    assert all(isinstance(result, AuthenticationError) for result in joined([HashStore()] * 2, environments))


def test_a_store_reachable_by_other_machines_needs_a_token(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    for ranks_environment in (
        Environment(runtime_dir=tmp_path, master_addr="10.0.0.1"),
        Environment(runtime_dir=tmp_path, master_addr="10.0.0.1", world_size=4, local_world_size=2),
    ):
        with pytest.raises(UsageError, match=r"10\.0\.0\.1, which other machines .*PACELINE_TOKEN"):
            join_through(store, 1, 2, "test", TIMEOUT, variables=ranks_environment)


def test_ranks_placed_on_one_machine_by_the_launcher_need_no_token(tmp_path: Path) -> None:
    ranks_environment = Environment(runtime_dir=tmp_path, master_addr="192.0.2.1", world_size=2, local_world_size=2)
    store = FileStore(str(tmp_path / "store"), 2)
    assert joined([store] * 2, [ranks_environment] * 2) == [3, 3]

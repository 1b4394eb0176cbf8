"""Create the process group of ``init_process_group("paceline")``, over PyTorch's store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as CStore
from typing_extensions import override

from paceline.collectives import Group, join
from paceline.collectives.tuner import check_algorithm
from paceline.environment import Environment, environment, naming
from paceline.errors import ConnectionLostError, DeadlineError, RankLostError
from paceline.meeting.credentials import choose_secret, derive_token
from paceline.meeting.rendezvous import is_loopback, own_host
from paceline.meeting.store import SealedStore, Store, written_twice
from paceline.observe import recording
from paceline.observe.stuck.processes import flight_recorder
from paceline.torch.backend.errors import Terms, in_torch_terms
from paceline.torch.backend.process_group import PacelineProcessGroup
from paceline.transport import TLS
from paceline.transport.addresses import LOOPBACK
from paceline.transport.backoff import Backoff


def create(options: Any) -> PacelineProcessGroup:
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    global_ranks = tuple(options.global_ranks_in_group)  # empty for the group of all ranks
    if global_ranks:
        flight_recorder().number_ranks(_name_world(options.group_id), global_ranks)
    try:
        group = join_through(store, rank, size, options.group_id, timeout)
    except (RankLostError, DeadlineError) as error:
        raise in_torch_terms(error, Terms(timeout, global_ranks)) from None
    return PacelineProcessGroup(store, group, global_ranks)


def join_through(
    store: CStore, rank: int, size: int, name: str, timeout: timedelta, *, variables: Environment | None = None
) -> Group:
    """Return a group of the ranks that share one of PyTorch's stores. Every group of a store has its own `name`.

    The store has no authentication, so the ranks never write a secret to it. Rank 0 writes a random number to it. All
    ranks derive a token from this number and their common secret. A rank rejects a value in the store if the value's
    writer did not have the token.

    Raises UsageError if PACELINE_TOKEN is missing although other machines reach the store, and AuthenticationError if
    the ranks' tokens differ.
    """
    variables = environment() if variables is None else variables
    recording.start(variables, rank=rank if variables.rank is None else None)
    with naming("PACELINE_ALGORITHM"):
        check_algorithm(variables.algorithm)
    place = find_place(store, variables.master_addr)
    is_alone = variables.world_size is not None and variables.world_size == variables.local_world_size
    secret = choose_secret(
        variables.token, is_local=is_loopback(place) or is_alone, where=place, runtime_dir=variables.runtime_dir
    )
    # A program may call init_process_group with the same store again, after destroy_process_group.
    life = store.add(f"paceline {name} lives of rank {rank}", 1)
    shared = TorchStore(store, f"paceline {name} {life}")
    if rank == 0:
        shared.set("number", secrets.token_bytes(16))
    number = shared.get("number", time.monotonic() + timeout.total_seconds())
    token = derive_token(secret, "torch", name, number.hex())
    return join(
        SealedStore(shared, token),
        rank,
        size,
        token=token,
        host=LOOPBACK if is_loopback(place) else own_host(place),
        tls=TLS.of_environment(variables),
        name=_name_world(name),
        timeout=timeout,
        algorithm=variables.algorithm,
    )


def _name_world(name: str) -> str:
    return f"torch {name}"


def find_place(store: CStore, master: str | None) -> str:
    """Return the host of a store. If only this machine can reach the store, return the loopback address."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return str(store.host)
    if isinstance(store, FileStore):
        # Ranks on several hosts may share the file, so use the launcher's host `master` if it is known.
        return master or LOOPBACK
    return LOOPBACK


_FIRST_PAUSE_S: Final = 0.0005
_PAUSE_S: Final = 0.05
_PAUSE_A_KEY_S: Final = 0.001
_SET: Final = b"="
"""Prefix of every stored value, so that none is empty: FileStore and TCPStore treat an empty value as missing."""


class TorchStore(Store):
    """The keys under ``prefix`` in a c10d store."""

    place = "torch.distributed"

    def __init__(self, store: CStore, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/"

    @override
    def set(self, key: str, value: bytes) -> None:
        text = _text(value)
        try:
            found = self._store.compare_set(self._prefix + key, "", text)
        except RuntimeError as error:
            raise _lost(key, error) from error
        if found not in (b"", text.encode()):
            raise written_twice(key)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """Poll for the keys, because a wait of c10d that times out writes two warnings to standard error."""
        places = [self._prefix + key for key in keys]
        longest = max(_PAUSE_S, len(keys) * _PAUSE_A_KEY_S)
        backoff = Backoff(_FIRST_PAUSE_S, longest)
        try:
            while not self._store.check(places):
                left = deadline - time.monotonic()
                if left <= 0:
                    return [_value(self._store.get(key)) if self._store.check([key]) else None for key in places]
                time.sleep(backoff.next_s(left))
            return [_value(text) for text in self._store.multi_get(places)]
        except RuntimeError as error:
            raise _lost(keys[0], error) from error

    @override
    def delete(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)

    @override
    def close(self) -> None:
        """Do nothing: c10d would print a warning for each request if the rank with the server has already ended."""


def _text(value: bytes) -> str:
    """Return bytes as hexadecimal digits, because c10d sends values as UTF-8 text."""
    return _SET.decode() + value.hex()


def _value(text: bytes) -> bytes:
    return bytes.fromhex(text[len(_SET) :].decode())


def _lost(key: str, error: Exception) -> ConnectionLostError:
    return ConnectionLostError(f"the store of torch.distributed failed for {key!r}: {error}")

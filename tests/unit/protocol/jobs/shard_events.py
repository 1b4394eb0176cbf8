"""Events that stand for the calls of a pool of shards, for tests."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from paceline.protocol.jobs.shards import Instruction, Shards


class ShardWanted(NamedTuple):
    """A worker requests a shard."""

    worker: int


class Done(NamedTuple):
    """A worker has finished the shard of this lease."""

    worker: int
    lease: int


class WorkerLost(NamedTuple):
    """A worker died or left."""

    worker: int


class ShardCountFound(NamedTuple):
    """A file was read to its end."""

    file: int
    num_shards: int


class Wait(NamedTuple):
    """No shard is free."""

    worker: int


Event: TypeAlias = ShardWanted | Done | WorkerLost | ShardCountFound


def handle(pool: Shards, event: Event) -> list[Instruction | Wait]:
    """Call the pool, and return its instructions; a Wait if a request has no answer yet."""
    match event:
        case ShardWanted(worker):
            return [*pool.request_shard(worker)] or [Wait(worker)]
        case Done():
            return [*pool.finish(*event)]
        case WorkerLost(worker):
            return [*pool.worker_lost(worker)]
        case ShardCountFound():
            return [*pool.file_ended(*event)]

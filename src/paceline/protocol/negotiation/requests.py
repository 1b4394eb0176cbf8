"""The requests, messages and instructions of the negotiation, and the fusion of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from paceline.protocol.bounds import Natural, Rank

GLOBAL_SET: Final = 0
"""The number of the process set of all ranks."""
ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER, BARRIER = "alltoall", "reducescatter", "barrier"
ADD_PROCESS_SET, REMOVE_PROCESS_SET = "add_process_set", "remove_process_set"
DIVIDE_ROWS: Final = (ALLGATHER, ALLTOALL, REDUCESCATTER)
HAVE_DIFFERENT_ROWS: Final = (ALLGATHER, ALLTOALL)
CHANGE_SETS: Final = (ADD_PROCESS_SET, REMOVE_PROCESS_SET)
ADASUM: Final = "adasum"
"""A reduction that uses the norms of whole tensors, so its tensors are not fused."""

UNNAMED: Final = "noname."
"""The prefix of the names of unnamed requests. Each name is used once, so the cache does not contain it."""
LARGE_BYTES: Final = 1 << 20
"""Tensors of this size or more are not fused, because their copies take longer than an operation of their own."""

NO_TIMELINE, TIMELINE, TIMELINE_OF_ROUNDS = range(3)
"""States of the timeline: off, on, and on with the rounds of the negotiation."""

Key: TypeAlias = tuple[int, str]
"""The process set and the name of a request."""


class TensorRequest(Struct, frozen=True, array_like=True):
    """One rank's request to run an operation on a tensor."""

    name: str
    operation: str
    dtype: str = ""
    shape: tuple[Natural, ...] = ()
    """The shape of the tensor. For the operations that change process sets, the ranks of the set."""
    num_bytes: Natural = 0
    reduction: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = ""
    group: str = ""
    """The name of the group of requests that this request belongs to; empty if it belongs to no group."""
    process_set: Natural = GLOBAL_SET

    @property
    def key(self) -> Key:
        return self.process_set, self.name

    def common(self) -> TensorRequest:
        """Return the request without the fields that may differ between ranks."""
        if self.operation not in HAVE_DIFFERENT_ROWS:
            return self
        return msgspec.structs.replace(self, shape=self.shape[1:], num_bytes=0)


class NegotiationReport(Struct, frozen=True, array_like=True):
    """A rank's requests that are not in the cache."""

    requests: tuple[TensorRequest, ...] = ()
    invalid: tuple[Natural, ...] = ()
    """Slots of the cache that all ranks must evict, because this rank reports their requests again."""
    joins: bool = False
    calls: tuple[tuple[str, int, str, str], ...] = ()
    """The file, the line number, the function and the line of each call of the rank's script, the innermost last."""


class NegotiatedResponse(Struct, frozen=True, array_like=True):
    """The coordinator's answer for one name. With an `error`, the ranks do not run the operation."""

    request: TensorRequest
    error: str = ""


class NegotiationDecision(Struct, frozen=True, array_like=True):
    """The coordinator's answer to the reports of all ranks."""

    responses: tuple[NegotiatedResponse, ...] = ()
    invalid: tuple[Natural, ...] = ()
    """Slots that all ranks remove from their caches."""
    joined: tuple[Rank, ...] = ()
    last_joined: int = -1
    """If all ranks have joined, the rank that joined last, else -1."""
    timeline: Natural = NO_TIMELINE
    failure: str = ""
    """If not empty, the error that ends the negotiation on all ranks."""


class RunOperation(Struct, frozen=True):
    """Instruction: run an operation. If it has several requests, they are fused all-reduces of equal kind."""

    requests: tuple[TensorRequest, ...]
    """The common parts of the ranks' requests."""
    keys: tuple[Key, ...]
    names: frozenset[Key]
    """The keys as a set, whose elements are found in less time."""


class FailRequest(Struct, frozen=True):
    """Instruction: raise an error for a request."""

    key: Key
    error: str


class EndJoin(Struct, frozen=True):
    """Instruction: return from ``join`` on all ranks. `last` is the rank that joined last."""

    last: int


NegotiationInstruction: TypeAlias = RunOperation | FailRequest | EndJoin


def fuse(requests: Iterable[TensorRequest], threshold_bytes: int, *, fuses_groups: bool = True) -> list[RunOperation]:
    """Combine small all-reduces of equal kind up to `threshold_bytes`. Small requests of a group stay together.

    Without `fuses_groups`, the requests of a group are not combined with other requests.
    """
    batches: list[list[TensorRequest]] = []
    newest: dict[tuple[object, ...], tuple[list[TensorRequest], int]] = {}
    groups: dict[tuple[object, ...], list[TensorRequest]] = {}
    for request in requests:
        if request.operation != ALLREDUCE or request.reduction == ADASUM or request.num_bytes >= LARGE_BYTES:
            batches.append([request])
            continue
        scales = request.prescale, request.postscale
        own_group = "" if fuses_groups else request.group
        kind = (request.process_set, request.dtype, request.reduction, scales, request.device, own_group)
        batch = groups.get((kind, request.group)) if request.group else None
        if batch is not None:
            batch.append(request)
            continue
        batch, num_bytes = newest.get(kind, (None, 0))
        num_bytes += request.num_bytes
        if batch is None or num_bytes > threshold_bytes:
            batch, num_bytes = [], request.num_bytes
            batches.append(batch)
        batch.append(request)
        newest[kind] = batch, num_bytes
        if request.group:
            groups[kind, request.group] = batch
    operations: list[RunOperation] = []
    for batch in batches:
        keys = tuple(request.key for request in batch)
        operations.append(RunOperation(tuple(batch), keys, frozenset(keys)))
    return operations

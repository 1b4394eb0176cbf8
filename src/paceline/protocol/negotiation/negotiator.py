"""Agree on one order of collective operations that the ranks request in different orders (Horovod's negotiation).

Each rank requests operations by name, at any time and in any order. An operation runs when all ranks of its process
set have requested it, and all ranks run the operations in the same order. The ranks agree in *rounds*. All ranks take
part in each round, which has up to three steps:

1. Every rank votes with a bit vector. It has one bit for each request in the response cache, and the bitwise *and* over
   all ranks contains the requests that are ready everywhere. The caches of all ranks are equal, so this step needs no
   coordinator. In the steady state it is the only step.
2. If a rank has a request that is not in its cache, every rank sends a :class:`NegotiationReport` to the coordinator,
   which is rank 0.
3. The coordinator compares the requests and answers with a :class:`NegotiationDecision`. All ranks add its responses to
   their caches in the same order.

Ready all-reduces of equal kind are fused up to a number of bytes. A rank that has joined takes part in all operations
without requests: it contributes zeros, or no rows. Horovod's algorithm is described in Sergeev and Del Balso (2018) and
in Romero et al. (NSDI 2022), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from paceline.errors import UsageError
from paceline.protocol.negotiation.requests import (
    ADD_PROCESS_SET,
    CHANGE_SETS,
    GLOBAL_SET,
    REMOVE_PROCESS_SET,
    UNNAMED,
    EndJoin,
    FailRequest,
    Key,
    NegotiationDecision,
    NegotiationInstruction,
    NegotiationReport,
    TensorRequest,
    fuse,
)
from paceline.protocol.negotiation.table import RequestTable, describe_joined_root

_NOTHING_TO_REPORT: Final = 1
_STAYS: Final = 2
_NUM_STATUS_BITS: Final = 2
_MOST_PLANS: Final = 1000


class Negotiator:
    """One rank's part of the negotiation, and on rank 0 the coordinator's part.

    In each round, all ranks exchange the results of :meth:`vote` and pass the combined vector to :meth:`agreed`. If
    :attr:`needs_reports` is then set, rank 0 passes the results of :meth:`report` of all ranks to :meth:`decide`, and
    all ranks pass the decision to :meth:`decided`.
    """

    def __init__(
        self, rank: int, size: int, *, cache_capacity: int, fusion_threshold_bytes: int, fuses_groups: bool = True
    ) -> None:
        self.rank = rank
        self.process_sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        """The ranks of each process set."""
        self.joined: tuple[int, ...] = ()
        """The ranks that have joined."""
        self.needs_round = False
        """Whether this rank must start a round, because its last vote or report is out of date."""
        self.needs_reports = False
        self.is_over = False
        """Whether a rank has left. No round follows."""
        self._capacity = cache_capacity
        self._fuse = partial(fuse, threshold_bytes=fusion_threshold_bytes, fuses_groups=fuses_groups)
        self._in_use: set[Key] = set()
        """The names of all requests that the runtime has not carried out yet."""
        self._new: dict[Key, TensorRequest] = {}
        """Requests since the last vote or report, which are in none of the following attributes yet."""
        self._pending: dict[Key, TensorRequest] = {}
        self._unreported: dict[Key, TensorRequest] = {}
        """Pending requests that are not in the cache and that the coordinator has not received."""
        self._invalid: list[int] = []
        """Slots whose requests the coordinator must receive again."""
        self._joins = False
        self._leaves = False
        self._must_report = False
        """Whether the coordinator needs a round with reports."""
        self._slots: dict[Key, int] = {}
        """The slot of each cached request. The least recently used request is the first."""
        self._cached: dict[int, TensorRequest] = {}
        self._free_slots: list[int] = []
        self._ready = 0
        """The bits of the slots whose requests are pending."""
        self._foreign = 0
        """The bits of the slots that belong to process sets without this rank."""
        self._plans: dict[int, tuple[list[Key], list[NegotiationInstruction]]] = {}
        """The keys and the instructions for each set of slots that all ranks have voted for."""
        self._steps: dict[tuple[Key, int], tuple[list[TensorRequest], int]] = {}
        """Requests between two votes that are all in the cache, and the bits of their slots. The key of this dictionary
        is the key of the first request and the number of requests. Steps of a training repeat their requests, so they
        are found here at once.
        """
        self._last_slots = 0
        self._next_set = GLOBAL_SET + 1
        self._table = RequestTable(self.process_sets)

    @property
    def num_bits(self) -> int:
        """The length of the vector of votes, which is equal on all ranks."""
        return _NUM_STATUS_BITS + len(self._cached) + len(self._free_slots)

    @property
    def has_pending(self) -> bool:
        """Whether this rank waits for other ranks."""
        return bool(self._new or self._pending) or self._has_joined

    @property
    def has_idle_ranks(self) -> bool:
        """Whether operations may run without a request of some ranks."""
        return bool(self.joined) or len(self.process_sets) > 1

    @property
    def _has_joined(self) -> bool:
        return self._joins or self.rank in self.joined

    def request(self, requests: Mapping[Key, TensorRequest]) -> None:
        """Add requests of one process set, all or none.

        Raises UsageError for names in use, after :meth:`join`, and for an unknown process set.
        """
        if self._joins or self.rank in self.joined:
            name = next(iter(requests))[1]
            raise UsageError(f"{name!r} was requested after join(); wait until join() returns")
        if not self._in_use.isdisjoint(requests):
            name = next(key[1] for key in requests if key in self._in_use)
            raise UsageError(
                "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                f"that is currently being processed: {name!r}. Wait for the first call, or pass a different tensor name"
            )
        number = next(iter(requests))[0]
        if number not in self.process_sets:
            raise UsageError(f"process set {number} does not exist; call add_process_set() first")
        self._in_use.update(requests)
        self._new.update(requests)
        self.needs_round = True

    def join(self) -> None:
        """Take part in all operations until all ranks have joined. Then :class:`EndJoin` follows."""
        if self._has_joined:
            raise UsageError("join() was called again before it has returned; call it once per rank")
        self._joins = self.needs_round = True

    def leave(self) -> None:
        """End the negotiation of all ranks in the next round."""
        self._leaves = self.needs_round = True

    def vote(self) -> int:
        """Return this rank's bits for the next round."""
        self.needs_round = False
        self._add_new()
        slots = self._ready | self._foreign
        if self.rank in self.joined:
            slots |= sum(1 << slot for slot, cached in self._cached.items() if self._has_active_ranks(cached))
        has_nothing = not (self._unreported or self._invalid or self._joins or self._must_report)
        return slots << _NUM_STATUS_BITS | (0 if self._leaves else _STAYS) | (_NOTHING_TO_REPORT if has_nothing else 0)

    def agreed(self, bits: int) -> list[NegotiationInstruction]:
        """Return the instructions for the requests that all ranks voted for."""
        self.is_over = not bits & _STAYS
        self.needs_reports = not self.is_over and not bits & _NOTHING_TO_REPORT
        slots = bits >> _NUM_STATUS_BITS
        if not slots:
            return []
        if slots not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[slots] = self._plan(slots)
        keys, instructions = self._plans[slots]
        if (self._ready & slots).bit_count() == len(self._pending):  # all pending requests
            self._pending.clear()
        else:
            for key in keys:
                self._pending.pop(key, None)
        self._ready &= ~slots
        if slots != self._last_slots:  # else the order of use does not change
            self._last_slots = slots
            for key in keys:
                self._slots[key] = self._slots.pop(key)
        return instructions

    def report(self) -> NegotiationReport:
        """Return the requests that this rank has not reported yet."""
        self._add_new()
        if self._joins:
            self.uncache_pending()  # after join(), the other ranks do not wait for this rank's votes
        report = NegotiationReport(tuple(self._unreported.values()), tuple(self._invalid), self._joins)
        self._unreported.clear()
        self._invalid.clear()
        self._must_report = False
        return report

    def decide(self, reports: Sequence[NegotiationReport]) -> NegotiationDecision:
        """Return the coordinator's decision. `reports` has the report of each rank."""
        return self._table.add(reports)

    def decided(self, decision: NegotiationDecision) -> list[NegotiationInstruction]:
        """Return the instructions for the coordinator's responses."""
        self._add_new()
        for slot in decision.invalid:
            self._evict(slot)
        if decision.joined != self.joined:
            self.joined = decision.joined
            if self._joins and self.rank in self.joined:
                self._joins, self.needs_round = False, True
            self._forget_plans()
        instructions: list[NegotiationInstruction] = []
        ready: list[TensorRequest] = []
        for response in decision.responses:
            request = response.request.common()
            self._unreported.pop(request.key, None)
            self._pending.pop(request.key, None)
            if response.error:
                instructions.append(FailRequest(request.key, response.error))
                continue
            if request.process_set not in self.process_sets:
                continue  # an earlier response has removed the process set, and failed the request
            if request.operation in CHANGE_SETS:
                instructions += self._change_sets(request)
            else:
                self._add_to_cache(request)
            if self.rank in self.process_sets[request.process_set]:
                ready.append(request)
        instructions += self._fuse(ready)
        if decision.last_joined >= 0:
            self._joins = False
            instructions.append(EndJoin(decision.last_joined))
        return instructions

    def uncache_pending(self) -> None:
        """Report the pending requests that are in the cache, so that the coordinator has them.

        The runtime calls this method if requests wait for a long time, so that :meth:`missing` lists them.
        """
        self._add_new()
        for slot in _positions(self._ready):
            key = self._cached[slot].key
            self._unreported[key] = self._pending[key]
            self._invalid.append(slot)
            self.needs_round = True
        self._ready = 0

    def missing(self) -> dict[Key, tuple[int, ...]]:
        """Return the coordinator's incomplete requests, and the ranks that each request waits for."""
        return self._table.missing()

    def request_reports(self) -> None:
        """Start a round with reports of all ranks."""
        self._must_report = self.needs_round = True

    def finished(self, keys: Iterable[Key]) -> None:
        """Free the names of requests whose instructions the runtime has carried out. A set takes the least time."""
        self._in_use.difference_update(keys)

    def find_process_set(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the process set with these ranks, or None."""
        return next((number for number, members in self.process_sets.items() if members == tuple(ranks)), None)

    def _add_new(self) -> None:
        """Find the new requests in the cache. The coordinator must receive the others."""
        new, self._new = self._new, {}
        if not new:
            return
        requests = list(new.values())
        step = (requests[0].key, len(requests))
        known, bits = self._steps.get(step, ([], 0))
        if requests != known:
            bits = 0
            for key, request in new.items():
                slot = self._slots.get(key)
                if slot is not None and request.common() == self._cached[slot]:
                    bits |= 1 << slot
                    continue
                self._unreported[key] = request
                if slot is not None:
                    self._invalid.append(slot)
            if bits.bit_count() == len(requests):
                if len(self._steps) >= _MOST_PLANS:
                    self._steps.clear()
                self._steps[step] = requests, bits
        self._ready |= bits
        self._pending.update(new)

    def _plan(self, slots: int) -> tuple[list[Key], list[NegotiationInstruction]]:
        requests = [self._cached[slot] for slot in _positions(slots & ~self._foreign)]
        ready = [request for request in requests if request.root not in self.joined]
        failed = [request for request in requests if request.root in self.joined]
        instructions: list[NegotiationInstruction] = [*self._fuse(ready)]
        instructions += [FailRequest(request.key, describe_joined_root(request)) for request in failed]
        return [self._cached[slot].key for slot in _positions(slots)], instructions

    def _has_active_ranks(self, request: TensorRequest) -> bool:
        return not set(self.process_sets[request.process_set]) <= set(self.joined)

    def _change_sets(self, request: TensorRequest) -> list[NegotiationInstruction]:
        number = self.find_process_set(request.shape)
        if request.operation == ADD_PROCESS_SET and number is None:
            self.process_sets[self._next_set] = request.shape
            self._next_set += 1
        elif request.operation == REMOVE_PROCESS_SET and number is not None:
            del self.process_sets[number]
            self._table.remove_set(number)
            for slot in [slot for slot, cached in self._cached.items() if cached.process_set == number]:
                self._evict(slot)
            keys = [key for key in self._pending if key[0] == number]
            for key in keys:
                del self._pending[key]
                self._unreported.pop(key, None)
            return [FailRequest(key, f"process set {number} was removed while {key[1]!r} was pending") for key in keys]
        return []

    def _add_to_cache(self, request: TensorRequest) -> None:
        if not self._capacity or request.name.startswith(UNNAMED):
            return
        slot = self._slots.get(request.key)
        if slot is not None:
            self._evict(slot)
        elif len(self._slots) >= self._capacity:
            self._evict(next(iter(self._slots.values())))
        slot = self._free_slots.pop() if self._free_slots else len(self._cached)
        self._slots[request.key] = slot
        self._cached[slot] = request
        if self.rank not in self.process_sets[request.process_set]:
            self._foreign |= 1 << slot
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._steps.clear()
        self._last_slots = 0

    def _evict(self, slot: int) -> None:
        """Remove a request from the cache. If it is pending, this rank reports it to the coordinator."""
        request = self._cached.pop(slot, None)
        if request is None:
            return
        del self._slots[request.key]
        self._free_slots.append(slot)
        self._forget_plans()
        self._foreign &= ~(1 << slot)
        if self._ready >> slot & 1:
            self._ready &= ~(1 << slot)
            self._unreported[request.key] = self._pending[request.key]
            self.needs_round = True


def _positions(bits: int) -> list[int]:
    """Return the positions of the bits that are set, from the lowest."""
    digits = f"{bits:b}"[::-1]
    return [position for position, digit in enumerate(digits) if digit == "1"]

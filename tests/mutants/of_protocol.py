"""Planted defects in ``paceline.protocol``. The simulation of the protocol can find these defects too."""

from __future__ import annotations

from typing import Final

from tests.mutants.defect import Defect

_UNIT: Final = "tests/unit/protocol"
_DELIVERY: Final = (f"{_UNIT}/test_delivery.py",)
_CLOCKS: Final = (f"{_UNIT}/test_clocks.py", f"{_UNIT}/test_gate_machine.py")
_REPLICATION: Final = (f"{_UNIT}/test_replication.py",)
_ITERATIONS: Final = (f"{_UNIT}/test_iterations.py", f"{_UNIT}/server")
_CHAINS: Final = (f"{_UNIT}/test_chains.py",)
_MEMBERSHIP: Final = (f"{_UNIT}/test_membership.py",)
_CLIENT: Final = (f"{_UNIT}/client",)
_SCHEDULER: Final = tuple(
    f"{_UNIT}/scheduler/test_{name}.py" for name in ("views", "core", "core_views", "core_takeover", "recovery")
)
_SHARDS: Final = (f"{_UNIT}/jobs/test_shards.py", f"{_UNIT}/jobs/test_shards_machine.py")

OF_PROTOCOL: Final = (
    # The duplicate filter.
    Defect(
        "filter-off-by-one",
        "the last applied push counts as new when it is repeated",
        "protocol/delivery.py",
        "if last < sequence:\n                break",
        "if last <= sequence:\n                break",
        unit=_DELIVERY,
    ),
    Defect(
        "filter-fast-path",
        "the fast path of the duplicate filter accepts a repeat as new",
        "protocol/delivery.py",
        "next(reversed(seen.values())) < sequence",
        "next(reversed(seen.values())) <= sequence",
        unit=_DELIVERY,
    ),
    Defect(
        "fill-without-filter",
        "a bucket is filled without its duplicate filter",
        "protocol/replication/core.py",
        "self.delivery.adopt(one, event.state)",
        "self.delivery.adopt(one, ())",
        unit=_REPLICATION,
    ),
    Defect(
        "filter-of-newest-run",
        "only the buckets of the sender's newest push are sent with their filter",
        "protocol/delivery.py",
        "for last, seen in self._runs(incarnation)\n            if (part",
        "for last, seen in list(self._runs(incarnation))[:1]\n            if (part",
        unit=_DELIVERY,
    ),
    # The gate and the clocks.
    Defect(
        "gate-off-by-one",
        "an iteration begins one iteration too early",
        "protocol/clocks.py",
        "self._vector.minimum >= clock - self._tau",
        "self._vector.minimum >= clock - self._tau - 1",
        unit=_CLOCKS,
    ),
    Defect(
        "dead-worker-counts",
        "the gate waits for a dead worker",
        "protocol/clocks.py",
        "self._vector.leave(worker)\n        self._forget_requests(worker)",
        "self._forget_requests(worker)",
        unit=_CLOCKS,
    ),
    Defect(
        "late-tick-counts",
        "a tick adds its worker to an iteration that is already complete",
        "protocol/clocks.py",
        "range(max(before, self._seen_minimum), clock)",
        "range(before, clock)",
        unit=_CLOCKS,
    ),
    # Replication.
    Defect(
        "acknowledged-before-chain",
        "a primary acknowledges a push before its successors have it",
        "protocol/replication/in_flight.py",
        "if not push.waiting:\n            return [*instructions, *self._end(push)]\n        self._pending.add(push)",
        "if push.is_own or not push.waiting:\n            return [*instructions, *self._end(push)]\n"
        "        self._pending.add(push)",
        unit=_REPLICATION,
    ),
    Defect(
        "no-retransmission",
        "messages that were lost with a connection are not resent",
        "protocol/replication/in_flight.py",
        "return self._forward_again([push for push in self._pending if target in push.waiting])",
        "return []",
        unit=_REPLICATION,
    ),
    Defect(
        "old-view-push",
        "a primary accepts a push of an older view",
        "protocol/server/core.py",
        "else Timing.STALE",
        "else _IMMEDIATE",
        unit=_ITERATIONS,
    ),
    Defect(
        "old-view-forward",
        "a replica accepts a push that was forwarded in an older view",
        "protocol/replication/core.py",
        "if event.version != self.version or event.buckets & ~sound:",
        "if event.buckets & ~sound:",
        unit=_REPLICATION,
    ),
    Defect(
        "pending-lost-at-view-change",
        "pushes that the successors have not acknowledged are not forwarded again after a view change",
        "protocol/replication/in_flight.py",
        "return instructions + self._forward_again(list(self._pending))",
        "return instructions",
        unit=_REPLICATION,
    ),
    Defect(
        "report-before-confirmation",
        "a bucket of a fill counts as confirmed when it was sent",
        "protocol/replication/in_flight.py",
        "        self._sent[target] |= 1 << bucket\n",
        "        self._sent[target] |= 1 << bucket\n        self._confirmed[target] |= 1 << bucket\n",
        unit=_REPLICATION,
    ),
    Defect(
        "confirmed-across-views",
        "confirmations of a fill still count after the server missed views",
        "protocol/replication/in_flight.py",
        "confirmed = self._confirmed if follows else {}",
        "confirmed = self._confirmed",
        unit=_REPLICATION,
    ),
    Defect(
        "push-before-bucket",
        "a server that is being filled receives pushes of buckets that it does not have yet",
        "protocol/replication/in_flight.py",
        "place.successors.get(target, 0) & ~self._fills.unsent(target)",
        "place.successors.get(target, 0)",
        unit=_REPLICATION,
    ),
    Defect(
        "fill-not-sent-again",
        "buckets that were lost with a connection are not resent",
        "protocol/replication/in_flight.py",
        "            self._sent[target] = self._confirmed[target]",
        "            pass",
        unit=_REPLICATION,
    ),
    Defect(
        "min-replicas-ignored",
        "a chain with too few replicas acknowledges",
        "protocol/replication/in_flight.py",
        "and not push.is_sum and push.buckets & self._place.short:",
        "and not push.is_sum and False:",
        unit=_REPLICATION,
    ),
    Defect(
        "forwarded-in-order-of-arrival",
        "pushes are forwarded again in the order of arrival, with repeats last",
        "protocol/replication/in_flight.py",
        "own.sort(key=lambda push: -push.sequence)",
        "own.reverse()",
        unit=_REPLICATION,
    ),
    Defect(
        "filled-ahead-of-primary",
        "a server is filled with pushes that the primary may lack",
        "protocol/replication/core.py",
        "self._fills.unsent(target) & ~self.pushes.ahead_of_primary()",
        "self._fills.unsent(target)",
        unit=_REPLICATION,
    ),
    # Iterations and takeovers.
    Defect(
        "takeover-does-not-wait",
        "a new primary completes iterations before the workers have resent their pushes",
        "protocol/iterations.py",
        "            self._pending_workers = {worker for worker in workers if self._synced.get(worker, -1) < version}",
        "            self._pending_workers = set()",
        unit=_ITERATIONS,
    ),
    Defect(
        "takeover-ignores-successors",
        "a new primary does not wait for the pushes that its successors report",
        "protocol/iterations.py",
        "self._takeover.lead(version, buckets, {*workers, *followers})",
        "self._takeover.lead(version, buckets, {*workers})",
        unit=_ITERATIONS,
    ),
    Defect(
        "reported-before-kept",
        "a fill is reported before the workers retain their pushes",
        "protocol/iterations.py",
        "        if not buckets & self._replication.primary:\n            return True",
        "        if True:\n            return True",
        unit=_ITERATIONS,
    ),
    Defect(
        "inherited-sums-count-as-safe",
        "sums of the former primary count as safe before the successors have them",
        "protocol/iterations.py",
        "return durable if inherited is None else min(durable, inherited - 1)",
        "return durable",
        unit=_ITERATIONS,
    ),
    Defect(
        "late-part-in-next-sum",
        "a repeated part of a complete iteration is summed again",
        "protocol/iterations.py",
        "left = self._replication.delivery.missing(AGGREGATE, iteration + 1, buckets)",
        "left = buckets",
        unit=_ITERATIONS,
    ),
    # Chains.
    Defect(
        "member-before-filled",
        "a server is a member of a chain before it is filled",
        "protocol/chains.py",
        "        return Chain(members, filling)\n\n",
        "        return Chain((*members, missing[0]), None)\n\n",
        unit=_CHAINS,
    ),
    Defect(
        "last-copy-given-up",
        "a silent server is expelled, although it has the last copy of a bucket",
        "protocol/chains.py",
        "if server not in self._silent]) or living",
        "if server not in self._silent])",
        unit=_CHAINS,
    ),
    # The scheduler.
    Defect(
        "incarnation-reused",
        "a member that takes the rank of another one also gets its incarnation",
        "protocol/membership.py",
        "        self._next_incarnation += 1\n        self._add(member, time_s)",
        "        self._next_incarnation += role is not Role.WORKER\n        self._add(member, time_s)",
        unit=_MEMBERSHIP,
    ),
    Defect(
        "takeover-without-promises",
        "a new scheduler takes over while servers may still prepare a view of the previous scheduler",
        "protocol/scheduler/recovery.py",
        "if evidence.has_quorum(without, self._replicas, promised=self._term):",
        "if True:",
        unit=_SCHEDULER,
    ),
    Defect(
        "drain-forgotten",
        "a new scheduler does not remember which servers want to leave",
        "protocol/scheduler/next_view.py",
        "self.servers = set(leaving) & set(servers)",
        "self.servers = set()",
        unit=_SCHEDULER,
    ),
    Defect(
        "released-too-early",
        "a server may leave while it has the only copy of a bucket",
        "protocol/scheduler/next_view.py",
        "return {server: reason for server, reason in reasons.items() if server not in needed}",
        "return {each: why for each, why in reasons.items() if each not in needed or each in self.drains.servers}",
        unit=_SCHEDULER,
    ),
    Defect(
        "quorum-off-by-one",
        "a scheduler takes over with one voter too few",
        "protocol/scheduler/views.py",
        "return _have(len(voters) - commit_quorum(len(voters), replicas) + 1, voters, ended, returned)",
        "return _have(len(voters) - commit_quorum(len(voters), replicas), voters, ended, returned)",
        unit=_SCHEDULER,
    ),
    Defect(
        "gaining-not-asked",
        "a view is committed before the servers that gain buckets have prepared it",
        "protocol/scheduler/views.py",
        "return has_quorum and stays and self.gaining <= self.prepared",
        "return has_quorum and stays",
        unit=_SCHEDULER,
    ),
    Defect(
        "filled-in-another-view",
        "a fill that was reported in another view counts",
        "protocol/scheduler/next_view.py",
        "if version != self.publication.committed.version:",
        "if not version:",
        unit=_SCHEDULER,
    ),
    # Clients.
    Defect(
        "sent-again-not-retained",
        "a push that was resent at a view change is lost at the next one",
        "protocol/client/session.py",
        "if self.retains and request.kind in PUSHES and",
        "if self.retains and request.parents is None and request.kind in PUSHES and",
        unit=_CLIENT,
    ),
    Defect(
        "two-requests-of-one-number",
        "a tick has the number of the previous request",
        "protocol/client/session.py",
        "self._last_number = (self._last_number + 1) & 0xFFFFFFFF",
        "self._last_number = (self._last_number + (kind is not Kind.TICK)) & 0xFFFFFFFF",
        unit=_CLIENT,
    ),
    Defect(
        "stable-across-views",
        "buckets that were stable on a server count as stable when it becomes their primary",
        "protocol/client/session.py",
        "        self.stable_clock = 0  # the former value applies to the buckets of the former view\n",
        "",
        unit=_CLIENT,
    ),
    Defect(
        "stable-by-late-answer",
        "an answer that belongs to an earlier view makes pushes stable",
        "protocol/client/session.py",
        "request is None or request.kind is RequestKind.CALL or clock <= self.stable_clock",
        "clock <= self.stable_clock",
        unit=_CLIENT,
    ),
    # Shards.
    Defect(
        "lease-granted-twice",
        "the shard of a lost worker is assigned again and again",
        "protocol/jobs/shards.py",
        "return heapq.heappop(self._returned)",
        "return self._returned[0]",
        unit=_SHARDS,
    ),
    Defect(
        "lost-lease-done",
        "a shard counts as done, although its lease was revoked",
        "protocol/jobs/shards.py",
        '            self._states.move(key, "worker_lost")\n            heapq.heappush(self._returned, key)',
        '            self._states.move(key, "finish")',
        unit=_SHARDS,
    ),
)

"""Sequential consistency on one server: the pushes of a sum, the push of the sum, and reads."""

from __future__ import annotations

from paceline.protocol.chains import ChainGroup, chain_group
from paceline.protocol.iterations import Iterations, Sum, Takeover
from paceline.protocol.replication import (
    AGGREGATE,
    Acknowledge,
    Acknowledged,
    Change,
    Forwarded,
    LinkUp,
    Replication,
)

A, B, C = 101, 102, 103
ALL = 0b11


def server(*members: int, me: int = A, first_clock: int = 0) -> tuple[Replication, Iterations]:
    replication = Replication(me)
    replication.handle(Change(1, (chain_group(members or (A,), None, ALL),)))
    iterations = Iterations(replication, first_clock)
    assert iterations.lead(1, replication.primary, ()) == []
    return replication, iterations


def admit(iterations: Iterations, worker: int, sequence: int, iteration: int, buckets: int) -> int:
    """Store a push; return the buckets for which it is new."""
    fresh = iterations.missing(worker, sequence, iteration, buckets)
    if fresh:
        iterations.admit(worker, sequence, iteration, fresh)
    return fresh


def push_sums(replication: Replication, iterations: Iterations, sums: list[Sum]) -> None:
    """Push sums like a runtime."""
    for total in sums:
        for instruction in replication.push(total, AGGREGATE, total.iteration + 1, total.buckets):
            if isinstance(instruction, Acknowledge):
                iterations.acknowledged(total.iteration)


def change(replication: Replication, version: int, *groups: ChainGroup) -> None:
    replication.handle(Change(version, groups))


def test_an_iteration_is_one_sum_and_is_readable_when_the_chain_has_it() -> None:
    replication, iterations = server(A, B)
    assert iterations.may_read(0)
    assert admit(iterations, 1, 0, 0, ALL) == ALL
    assert admit(iterations, 2, 0, 0, 0b01) == 0b01
    assert admit(iterations, 2, 0, 0, ALL) == 0b10
    sums = iterations.complete(0, (1, 2))
    assert sums == [Sum(0, (1, 2), ALL)]
    push_sums(replication, iterations, sums)
    assert not iterations.may_read(1)
    assert iterations.durable == 0
    assert replication.handle(Acknowledged(B, 1)) == [Acknowledge(sums[0])]
    iterations.acknowledged(0)
    assert iterations.may_read(1)
    assert not iterations.may_read(2)
    assert admit(iterations, 1, 0, 0, ALL) == 0  # the push is already in the sum


def test_a_departed_worker_is_in_all_sums_up_to_its_last_tick() -> None:
    replication, iterations = server()
    admit(iterations, 1, 0, 0, ALL)
    admit(iterations, 2, 0, 0, ALL)
    admit(iterations, 2, 1, 1, ALL)
    assert iterations.left(2) == []
    sums = iterations.complete(0, (1, 2))
    assert sums == [Sum(0, (1, 2), ALL)]
    push_sums(replication, iterations, sums)
    assert iterations.complete(1, (1,)) == [Sum(1, (1,), ALL)]


def test_after_a_takeover_no_iteration_completes_before_all_workers_have_resent() -> None:
    replication, iterations = server(C, A)
    push = Forwarded("sum", C, AGGREGATE, 1, 1, 0b01)  # the sum of one bucket of iteration 0 has arrived
    replication.handle(push)
    assert iterations.complete(0, (1, 2)) == []
    change(replication, 2, chain_group((A,), None, ALL))
    assert iterations.lead(2, ALL, (1, 2)) == []
    assert iterations.pending_workers == {1, 2}
    assert iterations.durable == 0
    assert not iterations.may_read(0)
    assert iterations.complete(1, (1, 2)) == []
    assert admit(iterations, 1, 0, 0, ALL) == 0b10
    assert iterations.synced(1, 1) == []  # a resync for an older version
    assert iterations.synced(1, 2) == []
    sums = iterations.synced(2, 2)
    assert sums == [Sum(0, (1, 2), 0b10), Sum(1, (1, 2), ALL)]
    push_sums(replication, iterations, sums)
    assert iterations.may_read(2)
    assert iterations.lead(2, ALL, (1, 2)) == []


def test_a_takeover_does_not_wait_for_departed_or_synced_workers() -> None:
    replication, iterations = server(C, A)
    change(replication, 2, chain_group((A,), None, ALL))
    iterations.synced(1, 2)
    iterations.lead(2, ALL, (1, 2))
    assert iterations.pending_workers == {2}
    iterations.left(2)
    assert iterations.may_read(0)


def test_a_resent_push_is_in_the_sum_without_a_tick_at_the_gate() -> None:
    # Found by the simulation: a new server's gate begins at the current iteration, without the ticks of the incomplete
    # iterations, so the workers' pushes for them were dropped.
    replication, iterations = server(C, A, first_clock=5)
    assert iterations.durable == 5
    change(replication, 2, chain_group((A,), None, ALL))
    iterations.lead(2, ALL, (1, 2))
    admit(iterations, 1, 0, 4, ALL)
    admit(iterations, 1, 1, 5, ALL)
    iterations.synced(1, 2)
    assert iterations.synced(2, 2) == [Sum(4, (1,), ALL)]
    assert iterations.complete(5, (2,)) == [Sum(5, (1, 2), ALL)]


def test_an_iteration_with_two_sums_waits_for_both() -> None:
    # Formerly, the first acknowledgement was taken as the acknowledgement of both sums.
    replication, iterations = server(A, B)
    change(replication, 2, chain_group((A, B), None, 0b01), chain_group((C, A), None, 0b10))
    iterations.lead(2, 0b01, (1,))
    admit(iterations, 1, 0, 0, 0b01)
    push_sums(replication, iterations, iterations.complete(0, (1,)))
    change(replication, 3, chain_group((A, B), None, ALL))
    iterations.lead(3, ALL, (1,))
    admit(iterations, 1, 0, 0, 0b10)
    push_sums(replication, iterations, iterations.synced(1, 3))
    iterations.acknowledged(0)
    assert iterations.durable == 0
    iterations.acknowledged(0)
    assert iterations.durable == 1


def test_an_iteration_waits_for_an_inherited_sum() -> None:
    replication, iterations = server(C, A, B)
    replication.handle(Forwarded("sum", C, AGGREGATE, 1, 1, ALL))
    iterations.complete(0, (1,))
    change(replication, 2, chain_group((A, B), None, ALL))
    iterations.lead(2, ALL, (1,))
    iterations.synced(1, 2)
    assert iterations.durable == 0
    replication.handle(Acknowledged(B, 2))
    assert iterations.durable == 1


def test_a_rejoining_worker_starts_after_the_complete_iterations_of_all_buckets() -> None:
    # Found by the simulation: a worker had finished at the former primary, which continued without it. It joined again
    # at this primary, which had not received the ticks of the other workers, and its push was dropped.
    replication, iterations = server(C, A)
    replication.handle(Forwarded("sum", C, AGGREGATE, 4, 1, 0b01))
    assert iterations.first_clock == 0  # another server leads
    change(replication, 2, chain_group((A,), None, ALL))
    assert iterations.first_clock == 4


def filled_chain(*workers: int) -> tuple[Replication, Iterations]:
    """Return a server that has a push of worker 1 in iteration 0. Its first successor B is being filled."""
    replication, iterations = server()
    assert not iterations.may_report(ALL)  # there is no fill
    admit(iterations, 1, 0, 0, ALL)
    change(replication, 2, chain_group((A,), B, ALL))
    iterations.lead(2, ALL, workers)
    return replication, iterations


def test_a_fill_is_reported_when_workers_retain_pushes() -> None:
    replication, iterations = filled_chain(1, 2)
    iterations.synced(1, 2)
    iterations.synced(2, 1)  # worker 2 has an older version, in which it does not retain pushes
    push_sums(replication, iterations, iterations.complete(0, (1,)))
    assert not iterations.may_report(ALL)
    admit(iterations, 2, 0, 1, ALL)
    iterations.synced(2, 2)
    assert not iterations.may_report(ALL)  # a push of iteration 1 arrived that is not retained
    push_sums(replication, iterations, iterations.complete(1, (1, 2)))
    assert iterations.may_report(ALL)
    admit(iterations, 1, 1, 2, ALL)
    assert iterations.may_report(ALL)
    # This remains true while the server has a successor, because new workers retain pushes from their start.
    change(replication, 3, chain_group((A,), C, 0b01), chain_group((B,), None, 0b10))
    iterations.lead(3, 0b01, (1, 2, 3))
    assert iterations.may_report(0b01)


def test_a_fill_is_reported_when_the_new_replica_has_the_last_unstored_sum() -> None:
    replication, iterations = filled_chain(1)
    replication.handle(LinkUp(B))
    replication.next_fill(B)
    sums = iterations.complete(0, (1,))
    push_sums(replication, iterations, sums)
    iterations.synced(1, 2)
    assert not iterations.may_report(ALL)
    assert replication.handle(Acknowledged(B, 2)) == [Acknowledge(sums[0])]
    iterations.acknowledged(0)
    assert iterations.may_report(ALL)


def test_a_fill_is_reported_although_workers_leave_or_finish() -> None:
    _, iterations = filled_chain(1, 2)
    iterations.synced(1, 2)
    assert not iterations.may_report(ALL)
    iterations.forget(1, 0)  # worker 1 has no tick, so its pushes are in no sum
    iterations.left(2)
    assert iterations.may_report(ALL)
    _, iterations = filled_chain(1, 2)
    iterations.synced(1, 2)
    iterations.synced(2, 2)
    assert not iterations.may_report(ALL)
    iterations.forget(1, 0)  # all workers retain pushes, but worker 1 has left
    assert iterations.may_report(ALL)


def test_a_fill_is_reported_after_an_expected_worker_leaves() -> None:
    # Formerly, the drain or join waited until one worker completed an iteration alone.
    replication, iterations = filled_chain(1, 2)
    admit(iterations, 2, 0, 0, 0b01)
    admit(iterations, 2, 1, 1, ALL)
    iterations.synced(1, 2)
    iterations.synced(2, 2)
    iterations.forget(2, 1)  # worker 2 has ticked iteration 0
    iterations.left(2)
    assert not iterations.may_report(ALL)  # only this server has pushes of this iteration
    push_sums(replication, iterations, iterations.complete(0, (1, 2)))
    assert iterations.may_report(ALL)


def test_a_fill_waits_for_ticked_pushes_of_a_departed_worker() -> None:
    replication, iterations = filled_chain(1, 2)
    admit(iterations, 2, 0, 0, ALL)
    for worker, clock in ((1, 1), (2, 0)):
        iterations.synced(worker, 2)
        assert not iterations.may_report(ALL)
        iterations.forget(worker, clock)
        iterations.left(worker)
        assert not iterations.may_report(ALL)
    push_sums(replication, iterations, iterations.complete(0, (1,)))
    assert iterations.may_report(ALL)


def test_ticked_pushes_of_a_departed_worker_reach_the_chain_before_a_fill_report() -> None:
    replication, iterations = filled_chain(2)
    iterations.forget(1, 1)
    iterations.left(1)
    iterations.synced(2, 2)
    assert not iterations.may_report(ALL)
    push_sums(replication, iterations, iterations.complete(0, (1, 2)))
    assert iterations.may_report(ALL)


def test_workers_confirm_retention_again_after_a_view_without_successor_or_a_missed_view() -> None:
    replication, iterations = filled_chain()
    push_sums(replication, iterations, iterations.complete(0, (1,)))
    assert iterations.may_report(ALL)
    change(replication, 4, chain_group((A,), B, ALL))
    iterations.lead(4, ALL, (1,))
    assert not iterations.may_report(ALL)
    iterations.synced(1, 4)
    assert iterations.may_report(ALL)
    for version, filling in ((5, None), (6, B)):
        change(replication, version, chain_group((A,), filling, ALL))
        iterations.lead(version, ALL, (1,))
        assert not iterations.may_report(ALL)


def test_a_fill_of_another_primarys_buckets_is_reported_immediately() -> None:
    replication, iterations = server(C, A)
    change(replication, 2, chain_group((C, A), B, ALL))
    iterations.lead(2, 0, (1,))
    assert iterations.may_report(ALL)


def test_a_worker_retired_without_a_tick_is_not_in_the_sum() -> None:
    _, iterations = server()
    for worker in (1, 2):
        admit(iterations, worker, 0, 0, ALL)
    iterations.forget(1, 0)
    assert iterations.complete(0, (2,)) == [Sum(0, (2,), ALL)]


def test_workers_pending_in_a_takeover() -> None:
    takeover = Takeover()
    assert takeover.is_over
    takeover.lead(1, 0b01, ())
    assert takeover.is_over
    takeover.lead(2, 0b11, (7, 8))
    assert takeover.pending_workers == {7, 8}
    takeover.synced(7, 2, 2)
    takeover.lead(3, 0b11, (7, 8))  # the takeover continues: all workers must resync in the newer view
    assert takeover.pending_workers == {7, 8}
    takeover.synced(7, 3, 3)
    takeover.left(8)
    assert takeover.is_over
    takeover.lead(4, 0b01, (7,))
    assert takeover.is_over


def test_iterations_of_a_short_chain_become_durable_when_it_is_long_enough() -> None:
    replication = Replication(A, min_replicas=1)
    iterations = Iterations(replication)
    change(replication, 1, chain_group((A, B), None, ALL))
    iterations.lead(1, ALL, ())
    push_sums(replication, iterations, iterations.complete(0, (1,)))
    replication.handle(Acknowledged(B, 1))
    iterations.acknowledged(0)
    assert iterations.durable == 1
    change(replication, 2, chain_group((A,), C, ALL))
    iterations.lead(2, ALL, (1,))
    iterations.synced(1, 2)
    push_sums(replication, iterations, iterations.complete(1, (1,)))
    assert iterations.durable == 1
    assert not iterations.may_read(2)
    assert iterations.may_report(ALL)  # otherwise the fill would never complete
    change(replication, 3, chain_group((A, C), None, ALL))
    iterations.lead(3, ALL, (1,))
    assert iterations.durable == 2
    assert iterations.may_read(2)


def test_no_iteration_of_a_new_short_chain_is_stable() -> None:
    """The former primary may have completed iterations whose pushes workers still retain."""
    replication = Replication(A, min_replicas=1)
    iterations = Iterations(replication)
    change(replication, 1, chain_group((A, B), None, 0b01), chain_group((C, A), None, 0b10))
    iterations.lead(1, 0b01, ())
    push_sums(replication, iterations, iterations.complete(0, (1,)))
    replication.handle(Acknowledged(B, 1))
    iterations.acknowledged(0)
    assert iterations.durable == 1
    change(replication, 2, chain_group((A, B), None, 0b01), chain_group((A,), B, 0b10))
    iterations.lead(2, ALL, (1,))
    push_sums(replication, iterations, iterations.synced(1, 2))
    assert iterations.durable == 0
    assert not iterations.may_read(1)
    change(replication, 3, chain_group((A, B), None, ALL))
    iterations.lead(3, ALL, (1,))
    assert iterations.durable == 1
    assert iterations.may_read(1)


def test_a_takeover_needs_resyncs_of_the_current_view() -> None:
    takeover = Takeover()
    takeover.lead(5, 0b1, {7, 8})
    takeover.synced(7, 4, 5)  # the worker resent its pushes to another server, because it did not have this view
    assert takeover.pending_workers == {7, 8}
    takeover.synced(7, 5, 5)
    takeover.synced(8, 6, 5)
    assert takeover.pending_workers == frozenset()
    takeover.lead(6, 0b11, {7, 8})
    assert takeover.pending_workers == {7}
    takeover.synced(7, 5, 6)
    takeover.left(7)
    assert takeover.is_over

"""Check messages, tickets, groups and invalid calls; :mod:`.collectives` lists the checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from paceline.collectives import CollectiveTicket, Group
from paceline.errors import UsageError
from paceline.testing.group_arrays import SIZES, Array, expect, same, sample


def check_objects(group: Group) -> None:
    """Numbers, strings, bytes, lists and dicts of different sizes reach all ranks."""
    values = [
        {"rank": rank, "text": "ü" * rank, "data": bytes(5000 * rank), "of": [None, 1.5]} for rank in range(group.size)
    ]
    for root in range(group.size):
        assert group.broadcast_object(values[root] if group.rank == root else None, root=root) == values[root]
        gathered = group.gather_objects(values[group.rank], root=root)
        assert gathered == (values if group.rank == root else None)
    assert group.all_gather_objects(values[group.rank]) == values
    assert group.all_gather_objects(None) == [None] * group.size
    expect(UsageError, lambda: group.all_gather_objects(object()))


def check_send_receive(group: Group) -> None:
    """Messages are matched by tag and source, in the order of sending. A rank can also send to itself."""
    rank, size = group.rank, group.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for number in SIZES:
        ticket = group.send_async(sample(rank, number), after, tag=number)
        out = np.zeros(number, np.float32)
        assert group.recv(out, before, tag=number) == before
        same(out, sample(before, number))
        ticket.wait()
    tickets = [group.send_async(np.array([rank, tag, turn]), after, tag=tag) for turn in range(5) for tag in range(4)]
    for tag in (2, 0, 3, 1):
        for turn in range(5):
            got = np.zeros(3, np.int64)
            group.recv(got, before, tag=tag)
            assert got.tolist() == [before, tag, turn]
    for ticket in tickets:
        ticket.wait()
    tickets = [group.send_async(np.full(10, rank), to, tag=7) for to in range(size)]
    sources = set()
    for _ in range(size):
        any_one = np.zeros(10, np.int64)
        source = group.recv(any_one, tag=7)
        sources.add(source)
        assert any_one.tolist() == [source] * 10
    assert sources == set(range(size))
    arrays = [np.zeros((2, 700_000)).T for _ in range(size)]
    receives = [group.recv_async(array, source, tag=8) for source, array in enumerate(arrays)]
    for to in range(size):
        group.send(np.full((700_000, 2), float(rank)), to, tag=8)
    for source, ticket in enumerate(receives):
        assert ticket.result() == source
        assert (arrays[source] == source).all()
    group.barrier()


def check_dropped_tickets(group: Group) -> None:
    """A message is sent even if its ticket and array are dropped."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for turn in range(10):
        group.send_async(np.full(100_000, float(turn)), after)
    got = np.zeros(100_000)
    for turn in range(10):
        group.recv(got, before)
        same(got, np.full(100_000, float(turn)))
    group.barrier()


def check_async(group: Group) -> None:
    """Calls run in the order of submission, synchronous ones included."""
    finished: list[int] = []
    tickets: list[tuple[CollectiveTicket, Array]] = []
    for turn in range(40):
        size = (3, 5000, 80_000)[turn % 3]
        given = np.full(size, turn + group.rank, np.int64)
        sum_ = np.full(size, turn * group.size + group.size * (group.size - 1) // 2)
        kind = turn % 5
        if kind == 0:
            same(group.all_reduce(given), sum_, turn)
        elif kind == 1:
            tickets.append((group.all_reduce_async(given, out=given), sum_))
        elif kind == 2:
            root = turn % group.size
            tickets.append((group.broadcast_async(given, root=root), np.full(size, turn + root)))
        elif kind == 3:
            expected = np.repeat(np.arange(group.size) + turn, size)
            tickets.append((group.all_gather_async(given), expected))
        else:
            tickets.append((group.all_reduce_async(given), sum_))
        if kind:
            tickets[-1][0].add_done_callback(lambda _, turn=turn: finished.append(turn))  # type: ignore[misc]
    for ticket, expected in tickets:
        same(ticket.result(), expected)
        assert ticket.done()
        assert ticket.exception() is None
    group.barrier_async().wait()
    assert finished == [turn for turn in range(40) if turn % 5]


def check_async_does_not_wait(group: Group) -> None:
    """Asynchronous calls return immediately, even if earlier calls wait for other ranks."""
    if group.rank == 0:
        tickets = [group.all_reduce_async(np.ones(5)) for _ in range(3)]
        assert not tickets[0].done()  # rank 1 has not made its call yet
        group.send(np.zeros(1), 1)
        tickets += [group.all_reduce_async(np.ones(5)) for _ in range(3)]
        for ticket in tickets:
            ticket.wait()
    else:
        if group.rank == 1:
            group.recv(np.zeros(1), 0)
        for _ in range(6):
            same(group.all_reduce(np.ones(5)), np.full(5, float(group.size)))


def check_programs(group: Group) -> None:
    """A long random program, equal on all ranks: no call leaves state that breaks the next one."""
    random = np.random.default_rng(42)
    for turn in range(100):
        size = int(random.choice([0, 1, 5, 900, 9000, 33_000, 70_000]))
        root, kind, has_op = int(random.integers(group.size)), int(random.integers(8)), bool(random.integers(2))
        given = sample(group.rank, size * group.size if kind in (4, 5) else size, seed=turn)
        all_given = [sample(rank, given.size, seed=turn) for rank in range(group.size)]
        op = "max" if has_op else "sum"
        total = np.max(all_given, axis=0) if has_op else np.sum(all_given, axis=0)
        own = slice(size * group.rank, size * (group.rank + 1))
        if kind == 0:
            group.barrier()
        elif kind == 1:
            same(group.all_reduce(given, op), total, (turn, size))
        elif kind == 2:
            same(group.broadcast(given, root=root), all_given[root], (turn, size))
        elif kind == 3:
            same(group.all_gather(given), np.concatenate(all_given), (turn, size))
        elif kind == 4:
            same(group.reduce_scatter(given, op), total[own], (turn, size))
        elif kind == 5:
            same(group.all_to_all(given), np.concatenate([values[own] for values in all_given]), (turn, size))
        elif kind == 6:
            got = group.reduce(given, op, root=root)
            same(total if got is None else got, total, (turn, size))
        else:
            got = group.gather(given, root=root)
            same(np.concatenate(all_given) if got is None else got, np.concatenate(all_given), (turn, size))


def check_subgroups(group: Group) -> None:
    """Subgroups work as groups, also concurrently with the whole group."""
    size, rank = group.size, group.rank
    backwards = group.subgroup(reversed(range(size)))
    assert backwards is not None
    assert (backwards.rank, backwards.size, backwards.ranks) == (size - 1 - rank, size, group.ranks[::-1])
    same(backwards.all_gather(np.array(rank)), np.arange(size)[::-1])
    first = group.subgroup([0])
    assert (first is None) == (rank != 0)
    if first is not None:
        same(first.all_reduce(np.ones(3), "mean"), np.ones(3))
        first.barrier()
        first.close()
    parts = group.split(rank % 2, key=-rank)
    assert parts is not None
    members = [other for other in range(size) if other % 2 == rank % 2][::-1]
    assert parts.ranks == tuple(group.ranks[other] for other in members)
    for turn, number in enumerate((10, 100_000, 3)):
        got = parts.all_reduce(np.full(number, rank + turn))
        same(got, np.full(number, sum(members) + turn * len(members)))
        group.barrier()
    again = group.split(None if rank == 0 else 5)
    assert (again is None) == (rank == 0)
    if again is not None:
        assert again.ranks == group.ranks[1:]
        same(again.all_gather(np.array(rank)), np.arange(1, size))
    without_first = group.difference([group.ranks[0]])
    both = group.intersection(group.ranks[1:])
    assert (without_first is None) == (both is None) == (rank == 0)
    for made in (without_first, both):
        if made is not None:
            assert made.ranks == group.ranks[1:]
            made.barrier()
            made.close()
    for made in (again, parts, backwards):
        if made is not None:
            made.close()
    expect(UsageError, lambda: group.subgroup([0, 0]))
    expect(UsageError, lambda: group.subgroup([size]))
    expect(UsageError, lambda: group.subgroup([]))
    group.barrier()


def check_union(group: Group) -> None:
    """Two groups without a common rank form a union."""
    half = group.split(int(group.rank >= group.size // 2))
    assert half is not None
    outside = [rank for rank in group.ranks if rank not in half.ranks]
    union = half.union(outside)
    assert union is not None
    assert sorted(union.ranks) == sorted(group.ranks)
    assert union.ranks[union.rank] == group.ranks[group.rank]
    same(union.all_gather(np.array(group.ranks[group.rank])), np.array(union.ranks))
    union.close()
    half.close()
    group.barrier()


def check_threads(group: Group) -> None:
    """Several groups of the same ranks work concurrently, each in its own thread."""
    made = [group.subgroup(range(group.size)) for _ in range(3)]
    errors: list[BaseException] = []

    def work(own: Group, number: int) -> None:
        try:
            for turn in range(30):
                given = np.full((10, 20_000, 90_000)[turn % 3], number * turn + own.rank)
                expected = own.size * number * turn + own.size * (own.size - 1) // 2
                assert (own.all_reduce(given) == expected).all()
                after, before = (own.rank + 1) % own.size, (own.rank - 1) % own.size
                ticket = own.send_async(np.array([number, turn]), after)
                got = np.zeros(2, np.int64)
                own.recv(got, before)
                ticket.wait()
                assert got.tolist() == [number, turn]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(member, number)) for number, member in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for member in made:
        assert member is not None
        member.close()
    group.barrier()


def check_wrong_use(group: Group) -> None:
    """If a rank can detect an invalid call, it raises UsageError before it sends a message; the group stays usable."""
    size, rank = group.size, group.rank
    ones = np.ones(size)
    read_only = np.ones(3)
    read_only.flags.writeable = False
    uneven = [1] * (size + 1)
    calls: tuple[Callable[[], object], ...] = (
        lambda: group.all_reduce(ones, "median"),
        lambda: group.all_reduce(np.ones(3, int), "mean"),
        lambda: group.all_reduce(ones, "bitwise_or"),
        lambda: group.all_reduce(np.ones(3, complex)),
        lambda: group.all_reduce(np.array(["text"])),
        lambda: group.all_reduce(np.ones(3, ">f8")),
        lambda: group.all_reduce(ones, out=np.ones(size + 1)),
        lambda: group.all_reduce(ones, out=np.ones(size, np.float32)),
        lambda: group.all_reduce(read_only, out=read_only),
        lambda: group.reduce(read_only, root=rank, out=read_only),
        lambda: group.reduce(ones, root=size),
        lambda: group.broadcast(ones, root=-1),
        lambda: group.broadcast([1, 2]),
        lambda: group.broadcast(read_only, root=(rank + 1) % size),
        lambda: group.reduce_scatter(np.ones(size + 1)),
        lambda: group.reduce_scatter(np.ones(())),
        lambda: group.reduce_scatter(ones, sizes=uneven),
        lambda: group.all_gather(ones, sizes=[size + 1] * size),
        lambda: group.all_gather(ones, sizes=uneven),
        lambda: group.scatter(np.ones(size + 1), np.ones(1), root=rank),
        lambda: group.scatter(ones, np.ones(1, int), root=rank),
        lambda: group.scatter(ones, np.ones(2), sizes=[1] * size, root=(rank + 1) % size),
        lambda: group.all_to_all(np.ones(size + 1)),
        lambda: group.all_to_all(ones, send_sizes=[-1, *[1] * (size - 1)]),
        lambda: group.all_to_all(ones, send_sizes=[1] * size, receive_sizes=uneven),
        lambda: group.all_to_all(ones, send_sizes=[1] * size, receive_sizes=[2] * size),
        lambda: group.send(ones, size),
        lambda: group.recv(read_only, 0),
        lambda: group.recv(ones, -1),
        lambda: group.union([len(group.ranks) + 1000]),
    )
    for number, call in enumerate(calls):
        try:
            call()
        except UsageError:
            continue
        raise AssertionError(f"invalid call {number} raised nothing")
    same(group.all_reduce(ones), np.full(size, float(size)))


def check_explain(group: Group) -> None:
    """The group explains its choices before and after an operation."""
    for operation in ("all_reduce", "broadcast", "all_to_all", "barrier"):
        for num_bytes in (0, 1000, 10_000_000):
            text = group.explain(num_bytes, operation)
            assert text.startswith(f"{operation} of {num_bytes:,} bytes on {group.size} ranks: "), text
    group.all_reduce(np.ones(500_000, np.float32))
    text = group.explain(2_000_000)
    chosen = [line.split() for line in text.splitlines() if line.startswith("*")]
    assert len(chosen) == 1, text
    assert chosen[0][1] in text.splitlines()[0], text
    assert "µs" in text or "ms" in text
    expect(UsageError, lambda: group.explain(5, "dance"))


CHECKS: Final = (
    check_objects,
    check_send_receive,
    check_dropped_tickets,
    check_async,
    check_async_does_not_wait,
    check_programs,
    check_subgroups,
    check_union,
    check_threads,
    check_wrong_use,
    check_explain,
)

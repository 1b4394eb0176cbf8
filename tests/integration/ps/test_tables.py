"""Tables through a client: pulled values equal the pushed values, on any server."""

from __future__ import annotations

import numpy as np
import pytest
from tests.memory_transport import MemoryTransport
from tests.reference import kernels as reference

from paceline.errors import TableMismatchError, UsageError
from paceline.ps import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Constant,
    Momentum,
    Normal,
    SparseStore,
    Ticket,
    Uniform,
    UpdateRule,
    messages,
    to_fields,
)
from paceline.tables.initializers import Initializer, Zeros

from .harness import Cluster, Floats, Keys, floats, keys_of, random_keys

SERVERS = pytest.mark.parametrize("servers", [1, 2, 3])


@SERVERS
@pytest.mark.parametrize("dim", [1, 5])
def test_sparse_push_and_pull(servers: int, dim: int) -> None:
    random = np.random.default_rng(servers)
    keys = random_keys(random, 300)
    grads = random.standard_normal((len(keys), dim), np.float32)
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", dim=dim, update=SGD(lr=1.0))
        assert len(table) == 0
        assert not table.pull(keys).any()
        assert len(table) == 0  # a pull creates no rows
        table.push(keys, grads).wait()
        assert len(table) == len(keys)
        again = random.permutation(len(keys))
        assert np.array_equal(table.pull(keys[again]), -grads[again])
        out = np.full((len(keys), dim), np.nan, np.float32)
        assert table.pull(keys, out) is out
        assert np.array_equal(out, -grads)
        flat = np.empty(len(keys) * dim, np.float32)
        assert np.array_equal(table.pull(keys, flat).reshape(-1, dim), -grads)


@SERVERS
def test_every_key_is_legal(servers: int) -> None:
    keys = keys_of(0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
    with Cluster(servers=servers) as cluster:
        table = cluster.connect().sparse_table("w", update=SGD(lr=1.0))
        table.push(keys, np.arange(6, dtype=np.float32))  # with dim 1, the shape [n] is accepted
        assert table.pull(keys).tolist() == [[0], [-1], [-2], [-3], [-4], [-5]]
        assert table.erase(keys[::2]) == 3
        assert table.erase(keys[::2]) == 0
        assert table.pull(keys).tolist() == [[0], [-1], [0], [-3], [0], [-5]]
        assert len(table) == 3
        assert table.pull([1, 2**63 - 1]).tolist() == [[-1], [0]]  # lists and signed integers are converted
        assert table.pull(np.array([1], np.int32)).tolist() == [[-1]]


@SERVERS
def test_duplicates_are_summed_and_applied_once(servers: int) -> None:
    keys = keys_of(5, 9, 5, 5, 2**64 - 1, 9)
    grads = floats(1, 2, 4, 8, 16, 32)
    with Cluster(servers=servers) as cluster:
        table = cluster.connect().sparse_table("w", update=Adagrad(lr=1.0))
        values = table.push_pull(keys, grads)
        # Adagrad's first step is lr with any gradient, so a separate gradient for every duplicate would be visible.
        assert values.ravel() == pytest.approx([-1] * 6)
        momentum = cluster.connect().sparse_table("v", update=SGD(lr=1.0))
        momentum.push(keys, grads)
        assert momentum.pull(keys).ravel().tolist() == [-13, -34, -13, -13, -16, -34]
        dense = cluster.connect().dense_table("d", size=10, update=SGD(lr=1.0))
        assert dense.push_pull(grads[:4], keys=keys_of(3, 3, 0, 9)).tolist() == [-3, -3, -4, -8]


@SERVERS
def test_empty_requests(servers: int) -> None:
    nothing, none = np.empty(0, np.uint64), np.empty(0, np.float32)
    with Cluster(servers=servers, workers=1) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", dim=3, update=SGD(lr=1.0))
        dense = client.dense_table("d", size=4, update=SGD(lr=1.0))
        assert table.pull([]).shape == (0, 3)
        assert table.push_pull(nothing, none.reshape(0, 3)).shape == (0, 3)
        table.push(nothing, none.reshape(0, 3)).wait()
        table.push(nothing, none.reshape(0, 3), tick=True).wait()
        assert client.clock == 1
        assert dense.pull(start=2, stop=2).shape == (0,)
        assert dense.push_pull(none, start=4).shape == (0,)
        assert dense.pull(keys=nothing).shape == (0,)
        dense.push(none, keys=nothing, tick=True).wait()
        dense.push(none, tick=True).wait()
        assert client.clock == 3
        assert table.erase([]) == 0
        assert len(table) == 0


@SERVERS
@pytest.mark.parametrize("size", [1, 100, 5000])
def test_dense_ranges_and_keys(servers: int, size: int) -> None:
    random = np.random.default_rng(size)
    expected = np.zeros(size, np.float32)
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        table = client.dense_table("net", size=size, update=SGD(lr=1.0))
        assert not table.pull().any()
        for _ in range(20):
            start, stop = sorted(random.integers(0, size + 1, 2).tolist())
            grads = random.integers(-4, 5, stop - start).astype(np.float32)
            table.push(grads, start=start)
            expected[start:stop] -= grads
            start, stop = sorted(random.integers(0, size + 1, 2).tolist())
            assert np.array_equal(table.pull(start=start, stop=stop), expected[start:stop])
            keys = random.integers(0, size, 7).astype(np.uint64)
            assert np.array_equal(table.pull(keys=keys), expected[keys])
            np.subtract.at(expected, keys, np.float32(2))
            values = table.push_pull(np.full(7, 2, np.float32), keys=keys)
            assert np.array_equal(values, expected[keys])
        out = np.empty(size, np.float32)
        assert table.pull(out) is not None
        assert np.array_equal(out, expected)
        part = np.empty((size + 1) // 2, np.float32)
        table.pull(part, start=size // 2)
        assert np.array_equal(part, expected[size // 2 : size // 2 + len(part)])
        whole = table.push_pull(np.ones(size, np.float32), out)
        assert np.array_equal(whole, expected - 1)
        assert np.array_equal(out, expected - 1)
        assert sum(server.tables["net"].rows for server in client.statistics()) == size


@SERVERS
def test_tickets_in_flight(servers: int) -> None:
    random = np.random.default_rng(1)
    keys = random_keys(random, 2000)
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", dim=2, update=SGD(lr=1.0))
        dense = client.dense_table("d", size=1000, update=SGD(lr=1.0))
        ones, ramp = np.ones((len(keys), 2), np.float32), np.ones(1000, np.float32)
        tickets: list[tuple[Ticket, tuple[int, int] | None]] = []
        for step in range(1, 31):
            chosen = keys[: 1 + 60 * step]
            tickets.append((table.push(chosen, ones[: len(chosen)]), None))
            tickets.append((dense.push(ramp), None))
            tickets.append((table.pull_async(chosen), (len(chosen), 2)))
            tickets.append((dense.push_pull_async(ramp), (1000, 2)))
        assert tickets[-1][0].done() in (False, True)
        values = {}
        for number in random.permutation(len(tickets)).tolist():
            values[number] = tickets[number][0].result()
            assert tickets[number][0].done()
        for step in range(30):
            assert values[4 * step] is None
            sparse = values[4 * step + 2]
            assert sparse.shape == tickets[4 * step + 2][1]
            assert (sparse[:60] == -(step + 1)).all()
            assert (values[4 * step + 3] == -2 * (step + 1)).all()
        assert tickets[0][0].result() is None  # a second call
        assert not tickets[0][0].dropped
        while not (last := table.pull_async(keys)).done():
            pass
        assert np.array_equal(last.result(), table.pull(keys))


def test_more_requests_in_flight_than_a_client_permits() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        tickets = [table.push_pull_async(keys_of(1, 2, 3), floats(1, 1, 1)) for _ in range(1000)]
        assert [ticket.result()[0, 0] for ticket in tickets] == [-1.0 - n for n in range(1000)]


def test_large_answers_in_flight_do_not_block_both_ends() -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        table = client.dense_table("d", size=6_000_000, update=SGD(lr=1.0))
        grads = np.ones(table.size, np.float32)
        tickets = [table.push_pull_async(grads) for _ in range(16)]  # 384 MB in each direction
        assert [ticket.result()[-1] for ticket in tickets] == [-1.0 - n for n in range(16)]


def test_tables_are_listed_and_found_by_other_clients() -> None:
    with Cluster(servers=2) as cluster:
        client, other = cluster.connect(), cluster.connect(observer=True)
        table = client.sparse_table("w", dim=2, update=Adam(lr=0.1), initializer=Constant(value=3), seed=4)
        client.dense_table("d", size=7, update=SGD(lr=1.0))
        assert [spec.name for spec in other.tables()] == ["w", "d"]
        found = other.open_table(other.tables()[0])
        assert found.number == table.number
        assert other.sparse_table("w", dim=2, update=Adam(lr=0.1), initializer=Constant(value=3), seed=4) is found
        assert client.sparse_table("w", dim=2, update=Adam(lr=0.1), initializer=Constant(value=3), seed=4) is table


@SERVERS
def test_set_update(servers: int) -> None:
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        dense = client.dense_table("d", size=600, update=SGD(lr=1.0))
        keys, ones = np.arange(600, dtype=np.uint64), np.ones(600, np.float32)
        table.push(keys, ones)
        dense.push(ones)
        table.set_update(SGD(lr=0.5))
        dense.set_update(SGD(lr=0.25))
        table.push(keys, ones)
        dense.push(ones)
        assert (table.pull(keys) == -1.5).all()
        assert (dense.pull() == -1.25).all()


@SERVERS
def test_a_table_is_declared_with_the_initial_or_current_hyperparameters(servers: int) -> None:
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        for lr in (0.5, 0.25):
            table.set_update(SGD(lr=lr))
        for lr in (1.0, 0.25):
            other = cluster.connect(observer=True)
            found = other.sparse_table("w", update=SGD(lr=lr))
            assert found.number == table.number
            assert client.sparse_table("w", update=SGD(lr=lr)) is table
        for update in (SGD(lr=0.5), SGD(lr=0.25, weight_decay=0.1), Momentum(lr=0.25)):
            with pytest.raises(TableMismatchError, match=r"exists as .*lr=0\.25"):
                cluster.connect(observer=True).sparse_table("w", update=update)
        found.push(keys_of(1), floats(1)).wait()
        assert table.pull(keys_of(1)) == -0.25  # a declaration changes nothing


@SERVERS
def test_a_change_of_hyperparameters_without_servers_takes_effect_with_the_next_declaration(
    servers: int,
) -> None:
    """The process that made the change died before it could notify the servers."""
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        client.link.call(messages.ChangeUpdate(table="w", update=to_fields(SGD(lr=0.5))))
        observer = cluster.connect(observer=True)
        (spec,) = observer.tables()
        assert observer.open_table(spec).spec == spec
        assert cluster.connect(observer=True).sparse_table("w", update=SGD(lr=1.0)).spec == spec
        keys = np.arange(600, dtype=np.uint64)
        table.push(keys, np.ones(600, np.float32)).wait()
        assert (table.pull(keys) == -0.5).all()


def test_a_rejected_update_is_not_stored() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        with pytest.raises(
            UsageError, match="updated by SGD, and its state belongs to that rule: it cannot become Adam"
        ):
            table.set_update(Adam(lr=1.0))
        for name, update, message in [
            ("w", to_fields(Adam(lr=1.0)), "updated by SGD, and its state belongs to that rule: it cannot become Adam"),
            ("w", {"kind": "SGD", "lr": -1.0}, "lr=-1.0"),
            ("w", {"lr": 1.0}, "unknown kind None"),
            ("v", to_fields(SGD(lr=0.5)), "unknown table 'v'"),
        ]:
            with pytest.raises(UsageError, match=message):
                client.link.call(messages.ChangeUpdate(table=name, update=update))
        assert client.tables() == [table.spec]
        assert table.spec.update == to_fields(SGD(lr=1.0))


RULES: list[UpdateRule] = [
    SGD(lr=0.1, weight_decay=0.01),
    Momentum(lr=0.1),
    Adagrad(lr=0.1),
    Adam(lr=0.1),
    FTRL(l1=0.1),
]


def _steps(servers: int, rule: UpdateRule, dim: int) -> tuple[Floats, Floats]:
    """Return the contents of the tables after the same scripted run."""
    random = np.random.default_rng(5)
    keys = random_keys(random, 400)
    with Cluster(servers=servers) as cluster:
        client = cluster.connect()
        start = Uniform(low=-1, high=1)
        table = client.sparse_table("w", dim=dim, update=rule, initializer=start, seed=3)
        dense = client.dense_table("d", size=1500, update=rule, initializer=start, seed=3)
        for _ in range(6):
            batch = random.choice(keys, 200)  # keys with duplicates
            table.push(batch, random.standard_normal((200, dim), np.float32))
            first, last = sorted(random.integers(0, 1501, 2).tolist())
            dense.push(random.standard_normal(last - first, np.float32), start=first)
            dense.push(random.standard_normal(9, np.float32), keys=random.integers(0, 1500, 9).astype(np.uint64))
        return table.pull(keys), dense.pull()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("dim", [1, 4])
def test_results_do_not_depend_on_the_number_of_servers(rule: UpdateRule, dim: int) -> None:
    one = _steps(1, rule, dim)
    for servers in (2, 3):
        other = _steps(servers, rule, dim)
        assert np.array_equal(one[0].view(np.uint32), other[0].view(np.uint32))
        assert np.array_equal(one[1].view(np.uint32), other[1].view(np.uint32))


@pytest.mark.parametrize(
    "start", [Zeros(), Constant(value=2.5), Uniform(low=-2, high=3), Normal(mean=1, std=0.5)], ids=repr
)
def test_initial_values_depend_only_on_key_and_seed(start: Initializer) -> None:
    random = np.random.default_rng(6)
    keys = random_keys(random, 500)
    found: list[tuple[Floats, Floats]] = []
    for servers in (1, 3):
        with Cluster(servers=servers) as cluster:
            client = cluster.connect()
            table = client.sparse_table("w", dim=3, update=SGD(lr=1.0), initializer=start, seed=11)
            dense = client.dense_table("d", size=700, update=SGD(lr=1.0), initializer=start, seed=11)
            order = random.permutation(len(keys))
            touched = keys[order[:100]]
            table.push(touched, np.zeros((100, 3), np.float32))  # existing rows are unchanged
            values = np.empty((len(keys), 3), np.float32)
            values[order] = table.pull(keys[order])
            found.append((values, dense.pull()))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
    store = SparseStore(dim=3, rule=SGD(lr=1.0), initializer=start, seed=11)
    alone = np.empty((len(keys), 3), np.float32)
    store.pull(keys, alone)
    assert np.array_equal(alone, found[0][0])
    if not isinstance(start, Zeros | Constant):
        assert len(np.unique(alone)) > 1000


def test_a_cluster_can_use_the_memory_transport() -> None:
    with Cluster(servers=2, transport=MemoryTransport()) as cluster:
        table = cluster.connect().sparse_table("w", dim=2, update=SGD(lr=1.0))
        keys = random_keys(np.random.default_rng(2), 100)
        assert (table.push_pull(keys, np.ones((len(keys), 2), np.float32)) == -1).all()


def test_statistics_count_requests() -> None:
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        keys = np.arange(100, dtype=np.uint64)  # on both servers
        for _ in range(5):
            table.push(keys, np.ones(100, np.float32))
        table.pull(keys)
        for server in client.statistics():
            counted = server.tables["w"]
            assert (counted.pushes, counted.pulls, counted.dropped) == (5, 1, 0)
            assert 0 < counted.rows < 100
            assert counted.num_bytes > 0
            assert server.held == 0
            assert server.resident_bytes > 1 << 20
        received, sent = client.byte_counts()
        assert received >= sum(server.bytes_out for server in client.statistics()) - 4000
        assert sent > 5 * 100 * 12


def test_a_placement_covers_every_bucket() -> None:
    with Cluster(servers=3) as cluster:
        client = cluster.connect()
        assert set(client.servers.routes.owners.tolist()) == {0, 1, 2}
        keys: Keys = reference.unmix(np.arange(512, dtype=np.uint64) << np.uint64(55))
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(keys, np.ones(512, np.float32))
        rows = [server.tables["w"].rows for server in client.statistics()]
        assert rows == [int((client.servers.routes.owners == number).sum()) for number in range(3)]

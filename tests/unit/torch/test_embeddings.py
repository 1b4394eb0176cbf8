"""Embeddings compared with torch's: lookups, gradients, updates, and rows requested in advance."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.errors import NonFiniteError, UsageError
from paceline.kernels.dedup import sum_rows, take_rows
from paceline.ps import Constant, Normal, Zeros, from_fields
from paceline.tables.compile import compile_kernels
from paceline.tables.rules import RULES
from paceline.tables.types import Keys
from paceline.torch.embeddings import (
    Embedder,
    Embedding,
    EmbeddingBag,
    ReplicatedTables,
    RowTable,
    find_embeddings,
)
from paceline.torch.embeddings.tables import LocalTable, RowDeclaration, RowTicket
from paceline.torch.strategies.devices import choose_device

NUM_KEYS = 10
DIM = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def prepared(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Embedder:
    embedder = Embedder(ReplicatedTables())
    optimizers = [] if optimizer is None else [optimizer]
    embedder.serve(find_embeddings(module), optimizers)
    embedder.step_with(optimizers)
    return embedder


def pair(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Embedding, nn.Embedding, list[torch.optim.Optimizer]]:
    """Return Paceline's embedding and torch's embedding with the same rows, and their optimizers."""
    module_tested = Embedding(DIM, seed=7)
    optimizer = make(module_tested.parameters())
    prepared(module_tested, optimizer)
    torch_module = nn.Embedding(NUM_KEYS, DIM)
    with torch.no_grad():
        torch_module.weight.copy_(module_tested(torch.arange(NUM_KEYS)))
    return module_tested, torch_module, [optimizer, make(torch_module.parameters())]


def batches(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, NUM_KEYS, (6, 3), generator=generator) for _ in range(count)]


def loss_of(rows: torch.Tensor) -> torch.Tensor:
    return (rows * torch.linspace(-1, 1, DIM)).square().sum() + rows.sum()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_torch_embedding(name: str) -> None:
    module_tested, torch_module, optimizers = pair(OPTIMIZERS[name])
    for keys in batches():
        for module, optimizer in zip((module_tested, torch_module), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(module(keys)).backward()
            optimizer.step()
        torch.testing.assert_close(module_tested(torch.arange(NUM_KEYS)), torch_module.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["rows", "offsets", "weights", "weights and offsets"])
def test_training_equals_torch_embedding_bag(mode: str, form: str) -> None:
    module_tested, torch_module = EmbeddingBag(DIM, mode=mode, seed=2), nn.EmbeddingBag(NUM_KEYS, DIM, mode=mode)
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (module_tested, torch_module))
    prepared(module_tested, optimizer)
    with torch.no_grad():
        torch_module.weight.copy_(module_tested(torch.arange(NUM_KEYS).unsqueeze(1)))
    for keys in batches(3):
        arguments: list[Any] = [keys, None, None]
        if "offsets" in form:
            arguments = [keys.flatten(), torch.tensor([0, 4, 4, 9]), None]
        if "weights" in form:
            arguments[2] = torch.rand(arguments[0].shape).requires_grad_()
            if mode != "sum":
                with pytest.raises(UsageError, match="per_sample_weights need mode sum"):
                    module_tested(*arguments)
                return
        found = []
        for module, module_optimizer in ((module_tested, optimizer), (torch_module, other)):
            module_optimizer.zero_grad()
            loss_of(module(*arguments)).backward()
            module_optimizer.step()
            if "weights" in form:
                found.append(arguments[2].grad)
                arguments[2].grad = None
        if found:
            torch.testing.assert_close(found[0], found[1])
        torch.testing.assert_close(module_tested(torch.arange(NUM_KEYS).unsqueeze(1)), torch_module.weight)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_scaler_is_refused(unscales: bool) -> None:
    """GradScaler would not unscale the gradients of the rows."""
    model = nn.Sequential(Embedding(DIM), nn.Linear(DIM, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        scaler.scale(model(batches(1)[0]).sum()).backward()
        with pytest.raises(UsageError, match="GradScaler does not unscale the gradients of embedding rows"):
            scaler.unscale_(optimizer) if unscales else scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=not unscales)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a reference cycle
        scaler.scale(model(batches(1)[0]).sum()).backward(create_graph=True)
    with pytest.raises(UsageError, match="GradScaler does not unscale the gradients of embedding rows"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(batches(1)[0]).sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    copies = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    assert all(type(tensor) is torch.Tensor for tensor in copies)
    off.step(optimizer)


def test_empty_bags_and_no_keys() -> None:
    bag, embedding = EmbeddingBag(DIM, mode="sum"), Embedding(DIM)
    prepared(bag)
    prepared(embedding)
    assert bag(torch.empty(3, 0, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 3
    assert embedding(torch.empty(0, 5, dtype=torch.int64)).shape == (0, 5, DIM)


def test_any_64_bit_number_is_a_key() -> None:
    embedding = Embedding(DIM)
    prepared(embedding)
    keys = torch.tensor([-1, 2**63 - 1, 0])
    unsigned = torch.from_numpy(np.array([2**64 - 1, 2**63 - 1, 0], np.uint64))
    rows = embedding(keys)
    assert len({tuple(row) for row in rows.tolist()}) == 3
    assert torch.equal(rows, embedding(unsigned))
    assert torch.equal(embedding(unsigned.reshape(3, 1)), rows.unsqueeze(1))
    assert torch.equal(embedding(torch.stack([keys, keys + 5]).t()[:, 0]), rows)  # a strided tensor


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_accumulation(set_to_none: bool) -> None:
    """Gradients add up over backward passes and lookups until zero_grad(), also after a step, like in torch."""
    module_tested, torch_module, optimizers = pair(OPTIMIZERS["sgd"])
    first, second, third, fourth, fifth = batches()
    for module, optimizer in zip((module_tested, torch_module), optimizers, strict=True):
        loss_of(module(first)).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        (loss_of(module(second)) + loss_of(module(third))).backward()
        loss_of(module(fourth)).backward()
        optimizer.step()
        loss_of(module(fifth)).backward()  # added to the earlier gradients
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # no updates to apply
        with torch.no_grad():
            loss_of(module(first))
        optimizer.zero_grad()
        module.eval()
        loss_of(module(first))  # no backward
        optimizer.step()
    torch.testing.assert_close(module_tested(torch.arange(NUM_KEYS)), torch_module.weight)


def test_a_module_in_two_places_and_two_modules_of_a_table() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Embedding(DIM, name="shared")
            self.same = self.one
            self.other = Embedding(DIM, name="shared")

        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.one(keys) + self.same(keys) + self.other(keys)
            return rows

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    embedder = prepared(model, optimizer)
    assert list(embedder.tables) == ["shared"]
    keys = torch.tensor([1, 2, 1])
    before = model.one(torch.tensor([1, 2])).detach()
    model(keys).sum().backward()
    optimizer.step()
    after = model.other(torch.tensor([1, 2])).detach()
    torch.testing.assert_close(before - after, torch.tensor([[0.6] * DIM, [0.3] * DIM]))
    model.other.dim = 3
    with pytest.raises(UsageError, match="two embeddings with the name 'shared'"):
        prepared(model, optimizer)


def test_the_rule_follows_the_optimizer_and_the_scheduler() -> None:
    model = nn.ModuleDict({"a": Embedding(1, initializer=Zeros()), "b": Embedding(1, update=paceline.SGD(lr=2.0))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    embedder = prepared(model, optimizer)
    rules = [from_fields(RULES, embedder.tables[name].spec.update) for name in ("a", "b")]
    assert rules == [paceline.Momentum(lr=1.0, momentum=0.5, nesterov=True), paceline.SGD(lr=2.0)]
    optimizer.load_state_dict(optimizer.state_dict())  # this call replaces the parameter groups
    dense = nn.Parameter(torch.zeros(1))
    torch_module = torch.optim.SGD([dense], lr=1.0, momentum=0.5, nesterov=True)
    torch_scheduler = torch.optim.lr_scheduler.ExponentialLR(torch_module, 0.5)
    for _ in range(3):
        for loss, module_optimizer, schedule in (
            (model["a"](torch.tensor([9])).sum(), optimizer, scheduler),
            (dense.sum(), torch_module, torch_scheduler),
        ):
            module_optimizer.zero_grad()
            loss.backward()
            module_optimizer.step()
            schedule.step()
    torch.testing.assert_close(model["a"](torch.tensor([9])).detach(), dense.detach().unsqueeze(0))
    assert embedder.tables["b"].spec.update["lr"] == 2.0


def test_errors_are_reported() -> None:
    embedding = Embedding(DIM, name="ads")
    with pytest.raises(UsageError, match=r"'ads' has no table yet.*strategy.prepare"):
        embedding(torch.tensor([1]))
    with pytest.raises(UsageError, match="never be updated"):
        prepared(embedding, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(UsageError, match="LBFGS"):
        prepared(embedding, torch.optim.LBFGS(embedding.parameters()))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedder = prepared(embedding, optimizer)
    with pytest.raises(UsageError, match="keys of an embedding are float32"):
        embedding(torch.ones(2))
    with pytest.raises(UsageError, match="was called with a list"):
        embedding([1])
    (embedding(torch.tensor([1])) * float("nan")).sum().backward()
    with pytest.raises(NonFiniteError, match="'ads'"):
        optimizer.step()
    assert len(embedder.tables["ads"]) == 0
    with pytest.raises(UsageError, match="expected one of sum, mean, max"):
        EmbeddingBag(DIM, mode="median")
    with pytest.raises(UsageError, match="1 to 65536"):
        Embedding(0)
    wrong: Any = "quantize:8"
    with pytest.raises(UsageError, match="filters='quantize:8': expected a list of filters"):
        Embedding(1, filters=wrong)
    with pytest.raises(UsageError, match=r"EmbeddingBag\(pull_filters=\[\]\): pass filters="):
        EmbeddingBag(1, pull_filters=[])


def test_copies_of_embeddings() -> None:
    """A copy of a prepared model has the same rows; a copy of an unprepared model has no rows yet."""
    embedding = Embedding(DIM)
    assert copy.deepcopy(embedding).link is not embedding.link
    prepared(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1))
    other = copy.deepcopy(embedding)
    keys = torch.tensor([3, 4])
    assert torch.equal(other(keys), embedding(keys))


def test_items_of_a_table_can_be_read_cleared_and_written() -> None:
    embedding = Embedding(2, initializer=Constant(value=1.0))
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.5)
    table = prepared(embedding, optimizer).tables["embedding"]
    embedding(torch.tensor([5, 6])).sum().backward()
    optimizer.step()
    kept = [(keys.copy(), records.copy()) for keys, records in table.items()]
    after = embedding(torch.tensor([5, 6, 7])).detach()
    table.clear()
    assert len(table) == 0
    assert embedding(torch.tensor([5, 6, 7])).unique().tolist() == [1.0]
    for keys, records in kept:
        assert records.shape == (len(keys), 4)  # value and sum of squares
        table.write(keys, records)
    assert torch.equal(embedding(torch.tensor([5, 6, 7])).detach(), after)


# Prefetched rows.


class CountedTable(LocalTable):
    """A table that records its requests: whether the request is a prefetch, and the number of keys."""

    def fetch(self, keys: Keys, *, ahead: bool = False) -> RowTicket:
        self.requests.append((ahead, len(keys)))
        return super().fetch(keys, ahead=ahead)

    requests: list[tuple[bool, int]]


class CountedTables(ReplicatedTables):
    def __init__(self, lead: int) -> None:
        super().__init__()
        self.lead = lead
        self.made: list[CountedTable] = []

    def table(self, name: str, declared: RowDeclaration) -> CountedTable:
        table = CountedTable(name, declared)
        table.requests = []
        self.made.append(table)
        return table


class Clicks(nn.Module):
    """A model whose keys are columns 2 and later of one tensor, and all columns of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = Embedding(DIM)
        self.wide = EmbeddingBag(1, mode="sum", initializer=Normal(std=0.1))
        self.linear = nn.Linear(DIM, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.deep(batch["x"][:, 2:]).sum(1)) + self.wide(batch["keys"])
        return logits


def train(tables: ReplicatedTables, *, changes: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    embedder = Embedder(tables)
    embedder.serve(find_embeddings(model), [optimizer])
    embedder.step_with([optimizer], lambda stepped: embedder.step(stepped, lambda: None))
    generator, widths = torch.Generator().manual_seed(1), {"x": 5, "keys": 3}
    data = [
        {name: torch.randint(0, 30, (5 - number // 7, width), generator=generator) for name, width in widths.items()}
        for number in range(8)
    ]
    outputs = []
    for number, batch in enumerate(data):
        embedder.begin(batch)
        embedder.prefetch(data[number + 1] if number + 1 < len(data) else None)
        if changes:
            batch["x"] += number
            batch["keys"][0] = 77
        optimizer.zero_grad()
        output = model(batch)
        output.square().sum().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing to compile")  # type: ignore[attr-defined]
def test_a_lookup_compiles_no_kernel() -> None:
    compile_kernels()
    module = Embedding(DIM)
    prepared(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = [len(kernel.signatures) for kernel in (take_rows, sum_rows)]  # other tests may have compiled more
    module(torch.arange(NUM_KEYS)).sum().backward()
    assert [len(kernel.signatures) for kernel in (take_rows, sum_rows)] == before


@pytest.mark.parametrize("changes", [False, True])
def test_prefetched_rows_equal_pulled_rows(changes: bool) -> None:
    """With `changes`, the batch is changed in place after its rows were requested."""
    tables = CountedTables(lead=0)
    for found, expected in zip(train(tables, changes=changes), train(ReplicatedTables(), changes=changes), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    num_requests = sum(len(table.requests) for table in tables.made)
    # If no batch changes, each batch needs one request per table.
    assert num_requests == 16 if not changes else num_requests > 16


def test_prefetching_an_iteration_ahead() -> None:
    tables = CountedTables(lead=1)
    train(tables)
    for table in tables.made:
        # The first batch shows which tensors are keys. Then it is too late to prefetch the second batch.
        assert sorted(ahead for ahead, _ in table.requests) == [False, False, *[True] * 6]


def test_replicated_tables_equal_the_tables_of_one_process() -> None:
    from paceline.collectives import Group
    from paceline.testing import run_ranks

    rule = paceline.Adagrad(lr=0.1)
    generator = np.random.default_rng(0)
    steps = [
        [
            (np.unique(generator.integers(0, 9, 6)).astype(np.uint64), generator.normal(size=(9, 3)).astype(np.float32))
            for _ in range(3)
        ]
        for _ in range(4)
    ]

    def work(group: Group) -> tuple[Any, Any]:
        tables = ReplicatedTables(group)
        wide, deep = (tables.table(name, RowDeclaration(3, rule, Normal(std=1.0), 0)) for name in ("wide", "deep"))
        for number, step in enumerate(steps):
            keys, grads = step[group.rank]
            if number == 3 and group.rank == 1:
                tables.push([])  # rank 1 has no further data
                continue
            tables.push([(deep, keys, grads[: len(keys)])])
        assert len(wide) == 0
        rows = deep.fetch(np.arange(9, dtype=np.uint64)).result()
        try:
            tables.push([(wide, np.ones(1, np.uint64), np.full((1, 3), np.nan if group.rank else 1, np.float32))])
        except NonFiniteError as error:
            return rows, str(error)
        return rows, None

    found = run_ranks(3, work)
    assert all(np.array_equal(rows, found[0][0]) for rows, _ in found)
    assert all("rank 1" in str(error) for _, error in found)  # every rank raises the error, and no rank waits
    whole: RowTable = ReplicatedTables().table("deep", RowDeclaration(3, rule, Normal(std=1.0), 0))
    assert isinstance(whole, LocalTable)
    for number, step in enumerate(steps):
        summed = np.zeros((9, 3), np.float32)
        is_known = np.zeros(9, bool)
        for rank, (keys, grads) in enumerate(step):
            if (number, rank) != (3, 1):
                summed[keys] += grads[: len(keys)] / 3
                is_known[keys] = True
        whole.apply(np.flatnonzero(is_known).astype(np.uint64), summed[is_known])
    expected = whole.fetch(np.arange(9, dtype=np.uint64)).result()
    np.testing.assert_allclose(found[0][0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_on_a_cuda_device() -> None:
    module_tested, torch_module, _ = pair(OPTIMIZERS["sgd"])
    device = choose_device("cuda", 0)
    module_tested, torch_module = module_tested.to(device), torch_module.to(device)
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (module_tested, torch_module))
    prepared(module_tested, optimizer)
    for keys in batches():
        for module, module_optimizer in ((module_tested, optimizer), (torch_module, other)):
            module_optimizer.zero_grad()
            rows = module(keys.to(device))
            assert rows.device == device
            (rows.square().sum() + rows.sum()).backward()
            module_optimizer.step()
    torch.testing.assert_close(module_tested(torch.arange(NUM_KEYS, device=device)), torch_module.weight)


def test_prefetched_rows_are_dropped_when_the_tables_are_written() -> None:
    module = Embedding(DIM, seed=7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    embedder = Embedder(CountedTables(lead=1))
    embedder.serve(find_embeddings(module), [optimizer])
    first, second = batches(2)
    embedder.begin(first)
    module(first)
    embedder.prefetch(second)
    (table,) = embedder.tables.values()
    keys = np.unique(second.numpy()).astype(np.uint64)
    table.write(keys, np.full((len(keys), DIM), 5, np.float32))
    embedder.forget()
    embedder.begin(second)
    assert bool((module(second) == 5).all())

"""Checks of ``Hybrid``, on both ranks of a cluster under sequential consistency; see ``strategy_ranks.py``."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from paceline.errors import UsageError
from paceline.filters import KeyCaching, Quantize
from paceline.ps import Constant
from paceline.torch.embeddings import Embedding, EmbeddingBag
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.hybrid import Hybrid
from paceline.torch.strategies.one_device import OneDevice

_ROWS = 6
_STEPS = 5


class _Clicks(nn.Module):
    """A model with an embedding and a bag. Each check uses its own names of tables."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.deep = Embedding(4, name=f"{name} deep")
        self.wide = EmbeddingBag(1, mode="sum", name=f"{name} wide", initializer=Constant(value=0.5))
        self.dense = nn.Linear(4 * 3, 1)

    def forward(self, keys: Tensor) -> Tensor:
        logits: Tensor = self.dense(self.deep(keys).flatten(1)) + self.wide(keys[:, 1:])
        return logits


def _data(num_rows: int) -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-8, 8, (num_rows, 3), generator=generator)
    return TensorDataset(keys, keys.sum(1, keepdim=True).sin())


@contextlib.contextmanager
def _alone() -> Iterator[Strategy]:
    """Return the strategy of one device, like in a process without a launcher."""
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        with OneDevice(seed=5) as strategy:
            yield strategy
    finally:
        os.environ.update(kept)


def _train(strategy: Strategy, name: str, rows: int, num_rows: int, *, is_compiled: bool = False) -> tuple[Tensor, ...]:
    """Train two epochs with a scheduler; return the dense part's parameters, and the rows of all keys."""
    model = _Clicks(name)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(_data(num_rows), rows)
    prepared, optimizer, batches, scheduler = strategy.prepare(model, optimizer, loader, scheduler)
    if is_compiled:
        prepared = torch.compile(prepared, backend="eager")
    for _ in range(2):
        for keys, targets in batches:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(prepared(keys), targets))
            optimizer.step()
            scheduler.step()
    strategy.barrier()
    with torch.no_grad():
        every = torch.arange(-8, 8)
        return model.dense.weight.clone(), model.deep(every), model.wide(every.unsqueeze(1))


def check_training_equals_one_device(rank: int, size: int) -> None:
    num_rows = _ROWS * size * _STEPS
    with Hybrid(seed=5) as strategy:
        found = _train(strategy, "equal", _ROWS, num_rows)
    with _alone() as strategy:
        expected = _train(strategy, "equal", _ROWS * size, num_rows)
    for actual, expected_value in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, expected_value, rtol=1e-5, atol=1e-5)


def check_filters(rank: int, size: int) -> None:
    """Rows pass all filters, and gradients pass the filters for gradients. Exact filters change nothing."""
    num_rows = _ROWS * size * _STEPS
    with Hybrid(seed=5) as strategy:
        expected = _train(strategy, "unfiltered", _ROWS, num_rows)
    with Hybrid(seed=5, filters="key-caching,key-numbers,compress") as strategy:
        found = _train(strategy, "exact", _ROWS, num_rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with Hybrid(seed=5, filters=[KeyCaching(), Quantize(bits=8)], pull_filters="float16") as strategy:
        found = _train(strategy, "rounded", _ROWS, num_rows)
        difference = strategy.reduce(found[0], "max") - strategy.reduce(found[0], "min")
        assert not difference.any()
    assert not torch.equal(found[0], expected[0])
    assert not torch.equal(found[1], expected[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.3)
    assert torch.equal(found[1], found[1].half().float())


def check_compiled_after(rank: int, size: int) -> None:
    """A compiled model gives the result of an eager model."""
    num_rows = _STEPS * size * _ROWS
    with Hybrid(seed=5) as strategy, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
        found = _train(strategy, "compiled", _ROWS, num_rows, is_compiled=True)
    with _alone() as alone:
        expected = _train(alone, "compiled", _ROWS * size, num_rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def check_unequal_numbers_of_batches(rank: int, size: int) -> None:
    """No rank waits for a rank without batches. This rank takes part again in the next epoch."""
    with Hybrid(join=True) as strategy:
        model = _Clicks("unequal")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = Subset(_data(40), range(_ROWS * (1 + 2 * rank)))
        prepared, optimizer = strategy.prepare(model, optimizer)
        batches = strategy.prepare_loader(DataLoader(own, _ROWS), shard=False, prefetch=True)
        before = model.deep(torch.tensor([3])).detach()
        num_steps = 0
        for _ in range(2):
            for keys, targets in batches:
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.mse_loss(prepared(keys), targets))
                optimizer.step()
                num_steps += 1
        assert num_steps == 2 * (1 + 2 * rank)
        strategy.barrier()
        weights = strategy.reduce(model.dense.weight, "max") - strategy.reduce(model.dense.weight, "min")
        assert not weights.any()
        assert not torch.equal(model.deep(torch.tensor([3])), before)
        if rank == 0:  # outside of an epoch, no rank waits for other ranks
            model.deep(torch.tensor([4]))
        strategy.barrier()


def check_a_model_without_embeddings(rank: int, size: int) -> None:
    output = io.StringIO()
    with contextlib.redirect_stderr(output), Hybrid() as strategy:
        model = nn.Linear(3, 1)
        prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.autograd.backward(prepared(torch.full((2, 3), float(rank))).sum())
        optimizer.step()
        assert strategy.reduce(model.weight, "max").equal(strategy.reduce(model.weight, "min"))
    assert output.getvalue().count("has no embeddings") == (rank == 0)


def check_different_embeddings(rank: int, size: int) -> None:
    with Hybrid() as strategy:
        model = nn.ModuleDict({"a": Embedding(4, name="differs", seed=rank), "b": nn.Linear(1, 1)})
        message = ""
        try:
            strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except UsageError as error:
            message = str(error)
        assert "rank 1 has another model than rank 0: 'a' (rows of" in message, message

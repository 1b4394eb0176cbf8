"""Checks of ``AllReduce``. Every rank runs each check; see ``strategy_ranks.py``."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from paceline.errors import UsageError
from paceline.filters import Quantize
from paceline.torch.strategies.all_reduce import AllReduce
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.one_device import OneDevice
from paceline.torch.strategies.replicas.sync_batch_norm import SyncBatchNorm, with_sync_batch_norm

_ROWS = 4
_OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01),
)


def _data(num_rows: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_rows, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


@contextlib.contextmanager
def _alone() -> Iterator[Strategy]:
    """Return the strategy of one device, like in a process without a launcher."""
    names = ("RANK", "WORLD_SIZE")
    kept = {name: os.environ.pop(name) for name in names}
    try:
        with OneDevice(seed=5) as strategy:
            yield strategy
    finally:
        os.environ.update(kept)


def _train(
    strategy: Strategy,
    make: Callable[[Any], torch.optim.Optimizer],
    rows: int,
    num_rows: int,
    seed: int = 0,
    *,
    start: str | None = None,
    save_in_second_epoch: str | None = None,
) -> Tensor:
    """Train two epochs of shuffled data; return all parameters.

    The training continues the checkpoint `start`, or stops after three batches of the second epoch and saves one.
    """
    model = _model(seed)
    optimizer = make(model.parameters())
    loader = DataLoader(_data(num_rows), batch_size=rows, shuffle=True)
    model, optimizer, batches = strategy.prepare(model, optimizer, loader)
    first_epoch = 0 if start is None else strategy.load(start)["epoch"]
    for epoch in range(first_epoch, 2):
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            if save_in_second_epoch is not None and (epoch, number) == (1, 2):
                strategy.save(save_in_second_epoch, epoch=epoch)
                return _flat(strategy)
    return _flat(strategy)


def _flat(strategy: Strategy) -> Tensor:
    assert strategy.module is not None
    return torch.cat([parameter.detach().flatten() for parameter in strategy.module.parameters()])


def is_equal_on_ranks(strategy: Strategy, values: Tensor) -> bool:
    """Return whether all ranks have the same values."""
    return torch.equal(strategy.reduce(values, "max"), strategy.reduce(values, "min"))


def _refused(strategy: Strategy, work: Callable[[], Any], *words: str) -> None:
    """Check that every rank raises UsageError with this message."""
    try:
        work()
    except UsageError as error:
        message = str(error)
    else:
        message = "nothing was raised"
    for found in strategy._ranks.exchange(message):
        assert all(word in found for word in words), found


def check_20_steps_agree_with_one_device(rank: int, size: int) -> None:
    num_rows = _ROWS * size * 10
    for make in _OPTIMIZERS:
        with AllReduce(seed=5) as strategy:
            trained = _train(strategy, make, _ROWS, num_rows, seed=rank)  # all ranks get the values of rank 0
            assert is_equal_on_ranks(strategy, trained)
        with _alone() as strategy:
            expected = _train(strategy, make, _ROWS * size, num_rows)
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-5)


def check_an_epoch_continues_under_another_strategy(rank: int, size: int) -> None:
    num_rows, make = _ROWS * size * 5, _OPTIMIZERS[1]
    with _alone() as strategy:
        expected = _train(strategy, make, _ROWS * size, num_rows)
    with tempfile.TemporaryDirectory() as folder:
        with AllReduce(seed=5) as strategy:
            checkpoint = strategy._ranks.exchange(folder + "/checkpoint")[0]
            _train(strategy, make, _ROWS, num_rows, save_in_second_epoch=checkpoint)
        with _alone() as strategy:
            trained = _train(strategy, make, _ROWS * size, num_rows, start=checkpoint)
        with AllReduce() as strategy:
            strategy.barrier()  # the other ranks must load before rank 0 removes its folder
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-5)


def check_different_models_and_optimizers(rank: int, size: int) -> None:
    def prepare(model: nn.Module, lr: float) -> Callable[[], Any]:
        return lambda: strategy.prepare(model, torch.optim.SGD(model.parameters(), lr))

    frozen = _model()
    next(iter(frozen.parameters())).requires_grad_(rank != 1)
    with AllReduce() as strategy:
        _refused(strategy, prepare(_model(), 0.1 * (rank + 1)), "rank 1 has another optimizer", "lr=0.2", "lr=0.1")
    with AllReduce() as strategy:
        _refused(strategy, prepare(frozen, 0.1), "rank 1 has another model", "'0.weight' (frozen float32")


def check_gloo(rank: int, size: int) -> None:
    with AllReduce(seed=5, backend="gloo") as strategy:
        assert dist.get_backend() == "gloo"
        trained = _train(strategy, _OPTIMIZERS[0], _ROWS, _ROWS * size)
    with _alone() as strategy:
        torch.testing.assert_close(trained, _train(strategy, _OPTIMIZERS[0], _ROWS * size, _ROWS * size))


def check_gradients_are_accumulated(rank: int, size: int) -> None:
    def gradients(strategy: Strategy, rows: int) -> list[Tensor]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = strategy.prepare(model, optimizer, DataLoader(_data(_ROWS * size * 3), rows))
        for number, (inputs, targets) in enumerate(batches):
            with strategy.accumulate(is_last=number == 2):
                torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
            if number == 0 and strategy.world_size > 1:
                assert not is_equal_on_ranks(strategy, next(model.parameters()).grad), "gradients were sent too early"
            if number == 2:
                break
        norm = strategy.clip_grad_norm_(0.1)
        optimizer.step()
        return [norm, _flat(strategy)]

    with AllReduce() as strategy:
        found = gradients(strategy, _ROWS)
    with _alone() as alone:
        torch.testing.assert_close(found, gradients(alone, _ROWS * size), rtol=1e-5, atol=1e-6)


def check_join(rank: int, size: int) -> None:
    with AllReduce(join=True) as strategy:
        model = _model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        own = Subset(_data(40), range(_ROWS * (1 + 2 * rank)))
        batches = strategy.prepare_loader(DataLoader(own, _ROWS), shard=False, prefetch=True)
        model, optimizer = strategy.prepare(model, optimizer)
        for _ in range(2):
            for inputs, targets in batches:
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
        assert is_equal_on_ranks(strategy, _flat(strategy))
        for number, entry in optimizer.state_dict()["state"].items():
            assert entry["step"] == 2 * (1 + 2 * (size - 1)), (number, entry["step"])
            assert is_equal_on_ranks(strategy, entry["exp_avg"])


def check_compression(rank: int, size: int) -> None:
    num_rows = _ROWS * size * 10
    with _alone() as strategy:
        exact = _train(strategy, _OPTIMIZERS[0], _ROWS * size, num_rows)
    chosen: list[tuple[dict[str, Any], float]] = [
        ({"compression": "fp16"}, 0.01),
        ({"compression": "bf16"}, 0.05),
        ({"compression": "powersgd:2"}, 0.5),
        ({"filters": [Quantize(8)]}, 0.05),
    ]
    for options, tolerance in chosen:
        with AllReduce(seed=5, **options) as strategy:
            trained = _train(strategy, _OPTIMIZERS[0], _ROWS, num_rows)
            assert is_equal_on_ranks(strategy, trained)
        difference = float((trained - exact).abs().max())
        assert 1e-7 < difference < tolerance, (options, difference)


def check_synchronized_batch_norm(rank: int, size: int) -> None:
    with AllReduce(sync_batch_norm=True) as strategy:
        torch.manual_seed(7)
        whole = (torch.randn(5 * size, 3, 4) * 3 + 50).requires_grad_()
        weights = torch.randn(5 * size, 3, 4)
        sizes = [5 * size - (size - 1) * 2, *[2] * (size - 1)]  # unequal parts
        start = sum(sizes[:rank])
        part = whole.detach()[start : start + sizes[rank]].clone().requires_grad_()

        plain = nn.BatchNorm1d(3)
        torch.nn.init.normal_(plain.weight)
        state = {name: value.clone() for name, value in plain.state_dict().items()}
        synced = with_sync_batch_norm(nn.Sequential(nn.BatchNorm1d(3)))[0]  # type: ignore[index]
        assert isinstance(synced, SyncBatchNorm)
        synced.load_state_dict(state)
        for _ in range(2):
            expected, found = plain(whole), synced(part)
        torch.autograd.backward((expected * weights).sum())
        torch.autograd.backward((found * weights[start : start + sizes[rank]]).sum())
        assert whole.grad is not None
        assert part.grad is not None
        close: Callable[[Any, Any], None] = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # noqa: E731
        close(found, expected[start : start + sizes[rank]])
        close(part.grad, whole.grad[start : start + sizes[rank]])
        for actual, reference in ((synced.weight, plain.weight), (synced.bias, plain.bias)):
            close(strategy.reduce(actual.grad, "sum"), reference.grad)
        close(dict(synced.state_dict()), dict(plain.state_dict()))
        close(synced.eval()(part), plain.eval()(whole)[start : start + sizes[rank]])

        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
        torch.autograd.backward(model(torch.randn(3, 6)).sum())
        assert isinstance(model.module[1], SyncBatchNorm)
        with torch.no_grad():
            for _ in range(rank):  # each rank may evaluate any number of batches
                model.eval()(torch.randn(3, 6))
        assert sorted(model.state_dict())[0] == "0.bias"


def check_a_model_with_only_frozen_parameters(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        model = strategy.prepare(_model(rank).requires_grad_(False))
        assert torch.equal(model[0].weight, _model(0)[0].weight)  # type: ignore[index]


def check_unequal_numbers_of_batches(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        own = Subset(_data(40), range(_ROWS * (1 + rank)))
        batches = strategy.prepare_loader(DataLoader(own, _ROWS), shard=False, prefetch=True)
        _refused(strategy, lambda: next(iter(batches)), "rank 0 1, rank 1 2", "drop_last", "join=True")

        stream = strategy.prepare_loader(DataLoader(_Stream(3 - rank), 1), shard=False, prefetch=True)
        _refused(
            strategy, lambda: list(stream), f"rank {size - 1}", f"after {4 - size} batches", "has more", "join=True"
        )


class _Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


def check_loaders_without_a_batch(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        short = DataLoader(_data(size * 3), batch_size=4, drop_last=True)
        make = lambda: strategy.prepare_loader(short, prefetch=True)  # noqa: E731
        _refused(strategy, make, "rank 0", f"length {size * 3}", "batch_size=4", "drop_last=True")
        empty = strategy.prepare_loader(DataLoader(_Stream(0), 1), prefetch=True)
        _refused(strategy, lambda: list(empty), "no batch")


def check_batches_of_streams_are_distributed(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        loader = DataLoader(_Stream(2 * size + 1), 1)
        batches = [int(batch) for batch in strategy.prepare_loader(loader, prefetch=True)]
        assert batches == [rank, rank + size, 2 * size]


def check_an_unused_parameter(rank: int, size: int) -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.forgotten = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            output: Tensor = self.used(inputs)
            return output

    def steps(strategy: Strategy) -> None:
        model = Forgetful()
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()

    with AllReduce() as strategy:
        _refused(
            strategy, lambda: steps(strategy), "rank ", "forgotten.weight, forgotten.bias", "find_unused_parameters"
        )
    with AllReduce(find_unused_parameters=True) as strategy:
        steps(strategy)


class _Graph(nn.Module):
    """A convolution over a graph with a sparse adjacency matrix."""

    def __init__(self, *, is_buffer: bool, persistent: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)
        adjacency = torch.eye(4).to_sparse()
        if is_buffer:
            self.register_buffer("adjacency", adjacency, persistent=persistent)
        else:
            self.adjacency = adjacency

    def forward(self, x: Tensor) -> Any:
        return torch.mm(self.adjacency, self.inner(x))


def check_non_dense_tensors_of_a_model(rank: int, size: int) -> None:
    words = ("strategy all-reduce: buffer 'adjacency'", "layout sparse_coo", "plain attribute that is the same")
    for persistent in (True, False):
        with AllReduce() as strategy:
            graph: Any = _Graph(is_buffer=True, persistent=persistent)
            _refused(strategy, functools.partial(strategy.prepare, graph), *words)
    with AllReduce() as strategy:
        table = nn.Module()
        table.rows = nn.Parameter(torch.eye(4).to_sparse())
        _refused(strategy, lambda: strategy.prepare(table), "parameter 'rows'", "make its values the parameter")
    with AllReduce() as strategy:
        graph = strategy.prepare(_Graph(is_buffer=False))
        graph(torch.ones(4, 6)).sum().backward()
    with _alone() as alone, tempfile.TemporaryDirectory() as folder:
        graph = alone.prepare(_Graph(is_buffer=True))
        graph(torch.ones(4, 6)).sum().backward()
        _refused(alone, lambda: alone.save(folder), "checkpoint: buffer 'adjacency'")


def check_sparse_gradients_are_averaged(rank: int, size: int) -> None:
    inputs = torch.arange(2 * size) % 5

    def train(strategy: Strategy, rows: Tensor) -> Tensor:
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = strategy.prepare(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        return _flat(strategy)

    with AllReduce() as strategy:
        trained = train(strategy, inputs.chunk(size)[rank])
    with _alone() as alone:
        torch.testing.assert_close(trained, train(alone, inputs))


def check_different_models(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        model = nn.Linear(3, 4 if rank == 1 else 5)
        _refused(strategy, lambda: strategy.prepare(model), "rank 1", "[4, 3]", "[5, 3]")


def check_metrics_and_printing(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        assert (strategy.rank, strategy.world_size, strategy.is_main) == (rank, size, rank == 0)
        assert strategy.reduce(rank) == (size - 1) / 2
        found = strategy.reduce({"most": torch.tensor([rank, 1]), "one": 1.0}, "sum")
        assert found["most"].tolist() == [size * (size - 1) // 2, size]
        assert found["one"] == size
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            strategy.print("here", rank, flush=True)
        assert printed.getvalue() == ("here 0\n" if rank == 0 else "")
        strategy.barrier()


def check_a_non_finite_gradient_is_reported_once(rank: int, size: int) -> None:
    captured = io.StringIO()
    with AllReduce() as strategy, contextlib.redirect_stderr(captured):
        model, optimizer = strategy.prepare(model := _model(), torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(6):
            inputs = torch.ones(_ROWS, 6) * (float("nan") if rank == 1 and number == 2 else 1.0)
            optimizer.zero_grad()
            torch.autograd.backward(model(inputs).square().mean())
            optimizer.step()
    gradient_lines = [line for line in captured.getvalue().splitlines() if "gradient" in line]
    assert len(gradient_lines) == (rank == 1), gradient_lines
    assert not gradient_lines or "rank 1: the gradient of '2.bias' contains nan" in gradient_lines[0], gradient_lines


def check_gradients_with_a_graph_are_refused(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        model, _ = strategy.prepare(model := _model(), torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(_ROWS, 6)).square().mean()
        _refused(strategy, lambda: torch.autograd.backward(loss, create_graph=True), "create_graph=True")


def check_rank_0_evaluates_alone_and_buffers_may_be_transposed(rank: int, size: int) -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places: Tensor
            self.register_buffer("places", torch.rand(5, 6)[None].transpose(0, 1))
            self.layers = _model()

        def forward(self, inputs: Tensor) -> Any:
            return self.layers(inputs + self.places[:1, 0])

    class Expanded(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(_model(), nn.BatchNorm1d(1))
            self.register_buffer("ones", torch.ones(1).expand(4))

    for make in (Places, Expanded):
        with AllReduce() as strategy:
            model, optimizer = strategy.prepare(model := make(), torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(3):
                model.train()
                optimizer.zero_grad()
                torch.autograd.backward(model(torch.randn(_ROWS, 6)).square().mean())
                optimizer.step()
                if strategy.is_main:
                    model.eval()
                    model(torch.ones(_ROWS, 6))
            assert is_equal_on_ranks(strategy, _flat(strategy))


def last_killed(rank: int, size: int) -> None:
    with AllReduce() as strategy:
        model = _model()
        model, optimizer, batches = strategy.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(_data(40 * size), _ROWS)
        )
        try:
            for number, (inputs, _) in enumerate(batches):
                if number == 3 and rank == 1:
                    os._exit(7)
                optimizer.zero_grad()
                torch.autograd.backward(model(inputs).sum())
                optimizer.step()
        except RuntimeError as error:
            message = str(error)
        else:
            message = "nothing was raised"
        assert "rank 1" in message, message

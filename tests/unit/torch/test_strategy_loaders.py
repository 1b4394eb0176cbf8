"""The data of each rank, for all kinds of loaders."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.errors import UsageError  # noqa: E402
from paceline.torch.strategies.base import Strategy  # noqa: E402
from paceline.torch.strategies.loaders import Loader, moved  # noqa: E402
from paceline.torch.strategies.ranks import Ranks  # noqa: E402

_Pair = namedtuple("_Pair", "x y")


class FakeStrategy:
    """The part of a strategy that a loader uses. The other ranks do not exist."""

    name = "fake"
    takes_uneven = False
    embedder: Any = None
    device = torch.device("cpu")
    seed = 3
    snapshots = None
    status = None
    profiler = None
    phases = None

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.world_size = self.data_place = rank, size
        self._ranks = Ranks(rank, size)
        self.events: list[str] = []

    @contextlib.contextmanager
    def epoch(self, num_batches: int | None) -> Iterator[None]:
        self.events.append(f"epoch of {num_batches}")
        yield
        self.events.append("epoch ends")

    def _ran_out(self) -> None:
        self.events.append("ran out")


class Numbers(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))

    def __len__(self) -> int:
        return self._length


def _loader(
    loader: DataLoader[Any], rank: int = 0, size: int = 1, *, shard: bool = True, trains: bool = True
) -> Loader:
    return Loader(loader, cast(Strategy, FakeStrategy(rank, size)), shard=shard, trains=trains)


def _read(loader: Iterable[Any]) -> list[list[int]]:
    return [torch.cat(list(batch)).tolist() if isinstance(batch, list) else batch.tolist() for batch in loader]


def _interleaved(parts: list[list[list[int]]]) -> list[list[int]]:
    """Join the ranks' batches of each step, sample by sample."""
    return [
        [sample for samples in zip(*batches, strict=True) for sample in samples] for batches in zip(*parts, strict=True)
    ]


def _data(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_batches_of_all_ranks_equal_the_batches_of_one_device(shuffle: bool) -> None:
    size, rows = 3, 4
    alone = _loader(DataLoader(_data(24), rows * size, shuffle=shuffle))
    ranks = [_loader(DataLoader(_data(24), rows, shuffle=shuffle), rank, size) for rank in range(size)]
    epochs = []
    for _ in range(2):
        epochs.append(_read(alone))
        assert epochs[-1] == _interleaved([_read(loader) for loader in ranks])
        assert sorted(chain.from_iterable(epochs[-1])) == list(range(24))
    assert (epochs[0] != epochs[1]) == shuffle
    alone.set_epoch(0)
    assert _read(alone) == epochs[0]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 12, 13])
def test_the_parts_equal_the_parts_of_a_distributed_sampler(length: int, drop_last: bool) -> None:
    for rank in range(3):
        data = _data(length)
        torch_sampler: Any = DistributedSampler(data, 3, rank, seed=FakeStrategy.seed, drop_last=drop_last)
        if drop_last and length < 6:
            continue  # too few samples for a batch of 2 on each rank
        loader = _loader(DataLoader(data, 2, shuffle=True, drop_last=drop_last), rank, 3)
        for epoch in range(2):
            torch_sampler.set_epoch(epoch)
            assert _read(loader) == _read(DataLoader(data, 2, sampler=torch_sampler, drop_last=drop_last))
        assert len(loader) == len(_read(loader))


@pytest.mark.parametrize("length", [1, 7, 12])
def test_evaluation_reads_every_sample_once(length: int) -> None:
    loaders = [_loader(DataLoader(_data(length), 2), rank, 3, trains=False) for rank in range(3)]
    batches = chain.from_iterable(_read(loader) for loader in loaders)
    assert sorted(chain.from_iterable(batches)) == list(range(length))
    assert [len(loader) for loader in loaders] == [len(_read(loader)) for loader in loaders]


def test_random_samplers_draw_the_same_order_on_all_ranks() -> None:
    def parts() -> list[list[list[int]]]:
        found = []
        for rank in range(2):
            torch.manual_seed(rank)
            sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 12)
            found.append(_read(_loader(DataLoader(_data(3), 3, sampler=sampler), rank, 2)))
        return found

    alone = _read(_loader(DataLoader(_data(3), 6, sampler=WeightedRandomSampler([1.0, 2.0, 3.0], 12))))
    assert _interleaved(parts()) == alone


def test_batch_samplers_are_split_by_batches_and_receive_the_epoch() -> None:
    class EpochSampler(BatchSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    epochs: list[int] = []

    batches = EpochSampler(SequentialSampler(range(10)), 2, drop_last=False)
    loader = _loader(DataLoader(_data(10), batch_sampler=batches), 1, 2)
    assert _read(loader) == [[2, 3], [6, 7], [0, 1]]
    assert len(loader) == 3
    loader.set_epoch(6)
    _read(loader)
    assert epochs == [0, 6]


@pytest.mark.parametrize(
    ("drop_last", "trains", "expected"),
    [
        (False, True, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [8]]]),
        (True, True, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (False, False, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]),
    ],
)
def test_ranks_share_the_batches_of_a_stream(drop_last: bool, trains: bool, expected: list[list[list[int]]]) -> None:
    for rank in range(2):
        strategy = FakeStrategy(rank, 2)
        strategy.takes_uneven = True  # skip the agreement with other ranks
        loader = Loader(
            DataLoader(Numbers(9), 2, drop_last=drop_last), cast(Strategy, strategy), shard=True, trains=trains
        )
        assert _read(loader) == expected[rank]
        assert len(loader) == len(expected[rank])


def test_a_stream_is_not_divided_without_shard() -> None:
    strategy = FakeStrategy(1, 2)
    strategy.takes_uneven = True
    loader = Loader(DataLoader(Numbers(3), 1), cast(Strategy, strategy), shard=False, trains=True)
    assert _read(loader) == [[0], [1], [2]]
    assert strategy.events == ["epoch of None", "ran out", "epoch ends"]


def test_options_of_the_loader_are_kept() -> None:
    options: dict[str, Any] = {
        "num_workers": 1,
        "collate_fn": _plus_one,
        "timeout": 20.0,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "multiprocessing_context": "fork",
        "worker_init_fn": abs,
    }
    given = DataLoader(_data(8), 2, shuffle=True, **options)
    inner = _loader(given, 0, 2).inner
    assert type(inner) is type(given)
    for name in options:
        assert getattr(inner, name) is getattr(given, name)
    assert given.batch_sampler is not inner.batch_sampler


def _plus_one(samples: list[Any]) -> list[Any]:
    return [sample[0] + 1 for sample in samples]


def test_persistent_workers_load_several_epochs() -> None:
    given: DataLoader[Any] = DataLoader(_data(8), 2, shuffle=True, num_workers=1, persistent_workers=True)
    loader = _loader(given, 0, 2)
    alone = _loader(DataLoader(_data(8), 2, shuffle=True), 0, 2)
    for _ in range(2):
        assert _read(loader) == _read(alone)


def test_the_embedder_receives_every_batch_in_advance() -> None:
    strategy = FakeStrategy()

    class FakeEmbedder:
        def begin(self, batch: Any) -> None:
            strategy.events.append(f"begin {int(batch)}")

        def prefetch(self, batch: Any) -> None:
            strategy.events.append(f"prefetch {int(batch)}")

    strategy.embedder = FakeEmbedder()
    for batch in Loader(DataLoader(Numbers(2), 1), cast(Strategy, strategy), shard=True, trains=True):
        strategy.events.append(f"compute {int(batch)}")
    assert strategy.events == [
        *("epoch of None", "begin 0", "prefetch 1", "compute 0", "begin 1", "compute 1"),
        *("ran out", "epoch ends"),
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _loader(DataLoader(_data(0), 2), 0, 2), ["rank 0", "length 0", "batch_size=2", "drop_last=False"]),
        (lambda: _loader(DataLoader(_data(7), 4, drop_last=True), 0, 2), ["rank 0", "length 7", "drop_last=True"]),
        (lambda: _loader(DataLoader(_data(0), 2), trains=False), ["rank 0", "length 0"]),
        (lambda: list(_loader(DataLoader(Numbers(0), 2))), ["rank 0", "unknown length"]),
        (lambda: _loader(cast(Any, [1, 2])), ["list", "DataLoader"]),
        (
            lambda: _loader(DataLoader(_data(8), sampler=DistributedSampler(_data(8), 4, 2)), 1, 2),
            ["rank 1 of 2", "rank 2 of 4"],
        ),
    ],
)
def test_unsupported_loaders_are_rejected(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_batches_are_moved_with_the_structure() -> None:
    batch = {"pair": _Pair(torch.ones(1), "text"), "list": [torch.ones(2), (torch.ones(3),)]}
    found = moved(batch, torch.device("meta"))
    assert found["pair"].x.device.type == "meta"
    assert found["pair"].y == "text"
    assert found["list"][1][0].device.type == "meta"

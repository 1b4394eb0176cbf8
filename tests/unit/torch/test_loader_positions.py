"""A training resumed in the middle of an epoch reads each remaining sample once, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from tests.unit.torch.test_strategy_loaders import FakeStrategy, Numbers  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler  # noqa: E402

from paceline.errors import ModelError  # noqa: E402
from paceline.torch import strategy as make_strategy  # noqa: E402
from paceline.torch.strategies.base import Strategy  # noqa: E402
from paceline.torch.strategies.loaders import Loader  # noqa: E402

Make = Callable[[int, int], Any]
"""Makes a loader, given the rank and the number of ranks."""


def _samples(length: int) -> Any:
    return range(length)


def _prepared(make: Make, rank: int, size: int) -> Loader:
    strategy = FakeStrategy(rank, size)
    strategy.takes_uneven = True  # skip the comparison with other ranks
    return Loader(make(rank, size), cast(Strategy, strategy), shard=True, trains=True)


def _received(loader: Loader, num_batches: int | None = None) -> list[int]:
    return [sample for batch in itertools.islice(loader, num_batches) for sample in batch.tolist()]


def _interleaved(shares: list[list[int]]) -> list[int]:
    return [sample for samples in itertools.zip_longest(*shares) for sample in samples if sample is not None]


def _continued(make: Make, state: dict[str, Any], size: int) -> list[int]:
    """Return the samples of the remaining epoch on `size` ranks, in the order of one process."""
    shares = []
    for rank in range(size):
        loader = _prepared(make, rank, size)
        loader.load_state_dict(state)
        shares.append(_received(loader))
    return _interleaved(shares)


@given(
    length=st.integers(1, 40),
    before=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    epochs=st.integers(0, 2),
    num_batches=st.integers(0, 5),
    generator=st.booleans(),
)
def test_every_remaining_sample_is_yielded_once(
    length: int, before: tuple[int, int], after: tuple[int, int], epochs: int, num_batches: int, generator: bool
) -> None:
    """`before` and `after` are the ranks and the batch size before and after the checkpoint."""

    def make(batch_size: int) -> Make:
        def loader(rank: int, size: int) -> Any:
            own = torch.Generator().manual_seed(5) if generator else None
            return DataLoader(_samples(length), batch_size, shuffle=True, generator=own)

        return loader

    alone = _prepared(make(1), 0, 1)
    for _ in range(epochs):
        _received(alone)
    order = _received(alone)
    (size, batch_size), (new_size, new_batch_size) = before, after
    first = [_prepared(make(batch_size), rank, size) for rank in range(size)]
    for _ in range(epochs):
        for loader in first:
            _received(loader)
    num_batches = min(num_batches, len(first[0]))
    shares = [_received(loader, num_batches) for loader in first] if num_batches else [[] for _ in first]
    received = _interleaved(shares)[:length]
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    remaining = _continued(make(new_batch_size), states[0], new_size)
    assert received == order[: len(received)]
    assert remaining[: length - len(received)] == order[len(received) :]
    assert len(remaining) < length - len(received) + new_size  # the last batches repeat the epoch's first samples
    assert set(remaining[length - len(received) :]) <= set(order[:new_size])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_continues_at_the_next_batch(num_workers: int) -> None:
    def make(rank: int, size: int) -> Any:
        return DataLoader(_Halves(24), 2, num_workers=num_workers)

    order = _received(_prepared(make, 0, 1))
    assert sorted(order) == list(range(24))
    first = [_prepared(make, rank, 2) for rank in range(2)]
    for loader in first:
        _received(loader, 3)
    state = first[0].state_dict()
    for size in (3,) if num_workers else (1, 2, 3):
        shares = []
        for rank in range(size):
            loader = _prepared(make, rank, size)
            loader.load_state_dict(state)
            shares.append([batch.tolist() for batch in loader])
        remaining = [sample for batches in zip(*shares, strict=True) for batch in batches for sample in batch]
        assert remaining == order[12:]


class _Halves(IterableDataset[int]):
    """A stream of which each worker yields a part."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        return iter(range(self._length) if worker is None else range(worker.id, self._length, worker.num_workers))


def test_batches_of_another_size_cannot_continue_a_stream() -> None:
    loader = _prepared(lambda rank, size: DataLoader(Numbers(12), 2), 0, 1)
    _received(loader, 3)
    other = _prepared(lambda rank, size: DataLoader(Numbers(12), 4), 0, 1)
    with pytest.raises(ModelError, match=r"6 samples .*batch_size=4"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda rank, size: DataLoader(_samples(9), batch_sampler=BatchSampler(RandomSampler(range(9)), 2, False)),
        lambda rank, size: DataLoader(_samples(12), 2, sampler=DistributedSampler(_samples(12), size, rank, seed=7)),
        lambda rank, size: DataLoader(_samples(12), 2, num_workers=1, persistent_workers=True),
    ],
    ids=["batch sampler", "distributed sampler", "workers"],
)
def test_every_kind_of_sampler_continues(make: Make) -> None:
    whole = [_received(_prepared(make, rank, 2)) for rank in range(2)]
    for rank in range(2):
        loader = _prepared(make, rank, 2)
        received = _received(loader, 1)
        other = _prepared(make, rank, 2)
        other.load_state_dict(loader.state_dict())
        assert received + _received(other) == whole[rank]
        assert _received(other) == _next_epoch(make, rank)  # the next epoch is complete


def _next_epoch(make: Make, rank: int) -> list[int]:
    loader = _prepared(make, rank, 2)
    _received(loader)
    return _received(loader)


def test_the_position_counts_the_yielded_samples() -> None:
    loader = _prepared(lambda rank, size: DataLoader(_samples(6), 2), 0, 1)

    def place() -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["items"]

    assert place() == (0, 0)
    assert [place() for _ in loader] == [(0, 2), (0, 4), (0, 6)]
    assert place() == (1, 0)
    for _ in loader:
        break
    assert place() == (1, 2)  # an epoch that the loop left can be continued
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(1)
    assert (place(), len(loader)) == ((1, 2), 3)
    assert _received(loader) == [2, 3, 4, 5]
    loader.load_state_dict({**loader.state_dict(), "items": 4})
    loader.set_epoch(7)
    assert _received(loader) == list(range(6))


def test_an_epoch_can_continue_after_its_last_sample() -> None:
    loader = _prepared(lambda rank, size: DataLoader(_samples(6), 2), 0, 1)
    states = [loader.state_dict() for _ in loader]
    loader.load_state_dict(states[-1])
    assert _received(loader) == []
    assert _received(loader) == list(range(6))


def test_an_epoch_of_other_data_starts_at_the_beginning() -> None:
    loader = _prepared(lambda rank, size: DataLoader(_samples(6), 2), 0, 1)
    _received(loader)
    _received(loader, 1)
    other = _prepared(lambda rank, size: DataLoader(_samples(8), 2), 0, 1)
    other.load_state_dict(loader.state_dict())
    assert (other.state_dict()["epoch"], _received(other)) == (1, list(range(8)))


def test_a_checkpoint_holds_the_position(tmp_path: Path) -> None:
    def prepare() -> tuple[Any, Any]:
        strategy = make_strategy("one-device", device="cpu")
        model = nn.Linear(1, 1)
        strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return strategy, strategy.prepare(DataLoader(_samples(10), 2, shuffle=True))

    strategy, loader = prepare()
    received = []
    for number, batch in enumerate(loader):
        received += batch.tolist()
        if number == 2:
            strategy.save(tmp_path / "checkpoint")
            break
    other, loader = prepare()
    other.load(tmp_path / "checkpoint")
    assert sorted(received + _received(loader)) == list(range(10))
    assert len(_received(loader)) == 10
    strategy.close()
    other.close()

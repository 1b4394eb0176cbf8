"""The sampler and the state of elastic training with Horovod's API."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

torch = pytest.importorskip("torch")
import paceline.horovod as hvd  # noqa: E402
from paceline import collectives  # noqa: E402
from paceline.horovod import membership  # noqa: E402
from paceline.horovod.elastic import sampler as sampler_module  # noqa: E402

PHASES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=5)


def samplers(num_ranks: int, num_items: int, state: dict[str, int]) -> list[hvd.elastic.ElasticSampler]:
    """Return the samplers of all ranks, after they have loaded a state."""
    found = []
    for rank in range(num_ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler_module, "rank", lambda rank=rank: rank)
            patch.setattr(sampler_module, "size", lambda: num_ranks)
            found.append(hvd.elastic.ElasticSampler(range(num_items), shuffle=state["epoch"] > 0))
            found[-1].load_state_dict(state)
    return found


@num_examples(100)
@given(num_items=st.integers(0, 60), epoch=st.integers(0, 2), phases=PHASES)
def test_each_sample_is_processed_once_for_any_changes_of_the_ranks(
    num_items: int, epoch: int, phases: list[tuple[int, int, int]]
) -> None:
    state = {"epoch": epoch, "processed_num": 0}
    processed: Counter[int] = Counter()
    for number, (num_ranks, num_batches, batch_size) in enumerate(phases):
        ranks = samplers(num_ranks, num_items, state)
        assert len({len(sampler) for sampler in ranks}) == 1
        is_last = number == len(phases) - 1
        repeated = len(ranks[0]) * num_ranks - len(ranks[0].remaining_indices)
        assert repeated < num_ranks
        for sampler in ranks:
            items = list(sampler)
            assert len(items) == len(sampler)
            batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
            for batch, chosen in enumerate(batches if is_last else batches[:num_batches]):
                processed.update(chosen)
                sampler.record_batch(batch, len(chosen)) if batch % 2 else sampler.record_indices(chosen)
        assert len({sampler.processed_num for sampler in ranks}) == 1
        state = ranks[0].state_dict()
        if state["processed_num"] >= num_items:
            break
    assert processed.keys() == set(range(num_items))
    assert processed.total() == num_items + repeated * (num_items > 0)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with collectives.init() as group:  # this leaves no thread
        monkeypatch.setattr(membership, "all_ranks", group)
        hvd.init()
        yield
        hvd.shutdown()


def take_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("one_rank")
def test_restore_returns_to_the_last_commit() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, losses=[])
    state.sync()
    take_step(model, optimizer)
    scheduler.step()
    sampler.record_batch(0, 2)
    state.epoch = 1
    state.commit()
    committed = [parameter.tolist() for parameter in model.parameters()]
    results = []
    for _ in range(2):  # a step after a restore must not change the saved momentum
        take_step(model, optimizer)
        results.append([parameter.tolist() for parameter in model.parameters()])
        scheduler.step()
        sampler.record_batch(1, 2)
        state.epoch = 2
        state.losses.append(0.5)
        state.restore()
        assert [parameter.tolist() for parameter in model.parameters()] == committed
        assert (state.epoch, state.losses, scheduler.last_epoch) == (1, [], 1)
        assert (sampler.processed_num, list(sampler)) == (2, [2, 3, 4, 5, 6, 7])
    assert results[0] == results[1] != committed


@pytest.mark.usefixtures("one_rank")
def test_a_new_object_counts_as_saved() -> None:
    state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), other=3)
    state.model = model = torch.nn.Linear(3, 1)
    weight = model.weight.tolist()
    state.other = 4
    torch.nn.init.zeros_(model.weight)
    state.restore()
    assert state.model is model
    assert (model.weight.tolist(), state.other, state.optimizer) == (weight, 3, None)


@pytest.mark.usefixtures("one_rank")
def test_without_a_coordinator_the_function_is_called_once() -> None:
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=3)
    state.register_reset_callbacks([lambda: setattr(state, "batch", 5)])

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState, step: int, *, fails: bool) -> int:
        """Train."""
        state.batch += step
        state.commit()
        if fails:
            raise hvd.HorovodInternalError("rank 1 died")
        return int(state.batch)

    assert train.__doc__ == "Train."
    assert train(state, 2, fails=False) == 5
    with pytest.raises(hvd.HorovodInternalError, match=re.escape("rank 1 died. The training cannot")):
        train(state, 3, fails=True)
    assert state.batch == 8
    state.on_reset()
    assert (state.batch, state.num_commits) == (5, 2)

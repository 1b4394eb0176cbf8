"""A checkpoint of one strategy and number of ranks continues under any other strategy and number.

The ranks of the strategies with several processes run this file as a program, once: importing torch takes seconds.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, ReduceLROnPlateau, SequentialLR

import paceline
from paceline.errors import ModelError, PacelineError, UsageError
from paceline.protocol import Sequential
from paceline.torch import Embedding, EmbeddingBag, strategy
from paceline.torch.strategies.base import Strategy
from paceline.torch.update_rules import rule_of

SIZE = 2
BEFORE, AFTER = 5, 4
GENERATOR = torch.Generator().manual_seed(3)
KEYS = torch.randint(-8, 8, (BEFORE + AFTER, 2 * 6, 3), generator=GENERATOR)
TARGETS = KEYS.sum(2, keepdim=True).sin()
EVERY_KEY = torch.arange(-8, 8)
ONE_PROCESS: dict[str, dict[str, Any]] = {"one-device": {}, "mirrored": {"replicas": 2}}
SEVERAL = {"all-reduce": "hybrid", "parameter-server": "all-reduce", "hybrid": "parameter-server"}
"""Pairs of strategies: each strategy loads the checkpoint of the other strategy and the checkpoint of one device.

One process loads all checkpoints.
"""
PATIENCE_S = 180.0


class Net(nn.Module):
    """A model with embedding rows, tied weights, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.deep = Embedding(4)
        self.wide = EmbeddingBag(1, mode="sum", initializer=paceline.Constant(value=0.5))
        self.first = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(12, 1)
        self.last.bias.requires_grad = False
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))

    def forward(self, keys: Tensor) -> Tensor:
        hidden = torch.tanh(self.tied(torch.tanh(self.first(self.deep(keys).flatten(1)))))
        logits: Tensor = self.last(hidden) * self.scale + self.wide(keys[:, 1:])
        return logits


def adam(model: Net) -> Optimizer:
    rows = [*model.deep.parameters(), *model.wide.parameters()]
    dense = [model.first.weight, model.first.bias, model.tied.bias, model.last.weight]
    groups: list[dict[str, Any]] = [{"params": dense}, {"params": rows, "lr": 0.05}]
    return torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.99))


def prepared(chosen: Strategy, make: Callable[[Net], Optimizer] = adam) -> tuple[Net, Any, Any, Any]:
    """Return the original model, the prepared model, the optimizer and the scheduler."""
    net = Net()
    optimizer = make(net)
    # The milestones are a dictionary with numbers as keys: one before the checkpoint and one after it.
    scheduler = MultiStepLR(optimizer, [BEFORE - 2, BEFORE + 2], 0.5)
    return net, *chosen.prepare(net, optimizer, scheduler=scheduler)


def train(chosen: Strategy, parts: tuple[Net, Any, Any, Any], steps: range) -> None:
    """Train on this rank's share of each batch. The loop is the same for every strategy."""
    _, model, optimizer, scheduler = parts
    for step in steps:
        keys, targets = (all_of_it[step].chunk(chosen.world_size)[chosen.rank] for all_of_it in (KEYS, TARGETS))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(keys), targets))
        optimizer.step()
        scheduler.step()


def values_of(chosen: Strategy, net: Net) -> list[Tensor]:
    """Return the parameters, the buffer, and the rows of all keys. They are equal on all ranks."""
    chosen.gather_values()
    chosen.barrier()
    with torch.no_grad():
        rows = [net.deep(EVERY_KEY), net.wide(EVERY_KEY.unsqueeze(1))]
    chosen.barrier()
    return [value.detach().clone() for value in (*net.state_dict().values(), *rows) if value.numel()]


def save(name: str, folder: Path, **options: Any) -> None:
    with strategy(name, device="cpu", **options) as chosen:
        parts = prepared(chosen)
        if chosen.is_main and chosen.embedder is not None and chosen.optimizer is not None:
            for table in chosen.embedder.tables.values():  # the servers may have another strategy's rows
                table.clear()
                table.set_update(rule_of(chosen.optimizer, chosen.optimizer.param_groups[1]))
        chosen.barrier()
        train(chosen, parts, range(BEFORE))
        parts[0].scale.fill_(1.25 if chosen.is_main else 7.0)  # the checkpoint has the value of rank 0
        chosen.save(folder, epoch=3, best=math.inf, names=("a", "b"))


def load(name: str, folder: Path, **options: Any) -> list[Tensor]:
    """Load a checkpoint into a different training; return the parameters after some further steps."""
    with strategy(name, device="cpu", **options) as chosen:
        parts = prepared(chosen)
        train(chosen, parts, range(BEFORE, BEFORE + 1))
        assert chosen.load(folder) == {"epoch": 3, "best": math.inf, "names": ["a", "b"]}
        train(chosen, parts, range(BEFORE, BEFORE + AFTER))
        return values_of(chosen, parts[0])


def uninterrupted() -> list[Tensor]:
    with strategy("one-device", device="cpu") as chosen:
        parts = prepared(chosen)
        train(chosen, parts, range(BEFORE))
        parts[0].scale.fill_(1.25)
        train(chosen, parts, range(BEFORE, BEFORE + AFTER))
        return values_of(chosen, parts[0])


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


# The ranks.


def main(folder: Path) -> None:
    """Run one rank: save with every strategy of several processes, and then load with each strategy."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    expected = [torch.tensor(values) for values in json.loads((folder / "expected").read_text())]
    number = 0

    def meet() -> None:
        """Give the next strategy its own part of the store."""
        nonlocal number
        number += 1
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)

    for name in SEVERAL:
        meet()
        save(name, folder / name)
    distances = {}
    for name, other in SEVERAL.items():
        for saved in ("one-device", other):
            meet()
            distances[f"{saved} under {name}"] = distance(load(name, folder / saved), expected)
    meet()
    failure_texts = check_failures(rank, folder)
    (folder / f"rank {rank}").write_text(json.dumps([distances, failure_texts]))


def check_failures(rank: int, folder: Path) -> list[str]:
    """Return the messages on this rank for each failure of one rank. Check that the strategy works afterwards."""
    failure_texts = []
    with strategy("all-reduce", device="cpu") as chosen:
        prepared(chosen)
        (folder / f"taken {rank}").mkdir()
        (folder / f"taken {rank}" / "notes").touch()
        failures: list[Callable[[], object]] = [
            lambda: chosen.load(folder / ("nothing" if rank == 1 else "one-device")),
            lambda: chosen.save(folder / f"taken {rank}"),
            lambda: chosen.save(folder / "new", thing=object()),
        ]
        for fail in failures:
            try:
                fail()
            except PacelineError as error:
                failure_texts.append(str(error))
            chosen.barrier()
        chosen.load(folder / "one-device")
    return failure_texts


@pytest.mark.timeout(180)
def test_every_strategy_loads_checkpoints_of_all_other_strategies(tmp_path: Path, one_thread: None) -> None:
    from tests.integration.strategies.rank_checks import run_ranks

    expected = uninterrupted()
    (tmp_path / "expected").write_text(json.dumps([value.tolist() for value in expected]))
    for name, options in ONE_PROCESS.items():
        save(name, tmp_path / name, **options)
    consistency = Sequential(aggregate="mean")
    with paceline.local_cluster(servers=2, workers=SIZE, consistency=consistency) as cluster:
        place = {"PACELINE_SCHEDULER": cluster.scheduler, "PACELINE_TOKEN": cluster.token}
        run_ranks([__file__, tmp_path], SIZE, "checkpoints", place, patience_s=PATIENCE_S)
    reports = [json.loads((tmp_path / f"rank {rank}").read_text()) for rank in range(SIZE)]
    distances = {f"{label}, rank {rank}": found for rank in range(SIZE) for label, found in reports[rank][0].items()}
    for name, options in ONE_PROCESS.items():
        for saved in (*ONE_PROCESS, *SEVERAL):
            distances[f"{saved} under {name}"] = distance(load(name, tmp_path / saved, **options), expected)
    assert len(distances) == SIZE * 3 * 2 + 2 * 5
    assert max(distances.values()) < 1e-5, distances

    failures = [reports[rank][1] for rank in range(SIZE)]
    assert [len(messages) for messages in failures] == [3, 3], failures
    for messages, (first, second) in zip(
        ["nothing does not exist", "taken 0: it contains other files", "cannot save extra['thing'], of type object"],
        [(failures[0][number], failures[1][number]) for number in range(3)],
        strict=True,
    ):
        assert messages in first
        assert messages in second
    assert failures[0][0].startswith("rank 1: ")
    assert failures[1][1].startswith("rank 0: ")
    assert not (tmp_path / "new").exists()


# One process.


@pytest.fixture
def one_thread() -> Any:
    """Use one thread, because threads of an operator wait for one another if other tests use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A checkpoint of Net."""
    save("one-device", tmp_path / "kept")
    return tmp_path / "kept"


def sgd(net: Net) -> Optimizer:
    return torch.optim.SGD(adam(net).param_groups, lr=0.01)


def other_groups(net: Net) -> Optimizer:
    return torch.optim.Adam([parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.01)


def amsgrad(net: Net) -> Optimizer:
    optimizer = adam(net)
    optimizer.param_groups[0]["amsgrad"] = True
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_groups, "has other parameter groups than this optimizer"),
        (amsgrad, r"parameter group 0 .* Adam with exp_avg, exp_avg_sq, step, .* exp_avg_sq, max_exp_avg_sq"),
    ],
)
def test_checkpoints_of_another_optimizer(kept: Path, make: Callable[[Net], Optimizer], message: str) -> None:
    with strategy("one-device", device="cpu") as chosen:
        prepared(chosen, make)
        with pytest.raises(ModelError, match=message):
            chosen.load(kept)


def test_another_optimizer_class_with_the_same_rule(tmp_path: Path) -> None:
    def with_momentum(momentum: float) -> tuple[Strategy, Optimizer]:
        chosen, model = strategy("one-device", device="cpu"), nn.Linear(2, 1)
        return chosen, chosen.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))[1]

    chosen, optimizer = with_momentum(0.9)
    chosen.save(tmp_path / "a")
    with pytest.raises(ModelError, match=r"parameter group 0 of SGD: .* has Momentum with momentum_buffer"):
        with_momentum(0.0)[0].load(tmp_path / "a")
    chosen, optimizer = with_momentum(0.5)
    chosen.load(tmp_path / "a")
    assert optimizer.param_groups[0]["momentum"] == 0.9
    model = nn.Linear(2, 1)
    with strategy("one-device", device="cpu") as other:
        other.prepare(model, torch.optim.Adagrad(model.parameters()))
        with pytest.raises(ModelError, match=r"was saved with SGD, but this program has Adagrad"):
            other.load(tmp_path / "a")


def test_a_checkpoint_of_another_model_is_rejected(kept: Path) -> None:
    def error_of(model: nn.Module) -> str:
        with strategy("one-device", device="cpu") as chosen:
            chosen.prepare(model)
            before = [value.clone() for value in model.state_dict().values()]
            with pytest.raises(ModelError) as failure:
                chosen.load(kept)
            assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
        return str(failure.value)

    wider, without, initialized = Net(), Net(), Net()
    wider.last = nn.Linear(12, 2)
    assert "'last.bias' is float32 [1] in the checkpoint and float32 [2] here" in error_of(wider)
    without.wide = nn.Identity()  # type: ignore[assignment]
    assert "has the embeddings ['deep', 'wide'], but this model has ['deep']" in error_of(without)
    initialized.deep = Embedding(4, seed=1)
    assert "embedding 'deep' as sparse(dim=4, Adam(lr=0.025, " in error_of(initialized)


def test_rows_can_be_loaded_without_an_optimizer(kept: Path) -> None:
    """Without an optimizer, tables have no state."""
    with strategy("one-device", device="cpu") as chosen, torch.no_grad():
        net = Net()
        chosen.prepare(net)
        chosen.load(kept)
        read = net(KEYS[0])
    with strategy("one-device", device="cpu") as chosen, torch.no_grad():
        parts = prepared(chosen)
        chosen.load(kept)
        assert torch.equal(parts[0](KEYS[0]), read)


def test_invalid_checkpoints_are_rejected(kept: Path, tmp_path: Path) -> None:
    chosen = strategy("one-device", device="cpu")
    with pytest.raises(UsageError, match=r"load\(\) .*prepare\(\)"):
        chosen.load(kept)
    with pytest.raises(UsageError, match=r"save\(\) .*prepare\(\)"):
        chosen.save(kept)
    prepared(chosen)
    with pytest.raises(ModelError, match="elsewhere does not exist"):
        chosen.load(tmp_path / "elsewhere")
    with paceline.local_cluster(servers=1) as cluster, cluster.connect() as client:
        client.sparse_table("w", dim=1, update=paceline.SGD(lr=0.1))
        client.save(tmp_path / "tables")
    with pytest.raises(ModelError, match="holds tables, not a checkpoint"):
        chosen.load(tmp_path / "tables")
    for path in sorted(kept.glob("*.safetensors")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ModelError, match=rf"{path.name} is damaged"):
            chosen.load(kept)
        path.unlink()
        with pytest.raises(ModelError, match=rf"cannot read .*{path.name}, a part of the model"):
            chosen.load(kept)
        path.write_bytes(content)
    assert chosen.load(kept)["epoch"] == 3


def test_schedulers_continue_from_a_checkpoint(tmp_path: Path) -> None:
    """The states contain infinity, counters, nested schedulers, and tensors as learning rates."""
    makers: list[Callable[[Optimizer], Any]] = [
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
        lambda optimizer: MultiStepLR(optimizer, [2, 4, 5, 5]),
        lambda optimizer: SequentialLR(
            optimizer, [MultiStepLR(optimizer, [1, 3]), CosineAnnealingLR(optimizer, 5)], [4]
        ),
    ]

    def step(parts: Any) -> float:
        _, optimizer, scheduler = parts
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        return float(optimizer.param_groups[0]["lr"])

    for number, make in enumerate(makers):
        rates: list[list[float]] = []
        for num_before in (0, 3):
            model = nn.Linear(1, 1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
            chosen = strategy("one-device", device="cpu")
            parts = chosen.prepare(model, optimizer, scheduler=make(optimizer))
            if num_before:
                chosen.load(tmp_path / str(number))
                assert isinstance(parts[1].param_groups[0]["lr"], Tensor)
                assert parts[1].param_groups[0]["betas"] == (0.9, 0.999)
            else:
                for _ in range(3):
                    step(parts)
                chosen.save(tmp_path / str(number))
            rates.append([step(parts) for _ in range(5)])
        assert rates[0] == rates[1]
        assert len(set(rates[0])) > 1, "the scheduler must change the rate"


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def test_a_checkpoint_holds_every_model_and_optimizer(tmp_path: Path) -> None:
    def train(chosen: Strategy, before: Callable[[], None]) -> list[Tensor]:
        torch.manual_seed(5)
        models = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizers = [torch.optim.Adam(models[0].parameters(), 0.1), torch.optim.SGD(models[1].parameters(), 0.1, 0.9)]
        first, second, *prepared = chosen.prepare(*models, *optimizers)
        batch = torch.arange(32.0).view(8, 4) / 16
        for step in range(8):
            if step == 4:
                before()
            for optimizer in prepared[: 1 + step % 2]:
                optimizer.zero_grad()
                torch.autograd.backward((second(first(batch)) - 1).square().mean())
                optimizer.step()
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]

    with strategy("one-device", device="cpu") as chosen:

        def save_twice() -> None:
            for _ in range(2):  # the second checkpoint replaces the files of the first
                chosen.save(tmp_path / "gan")

        expected = train(chosen, save_twice)
    with strategy("mirrored", device="cpu", replicas=2) as other:

        def resume() -> None:
            assert other.module is not None
            for parameter in other.module.parameters():
                parameter.data.fill_(7.0)
            for optimizer in other.optimizers:
                optimizer.state.clear()
            other.load(tmp_path / "gan")

        torch.testing.assert_close(train(other, resume), expected)

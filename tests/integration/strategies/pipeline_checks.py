"""Checks of ``Pipeline`` on two ranks; ``strategy_ranks.py`` runs them for ``test_pipeline.py``."""

from __future__ import annotations

import copy
import itertools
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.strategies.public_models import Labelled, LabelledOutput, LossWithin, Stateful
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from paceline.errors import StageError, UsageError
from paceline.strategies import SCHEDULES
from paceline.torch import AllReduce, Pipeline, Sharded

CHECKPOINT = "PIPELINE_CHECKPOINT"
"""The environment variable with the folder that the parent process reads."""
Batches = list[tuple[Tensor, Tensor]]
_meetings = itertools.count(1000)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.relu(self.up(self.norm(x)), inplace=True))


class Net(nn.Module):
    """A language model. The first and last weights are tied, and the last layer uses the first value."""

    def __init__(self, blocks: int = 4, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.last = nn.Linear(width, words, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x: Tensor) -> Any:
        x = early = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x + early)


class Bags(nn.Module):
    """Concatenated texts, and the start of each text."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(11, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, text: Tensor, offsets: Tensor) -> Any:
        return self.last(self.bags(text, offsets))


class Recurrent(nn.Module):
    """A model whose first dimension is time. It returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.recurrent = nn.LSTM(4, 4, 2)
        self.last = nn.Linear(4, 11)

    def forward(self, x: Tensor) -> Any:
        output, state = self.recurrent(self.words(x))
        return self.last(output), state


class Shifting(nn.Module):
    """A layer whose output has no rows of its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shifted: Tensor = self.second(self.first(y)) + x.mean()
        return shifted


def batches_of(sizes: Sequence[int]) -> Batches:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randint(11, (size, 3), generator=generator) for size in sizes]
    return [(x, (3 * x + 1) % 11) for x in inputs]


def model_and_optimizer(kind: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    further_losses = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": further_losses, "weight_decay": 0.01}, {"params": biases, "lr": 0.02}]
    if kind == "adam":
        return model, torch.optim.Adam(groups, lr=0.01)
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, 11), target.reshape(-1))


Loop = Callable[[nn.Module, torch.optim.Optimizer, Batches], list[float]]


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = word_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        losses.append(loss.item())
    return losses


def reading_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    """Read values, use a custom loss, and call backward twice in a step."""
    losses = []
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        output = model(x)
        loss = word_loss(output, y) * 0.5 + 0.1 * output.square().mean()
        losses.append(loss.item())
        loss.backward()
        output = model(x)
        again = word_loss(output, y) / 2
        losses.append(float((output.argmax(-1) == y).float().mean()))
        again.backward()
        optimizer.step()
        losses.append(float(again.detach()) + float((output.argmax(-1) == y).float().mean()))
        if number % 2:
            model.eval()
            with torch.no_grad():
                losses.append(float(word_loss(model(x), y)))
            model.train()
    return losses


def meet_again() -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(next(_meetings))


def expect_equal(loop: Loop, batches: Batches, kind: str = "sgd", tolerance: float = 1e-5, **options: Any) -> None:
    """Train in a pipeline and in one process. Check that losses and parameters are equal."""
    torch.use_deterministic_algorithms(True)
    whole, alone = model_and_optimizer(kind)
    expected = loop(whole, alone, batches)
    meet_again()
    with Pipeline(**{"stages": 2, **options}) as strategy:
        model, optimizer = strategy.prepare(*model_and_optimizer(kind))
        found = loop(model, optimizer, batches)
        strategy.gather_values()
        assert found == pytest.approx(expected, abs=tolerance)
        if strategy.is_main:
            for (name, value), other in zip(whole.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other, value, rtol=1e-4, atol=tolerance, msg=name)


def check_a_schedule_of_four_stages(rank: int, size: int) -> None:
    expect_equal(plain_loop, batches_of([8, 8, 8, 7, 3]), schedule="interleaved", microbatches=4)


def thorough_every_schedule_equals_one_process(rank: int, size: int) -> None:
    for schedule in SCHEDULES:
        expect_equal(plain_loop, batches_of([8, 8, 8, 7, 3]), schedule=schedule, microbatches=4)


def thorough_steps_of_adam(rank: int, size: int) -> None:
    expect_equal(plain_loop, batches_of([8] * 5), schedule="1f1b", microbatches=4, kind="adam")


def thorough_fifty_steps_of_the_benchmarks_models(rank: int, size: int) -> None:
    def transformer() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    x = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(3))
    for block in (transformer, perceptron):
        for schedule in ("1f1b", "interleaved"):  # 2 and 4 stages

            def losses(strategy: Pipeline | None, block: Any = block) -> list[float]:
                torch.manual_seed(0)
                model: nn.Module = nn.Sequential(*(block() for _ in range(8)))
                optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                if strategy is not None:
                    model, optimizer = strategy.prepare(model, optimizer)
                found = []
                for _ in range(50):
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), x.flip(0))
                    loss.backward()
                    optimizer.step()
                    found.append(float(loss.detach()))
                return found

            meet_again()
            with Pipeline(stages=2, schedule=schedule, microbatches=4) as strategy:
                assert losses(strategy) == pytest.approx(losses(None), rel=1e-5)


def check_an_oversized_model(rank: int, size: int) -> None:
    """16 layers of 4 MB have 192 MB with gradients and momentum. The limit is 145 MB."""

    def train(strategy: Pipeline | None) -> list[float]:
        with torch.device("cpu" if strategy is None else "meta"):
            model: nn.Module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if strategy is not None:
            model, optimizer = strategy.prepare(model, optimizer)
        x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    status_line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(status_line.split()[1]) << 10) + (145 << 20), before[1]))
    try:
        meet_again()
        with Pipeline(stages=2, schedule="1f1b", microbatches=2) as strategy:
            losses = train(strategy)
        assert losses[1] < losses[0]
        with pytest.raises(RuntimeError, match="memory"):
            train(None)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def check_a_meta_model_is_initialized_like_in_other_strategies(rank: int, size: int) -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 11))

    values = []
    for kind in (Pipeline, AllReduce, Sharded):
        meet_again()
        torch.manual_seed(5)
        with kind() as strategy:
            found = strategy.prepare(model(), None)
            if kind is Pipeline:
                assert strategy.reduce({"loss": 3.0}, "sum") == {"loss": 3.0}  # one share of the data
                with pytest.raises(UsageError, match="before its first call"):
                    strategy.load("nowhere")
                with torch.no_grad():
                    found(torch.arange(8).reshape(4, 2))
            values.append(strategy.gather_values())
    if rank == 0:
        for name, value in values[0].items():
            assert not value.isnan().any(), name
            for other in values[1:]:
                assert torch.equal(value, other[name]), name


def check_a_reading_loop(rank: int, size: int) -> None:
    expect_equal(reading_loop, batches_of([6] * 3), schedule="1f1b", microbatches=3, split=["blocks.2"])


def thorough_a_reading_loop_of_four_stages(rank: int, size: int) -> None:
    expect_equal(reading_loop, batches_of([6] * 3), schedule="zbv", microbatches=3)


def expect_equal_steps(
    make: Callable[[], nn.Module], step: Callable[[nn.Module, int], list[Any]], schedule: str, *, evaluates: bool = True
) -> None:
    """Train a model by steps that return the loss first, in a pipeline and in one process.

    `evaluates`: also take a step in evaluation mode, which traces the model again.
    """

    def train(strategy: Pipeline | None) -> list[float]:
        torch.manual_seed(0)
        model = make()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if strategy is not None:
            model, optimizer = strategy.prepare(model, optimizer)
        found: list[float] = []
        for rows in (8, 7):
            optimizer.zero_grad()
            loss, *further_losses = step(model, rows)
            loss.backward()
            optimizer.step()
            found += [float(value.detach()) for value in (loss, *further_losses)]
        if not evaluates:
            return found
        model.eval()
        with torch.no_grad():
            return [*found, *(float(loss) for loss in step(model, 6))]

    expected = train(None)
    meet_again()
    with Pipeline(stages=2, schedule=schedule, microbatches=4) as strategy:
        assert train(strategy) == pytest.approx(expected, abs=1e-5), schedule


def check_a_model_with_a_loss(rank: int, size: int, schedule: str = "interleaved", evaluates: bool = False) -> None:
    def step(model: nn.Module, rows: int) -> list[Any]:
        ((x, _),) = batches_of([rows])
        targets = x.roll(1, 1).masked_fill(x < 4, -1)  # microbatches have different numbers of targets
        logits, loss = model(x, targets)
        values = [loss, logits.square().mean().detach()]
        if model.training:
            with torch.no_grad():
                alone, nothing = model(x[:, :2])
                assert nothing is None
            values.append(alone.square().mean())
        return values

    expect_equal_steps(LossWithin, step, schedule, evaluates=evaluates)


def thorough_ignored_targets(rank: int, size: int, schedule: str = "1f1b", evaluates: bool = False) -> None:
    def step(model: nn.Module, rows: int) -> list[Any]:
        ((x, _),) = batches_of([rows])
        nothing, partial = torch.full_like(x, -1), x.clone()
        partial[: rows // 2] = -1  # ignore all targets of a microbatch
        assert model(x, nothing)[1].isnan()
        logits = model(x, x)[0]
        outside = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), nothing.reshape(-1), ignore_index=-1)
        if torch.is_grad_enabled():
            torch.autograd.backward(outside)  # adds zeros
        assert outside.isnan()
        return [model(x, partial)[1]]

    expect_equal_steps(LossWithin, step, schedule, evaluates=evaluates)


def refuse_gradients(request: Callable[[Any, Tensor], Any]) -> None:
    meet_again()
    with Pipeline(stages=2, microbatches=2) as strategy:
        model = strategy.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        with pytest.raises(UsageError, match=r"does not support torch\.autograd\.grad"):
            request(model, model(torch.ones(8, 4)).square().mean())


def check_absent_gradients_of_stages(rank: int, size: int) -> None:
    refuse_gradients(lambda model, loss: torch.autograd.backward(loss, inputs=list(model.parameters())))


def thorough_absent_gradients_of_stages(rank: int, size: int) -> None:
    refuse_gradients(lambda model, loss: torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    refuse_gradients(lambda model, loss: torch.autograd.backward(loss, create_graph=True))


def check_an_unknown_output_class(rank: int, size: int) -> None:
    class Result:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Wrapped(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return Result(super().forward(x))

    meet_again()
    with Pipeline(stages=2, microbatches=2) as strategy:
        model = strategy.prepare(Wrapped(nn.Linear(4, 4), nn.Linear(4, 1)))
        with pytest.raises(UsageError, match="returns an object of the class Result"):
            model(torch.ones(8, 4))


def check_a_custom_output_class(rank: int, size: int, schedule: str = "interleaved", evaluates: bool = False) -> None:
    def step(model: nn.Module, rows: int) -> list[Any]:
        ((x, _),) = batches_of([rows])
        mask = torch.ones_like(x)
        mask[::2, 2:] = 0
        output = model(ids=x, mask=mask, labels=x.masked_fill(mask == 0, -100), scale=2.0)
        assert isinstance(output, LabelledOutput)
        loss = output.loss
        assert loss is not None
        return [loss * 2, word_loss(output["logits"].detach(), x)]

    expect_equal_steps(Labelled, step, schedule, evaluates=evaluates)


def thorough_a_model_with_states(rank: int, size: int, schedule: str = "interleaved") -> None:
    def step(model: nn.Module, rows: int) -> list[Any]:
        ((x, y),) = batches_of([rows])
        logits, states = model(x)
        assert states["lower"].shape == (2, rows, 8)
        weights = torch.arange(float(rows))[None, :, None]
        return [word_loss(logits, y) + (states["lower"] * weights).mean()]

    expect_equal_steps(Stateful, step, schedule)


def thorough_a_complete_transformer(rank: int, size: int) -> None:
    def step(model: nn.Module, rows: int) -> list[Any]:
        source, target = torch.randn(2, rows, 3, 8, generator=torch.Generator().manual_seed(rows))
        return [F.mse_loss(model(source, target), target)]

    for schedule in ("1f1b", "interleaved"):
        expect_equal_steps(lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), step, schedule)


def thorough_models_in_the_other_schedule(rank: int, size: int) -> None:
    check_a_model_with_a_loss(rank, size, "1f1b", evaluates=True)
    thorough_ignored_targets(rank, size, "interleaved", evaluates=True)
    check_a_custom_output_class(rank, size, "1f1b", evaluates=True)
    thorough_a_model_with_states(rank, size, "1f1b")


def check_two_pipelines_side_by_side(rank: int, size: int) -> None:
    whole, alone = model_and_optimizer()
    for x, y in batches_of([8] * 4):
        alone.zero_grad()
        word_loss(whole(x), y).backward()
        alone.step()
    meet_again()
    with Pipeline(stages=1, data_parallel=2, schedule="gpipe", microbatches=2) as strategy:
        assert strategy.data_place == (rank, 2)
        model, optimizer = strategy.prepare(*model_and_optimizer())
        for x, y in batches_of([8] * 4):
            optimizer.zero_grad()
            word_loss(model(x[rank::2]), y[rank::2]).backward()
            optimizer.step()
        for value, other in zip(whole.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-5)


def check_a_checkpoint_continues_in_other_strategies(rank: int, size: int) -> None:
    batches = batches_of([8] * 4)
    whole, alone = model_and_optimizer("adam")
    expected = plain_loop(whole, alone, batches)
    folder = Path(os.environ[CHECKPOINT])
    meet_again()
    with Pipeline(stages=2, schedule="interleaved", microbatches=2) as strategy:
        model, optimizer = strategy.prepare(*model_and_optimizer("adam"))
        plain_loop(model, optimizer, batches[:2])
        with pytest.raises(UsageError, match=r"Use strategy.save\(directory\)"):
            model.state_dict()
        strategy.save(folder, epoch=2)
        assert plain_loop(model, optimizer, batches[2:]) == pytest.approx(expected[2:], abs=1e-5)
        strategy.load(folder)  # load the checkpoint during a training
        assert plain_loop(model, optimizer, batches[2:]) == pytest.approx(expected[2:], abs=1e-5)
    meet_again()
    with Pipeline(stages=2, schedule="gpipe", microbatches=4) as strategy:
        model, optimizer = strategy.prepare(*model_and_optimizer("adam"))
        assert strategy.load(folder) == {"epoch": 2}
        assert plain_loop(model, optimizer, batches[2:]) == pytest.approx(expected[2:], abs=1e-5)


class Deciding(nn.Module):
    """A model that selects one of two layers, depending on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.first(x) if x.sum() > 0 else self.second(x)


def refuse(message: str, use: Callable[[Any], Any], model: nn.Module | None = None, **options: Any) -> None:
    meet_again()
    with Pipeline(**{"stages": 2, "schedule": "gpipe", "microbatches": 2, **options}) as strategy:
        prepared = strategy.prepare(Net() if model is None else model)
        with pytest.raises((UsageError, StageError), match=message):
            use(prepared)


def check_errors_on_every_rank(rank: int, size: int) -> None:
    x, y = batches_of([8])[0]
    refuse(
        "2 stages were requested, and the model has no more than 1 layers", lambda net: net(x.float()), nn.Linear(3, 3)
    )
    refuse("the model has no module of this name", lambda net: net(x), split=["blocks.9"])
    refuse("Pass the same batches to every process", lambda net: net(x[: 4 + rank]))
    refuse(r"rows of x \[8, \d+\] depends on other rows.*batch_first=True", lambda net: net(x), Recurrent())
    refuse("Let every process do the same", lambda net: word_loss(net(x), y).backward() if rank else [net(x), net(x)])


def thorough_further_errors_on_every_rank(rank: int, size: int) -> None:
    x, _ = batches_of([8])[0]
    refuse(
        r"no more than 1 layers .*; 0 \(Deciding, .*pipeline_checks.py:\d+\) stays whole: .*torch.export: ",
        lambda net: net(x.float()),
        nn.Sequential(Deciding()),
    )
    refuse("the model was called with an empty batch", lambda net: net(x[:0]))
    refuse(
        r"layer bags failed.*offsets\[-1\].*parts of text \[8\] along the first dimension.*the whole of offsets \[3\]",
        lambda net: net(torch.arange(8), torch.tensor([0, 2, 7])),
        Bags(),
    )
    refuse(
        r"shape \(3, 8, 4\) for 4 examples.*must be the batch.*batch_first=True",
        lambda net: net(torch.randn(8, 8, 4), torch.randn(3, 8, 4)),
        Shifting(),
    )
    refuse(r"copy.deepcopy\(\) does not support a model whose layers", copy.deepcopy)
    refuse("layout sparse_coo.* 8 rows", lambda net: net(torch.eye(8).to_sparse()))


def last_a_raising_stage(rank: int, size: int) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if torch.is_grad_enabled() and x.shape[0] == 2:
                raise RuntimeError("no batches of two")
            return x

    meet_again()
    with Pipeline(stages=2, schedule="1f1b", microbatches=2, split=["2"]) as strategy:
        model = strategy.prepare(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Picky(), nn.Linear(3, 3)))
        model(torch.ones(8, 3)).sum().backward()
        with pytest.raises(StageError) as caught:
            model(torch.ones(4, 3)).sum().backward()
    text = str(caught.value)
    assert "stage 1 (2 to 3, rank 1) failed in 2, microbatch 0, forward: RuntimeError: no batches of two" in text
    assert "pipeline_checks.py" in text

"""Losses of microbatches: the parts add up to the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from paceline.torch.strategies.pipeline.loop.batches import cut_rows
from paceline.torch.strategies.pipeline.loop.losses import PartialLoss
from paceline.torch.strategies.pipeline.loop.output import PendingLoss, PendingOutput

ROWS, PARTS = 7, 3


class Recording:
    """A forward that records its arguments."""

    def __init__(self, output: Tensor) -> None:
        self.rows = ROWS
        self.output = output
        self.trained: list[PartialLoss] = []
        self.factor: Any = None
        self.num_calls = 0

    @property
    def is_forward_done(self) -> bool:
        return False

    def values(self) -> Sequence[Tensor]:
        self.num_calls += 1
        return [self.output]

    def train(self, terms: Sequence[PartialLoss], factor: Any) -> None:
        self.trained, self.factor = list(terms), factor

    def value_of(self, terms: Sequence[PartialLoss]) -> Tensor | None:
        return self.summed() if self.trained else None

    def summed(self) -> Tensor:
        parts = [
            term.part(part, ROWS, PARTS, number) * term.scale
            for term in self.trained
            for number, part in enumerate(cut_rows(self.output, ROWS, PARTS))
        ]
        return torch.stack(parts).sum()


def recorded(output: Tensor) -> tuple[Recording, Any]:
    forward = Recording(output)
    stand_in: Any = forward
    return forward, PendingOutput(stand_in, 0, shape=output.shape, dtype=output.dtype)


LOGITS = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 4, -100, 2, 2, 1, -100])
WORDS = torch.randn(ROWS, 4, 5, generator=torch.Generator().manual_seed(1))
NEXT = torch.arange(ROWS * 4).reshape(ROWS, 4) % 5
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])

LOSSES: list[tuple[Tensor, Callable[[Any], Any]]] = [
    (LOGITS, lambda out: F.cross_entropy(out, CLASSES)),
    (LOGITS, lambda out: F.cross_entropy(out, CLASSES, weight=WEIGHT, label_smoothing=0.1)),
    (LOGITS, lambda out: nn.CrossEntropyLoss(reduction="sum")(out, CLASSES) / 3),
    (LOGITS, lambda out: F.nll_loss(F.log_softmax(out, dim=-1), CLASSES.clamp(min=0))),
    (LOGITS, lambda out: F.cross_entropy(out, torch.softmax(LOGITS.flip(0), -1))),
    (LOGITS, lambda out: nn.MSELoss()(out, LOGITS.flip(0)) * 2 + F.l1_loss(out, LOGITS.flip(0))),
    (LOGITS, lambda out: F.binary_cross_entropy_with_logits(out, torch.ones(ROWS, 5))),
    (WORDS, lambda out: F.cross_entropy(out.view(-1, 5), NEXT.view(-1))),
    (WORDS, lambda out: F.cross_entropy(out.transpose(1, 2), NEXT)),
    (WORDS, lambda out: sum([F.cross_entropy(out.flatten(0, 1), NEXT.flatten()), F.mse_loss(out, WORDS * 2)])),
]


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_the_parts_of_a_loss_add_up_to_the_loss(number: int) -> None:
    output, loss_of = LOSSES[number]
    forward, out = recorded(output)
    loss = loss_of(out)
    assert isinstance(loss, PendingLoss)
    assert loss.requires_grad
    loss.backward()
    assert forward.num_calls == 0
    torch.testing.assert_close(forward.summed(), loss_of(output))
    assert loss.item() == pytest.approx(float(loss_of(output)), rel=1e-5)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: out.mean(),
        lambda out: F.mse_loss(out, LOGITS, reduction="none").mean(),
        lambda out: F.cross_entropy(out, CLASSES.clamp(min=0)) + out.square().mean(),
        lambda out: F.softmax(out, dim=0).sum(),
        lambda out: F.cross_entropy(out.view(ROWS, 5).t(), torch.tensor([1, 2, 3, 4, 0])),
        lambda out: F.l1_loss(out[1:], LOGITS[1:]),
    ],
)
def test_other_losses_are_computed_from_the_values(loss_of: Callable[[Any], Any]) -> None:
    forward, out = recorded(LOGITS)
    torch.testing.assert_close(loss_of(out), loss_of(LOGITS))
    assert forward.num_calls > 0


def test_metadata_are_available_without_a_forward() -> None:
    forward, out = recorded(WORDS)
    assert (out.shape, out.size(0), out.dim(), len(out), out.dtype) == (WORDS.shape, ROWS, 3, ROWS, torch.float32)
    assert out.view(-1, 5).shape == (ROWS * 4, 5)
    assert isinstance(out, torch.Tensor)
    assert forward.num_calls == 0
    assert out.argmax(-1).equal(WORDS.argmax(-1))
    assert forward.num_calls == 1


def test_the_argument_of_backward_scales_the_gradients() -> None:
    forward, out = recorded(LOGITS)
    (F.cross_entropy(out, CLASSES) / 4).backward(torch.tensor(8.0))
    assert float(forward.factor) == 8.0
    assert [term.scale for term in forward.trained] == [0.25]

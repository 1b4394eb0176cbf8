"""Models with the structure of public models: arguments, branches and outputs of their forwards."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WORDS, WIDTH, LONGEST = 11, 8, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        rows, length, width = x.size()
        q, k, v = (
            projection.view(rows, length, 2, width // 2).transpose(1, 2)
            for projection in self.into(x).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).contiguous().view(rows, length, width))


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second_norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = x + self.attention(self.before(x), mask)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class LossWithin(nn.Module):
    """A model like nanoGPT: it checks the length, has optional targets, and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([AttentionBlock()])
        self.last = nn.Linear(WIDTH, WORDS, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, length = x.size()
        assert length <= LONGEST, f"a text of {length} words is too long"
        y = self.words(x) + self.places(torch.arange(length, device=x.device))
        for block in self.blocks:
            y = block(y)
        if targets is None:
            return self.last(y[:, [-1], :]), None
        logits = self.last(y)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Cache:
    """An object with tensors that is no structure for torch."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


@dataclass
class LabelledOutput(OrderedDict[str, Any]):
    """An output like in Hugging Face: a dictionary of all fields except None, with attributes."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return called


class Labelled(nn.Module):
    """A model like in Hugging Face: optional arguments, `**kwargs`, decorator, output class, and a mask from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([AttentionBlock()])
        self.last = nn.Linear(WIDTH, WORDS)

    @decorated
    def forward(
        self, ids: Tensor | None = None, mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> LabelledOutput:
        if ids is None:
            raise ValueError("ids are missing")
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
        if mask is not None:
            seen = seen & mask[:, None, None, :].bool()
        y = self.words(ids) * kwargs.get("scale", 1.0)
        kept = []
        for block in self.blocks:
            y = block(y, seen)
            kept.append(y)
        logits, loss = self.last(y), None
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            loss = F.cross_entropy(logits.reshape(-1, WORDS).float(), shifted.reshape(-1), ignore_index=-100)
        return LabelledOutput(loss=loss, logits=logits, cache=Cache(kept))


class Stateful(nn.Module):
    """An LSTM language model that returns its states, whose batch dimension is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lower = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.upper = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        y, (lower, _) = self.lower(self.words(x), state)
        y, (upper, _) = self.upper(y)
        return self.last(y), {"lower": lower, "upper": upper}

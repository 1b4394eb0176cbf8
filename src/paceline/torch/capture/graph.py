"""The graph of a model's forward for one kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from paceline.torch.capture.calls import OutputForm


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The graph of a forward. Its placeholders are the values of the call, in their order."""

    graph: fx.Graph
    output: OutputForm
    root: nn.Module
    """Holds the modules, parameters and buffers that nodes name. Parameters and buffers are the model's own."""
    whole: dict[str, str] = field(default_factory=dict)
    """By name, why a module is one node: it cannot be traced."""
    check: Callable[[Sequence[Any]], str | None] = lambda _: None
    """Returns why the graph does not hold for these values of a call; None if it does."""
    is_exported: bool = False

"""Deep & Cross Network, version 2: layers that multiply columns' factors with each other, beside a perceptron.

margin = offset + bias + Σ w[k]·x_k + output(crossed, perceptron); both parts use the columns' factors. Source: Wang,
Shivanna, Cheng, Jain, Lin, Hong, Chi, "DCN V2", WWW 2021, the parallel structure of figure 1 with full matrices. The
linear term is not in the paper. It is for features that are too rare to have factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from paceline.errors import UsageError
from paceline.models.deep.base import DeepModel, load_networks
from paceline.models.deep.layers import MAX_LAYERS, Layer

if TYPE_CHECKING:
    from paceline.models.deep.networks import Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepCrossNetwork(DeepModel):
    """P(click) from a weight per feature, and from cross layers and a perceptron over the columns' factors."""

    name: ClassVar[str] = "dcn"
    title: ClassVar[str] = "a deep and cross network"

    usual: ClassVar[Mapping[str, Any]] = {**DeepModel.usual, "factor_l2": 0.05}

    cross_layers: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.cross_layers <= MAX_LAYERS:
            raise UsageError(f"--cross-layers {self.cross_layers}: expected 1 to {MAX_LAYERS}")
        super().__post_init__()

    @property
    @override
    def layers(self) -> tuple[Layer, ...]:
        width, count = self.num_inputs, self.cross_layers
        cross = (Layer(f"dcn cross {number + 1}", number, width, width) for number in range(count))
        hidden = self.hidden_layers(count)
        return *cross, *hidden, Layer("dcn output", count + len(hidden), width + self.hidden[-1], 1)

    @property
    @override
    def network(self) -> Network:
        return partial(load_networks(self.name).dcn, num_cross=self.cross_layers)

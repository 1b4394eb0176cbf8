"""DeepFM: a factorization machine and a perceptron over the same factors.

margin = (margin of :mod:`paceline.models.fm`) + perceptron(factors of the columns). Source: Guo, Tang, Ye, Li, He,
"DeepFM: A factorization-machine based neural network for CTR prediction", IJCAI 2017, equations 1 to 4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from paceline.models.deep.base import DeepModel, load_networks
from paceline.models.deep.layers import Layer

if TYPE_CHECKING:
    from paceline.models.deep.networks import Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepFactorizationMachine(DeepModel):
    """P(click) from a factorization machine and a perceptron over its factors."""

    name: ClassVar[str] = "deepfm"
    title: ClassVar[str] = "DeepFM"

    @property
    @override
    def layers(self) -> tuple[Layer, ...]:
        hidden = self.hidden_layers(0)
        return *hidden, Layer("deepfm output", len(hidden), self.hidden[-1], 1)

    @property
    @override
    def network(self) -> Network:
        network: Network = load_networks(self.name).deepfm
        return network

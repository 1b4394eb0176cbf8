"""The layers of a network as tables: a row per unit, with the unit's weights followed by its bias.

So workers pull and push a network, and servers replicate and save it, like other parameters.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from paceline.errors import UsageError
from paceline.models.base import ModelTable
from paceline.tables.initializers import Uniform
from paceline.tables.rules import UpdateRule
from paceline.tables.spec import MAX_DIM
from paceline.tables.types import Keys

MAX_LAYERS: Final = 16
MAX_UNITS: Final = 1 << 14


class Layer(NamedTuple):
    """A layer of units, each with a weight per input and a bias. `number` is unique in the network."""

    name: str
    number: int
    num_inputs: int
    num_units: int

    @property
    def keys(self) -> Keys:
        """The keys of the rows. No two layers share a key, because a row's initial values depend on its key."""
        return (np.uint64(self.number) << np.uint64(32)) + np.arange(self.num_units, dtype=np.uint64)

    def table(self, update: UpdateRule) -> ModelTable:
        """Return the table of the rows, with the initial values of ``torch.nn.Linear``: uniform within 1/√inputs."""
        bound = 1 / math.sqrt(self.num_inputs)
        initializer = Uniform(low=-bound, high=bound)
        return ModelTable(
            self.name, dim=self.num_inputs + 1, update=update, initializer=initializer, is_by_feature=False
        )


def check_layers(hidden: tuple[int, ...], num_inputs: int) -> None:
    if not 1 <= len(hidden) <= MAX_LAYERS or not all(1 <= units <= MAX_UNITS for units in hidden):
        given = ",".join(map(str, hidden))
        raise UsageError(
            f"--hidden {given}: expected the sizes of 1 to {MAX_LAYERS} layers, each from 1 to {MAX_UNITS:,} units, "
            "as in 128,64"
        )
    if num_inputs + 1 > MAX_DIM:
        raise UsageError(
            f"the columns have {num_inputs:,} factors in total: expected fewer than {MAX_DIM:,}. Use a smaller --dim"
        )


def parse_hidden(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--hidden {text}: expected the number of units of each layer, as in 128,64") from None

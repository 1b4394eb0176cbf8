"""The update rule resilient propagation (Rprop)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from paceline.errors import UsageError
from paceline.tables.rules.base import UpdateRule, rule_kernel
from paceline.tables.settings import check_bounds, check_flags, check_pair

_F0 = np.float32(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rprop(UpdateRule):
    """Resilient propagation (Riedmiller & Braun, 1993), like ``torch.optim.Rprop``.

    `lr` is the size of the first step.
    """

    lr: float
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)
    maximize: bool = False

    code: ClassVar[int] = 12
    counts: ClassVar[Literal["always"]] = "always"

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, math.inf))
        check_pair(self, "etas", 0, math.inf, "from 0")
        check_pair(self, "step_sizes", 0, math.inf, "from 0")
        if not 0 < self.etas[0] < 1 < self.etas[1]:
            raise UsageError(f"Rprop(etas={self.etas!r}): expected one between 0 and 1, and one above 1")
        check_flags(self, "maximize")

    @property
    @override
    def numbers(self) -> tuple[float, ...]:
        """The size of the first step, the factors that decrease and increase a step, and the limits of a step."""
        return (self.lr, *self.etas, *self.step_sizes)

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("prev", "step_size")

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """The state consists of the previous gradient (zero if its sign has changed), and the size of the step."""
        shrink, grow = np.float32(hyper[1]), np.float32(hyper[2])
        least, most = np.float32(hyper[3]), np.float32(hyper[4])
        for j in range(start, stop):
            gradient = sign * grads[at + j - start]
            size = np.float32(hyper[0]) if step == 1.0 else record[2 * dim + j]
            agreement = gradient * record[dim + j]
            if agreement > _F0:
                size *= grow
            elif agreement < _F0:
                size *= shrink
                gradient = _F0
            size = min(max(size, least), most)
            record[dim + j] = gradient
            record[2 * dim + j] = size
            record[j] -= np.sign(gradient) * size

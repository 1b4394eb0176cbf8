"""Adamax."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from typing_extensions import override

from paceline.tables.rules.base import RuleCase, decayed, rule_kernel
from paceline.tables.rules.moments import Moments
from paceline.tables.types import Doubles, Floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adamax(Moments):
    """Adam with the infinity norm (Kingma & Ba, section 7.1), as ``torch.optim.Adamax``."""

    code: ClassVar[int] = 8

    @property
    @override
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    @staticmethod
    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, sign, step):  # type: ignore[no-untyped-def]
        """State: first moment, decayed infinity norm."""
        decay, epsilon = np.float32(hyper[1]), np.float32(hyper[2])
        complement1, beta2 = np.float32(1.0 - hyper[3]), np.float32(hyper[4])
        size = np.float32(hyper[0] / (1.0 - hyper[3] ** step))
        for j in range(start, stop):
            gradient = sign * grads[at + j - start] + decay * record[j]
            moment = record[dim + j] + complement1 * (gradient - record[dim + j])
            norm = max(beta2 * record[2 * dim + j], abs(gradient) + epsilon)
            record[dim + j] = moment
            record[2 * dim + j] = norm
            record[j] -= size * (moment / norm)

    @staticmethod
    @override
    def reference(w: Floats, states: list[Floats], g: Floats, steps: Doubles, hyper: Doubles) -> None:
        (first, norm), g = states, decayed(w, g, hyper)
        first += np.float32(1 - hyper[3]) * (g - first)
        norm[:] = np.maximum(np.float32(hyper[4]) * norm, np.abs(g) + np.float32(hyper[2]))
        w -= (hyper[0] / (1 - hyper[3] ** steps)).astype(np.float32) * (first / norm)

    @classmethod
    @override
    def cases(cls) -> dict[str, RuleCase]:
        return {"": RuleCase(cls(lr=0.01, weight_decay=0.01))}

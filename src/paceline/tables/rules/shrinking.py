"""The step of an L1 penalty: soft thresholding, which is the penalty's proximal operator.

An update rule moves an element by rate · gradient / h, where h depends on the rule. Then it moves the element towards 0
by rate · l1 / h, but not beyond 0. So weights with small gradients are exactly 0. For gradient descent, with h = 1, the
second step is FOBOS (Duchi and Singer, JMLR 2009). For Adagrad it is composite mirror descent (Duchi, Hazan, Singer,
JMLR 2011, section 5.1), and for Adam the proximal step of Yun, Lozano and Yang, NeurIPS 2021.
"""

from __future__ import annotations

import numpy as np

from paceline.tables.rules.base import rule_kernel

_F0 = np.float32(0)


@rule_kernel
def shrunk(value, by):  # type: ignore[no-untyped-def]
    """Return the w that minimizes (w - value)² / 2 + by · |w|. It is NaN if `value` is NaN."""
    return _F0 if abs(value) <= by else value - np.copysign(by, value)

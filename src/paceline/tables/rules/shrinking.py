"""The step of an L1 penalty: soft thresholding, its proximal operator.

A rule that divides the gradient of an element by h, and takes a step of the rate, moves the element nearer to 0 by
rate · l1 / h after that, and to 0 where it is no farther: so weights are exactly 0 where there is little evidence for
them. Of plain gradient descent, where h is 1, that is FOBOS (Duchi and Singer, JMLR 2009); of Adagrad composite mirror
descent (Duchi, Hazan, Singer, JMLR 2011, section 5.1); of Adam the proximal step of Yun, Lozano and Yang, NeurIPS 2021.
"""

from __future__ import annotations

import numpy as np

from paceline.tables.rules.base import rule_kernel
from paceline.tables.types import Floats

_F0 = np.float32(0)


@rule_kernel
def shrunk(value, by):  # type: ignore[no-untyped-def]
    """Return the minimum over w of (w - value)² / 2 + by · |w|; NaN of NaN."""
    return _F0 if abs(value) <= by else value - np.copysign(by, value)


def shrink(w: Floats, by: Floats | np.float32) -> None:
    """Do to each element of `w` as :func:`shrunk` does, in NumPy."""
    w[:] = np.where(np.abs(w) <= by, _F0, w - np.copysign(by, w))

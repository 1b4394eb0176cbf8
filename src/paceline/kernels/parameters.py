"""The layout of a table's parameter array: float64, so that 1 - beta**step is exact.

A rule's hyperparameters come first, then the initializer's two numbers.
"""

from __future__ import annotations

from .jit import inlined

NUM_HYPER = 10
"""The number of a rule's hyperparameters: at most 8 settings, whether the rule ascends, the step count's plane."""
MAXIMIZE, COUNT_PLANE = 8, 9
INITIAL_A, INITIAL_B = 10, 11
NUM_PARAMETERS = 12


@inlined()
def hyper_of(parameters):  # type: ignore[no-untyped-def]
    """Return a rule's hyperparameters as a tuple: the compiler keeps them in registers while rows are written."""
    p = parameters
    return p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9]

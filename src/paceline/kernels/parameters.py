"""The layout of a table's parameter array, which kernels read.

The array contains the hyperparameters of the update rule, then the two numbers of the initializer. Its dtype is
float64, because float32 would be too inexact for 1 - beta**step.
"""

from __future__ import annotations

from .jit import inlined

NUM_HYPER = 10
"""The number of hyperparameters of an update rule in the array: up to 8 settings of the rule, whether the rule
maximizes the objective, and the position of the step count in the rule's state.
"""
MAXIMIZE, COUNT_PLANE = 8, 9
INITIAL_A, INITIAL_B = 10, 11
NUM_PARAMETERS = 12


@inlined()
def hyper_of(parameters):  # type: ignore[no-untyped-def]
    """Return the rule's hyperparameters as a tuple, which the compiler keeps in registers during a loop over rows."""
    p = parameters
    return p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9]

"""What a table's parameter array holds: float64, so that 1 - beta**step is exact.

A rule's hyperparameters come first, then the initializer's two numbers.
"""

from __future__ import annotations

NUM_HYPER = 10
"""Hyperparameters of a rule: at most 8 of its own, whether it ascends, and the plane of its step count."""
MAXIMIZE, COUNT_PLANE = 8, 9
INITIAL_A, INITIAL_B = 10, 11
NUM_PARAMETERS = 12

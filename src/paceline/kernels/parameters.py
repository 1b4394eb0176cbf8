"""What a table's parameter array holds: float64, so that 1 - beta**step is exact.

A rule's hyperparameters come first, then the initializer's two numbers.
"""

from __future__ import annotations

NUM_HYPER = 9
"""Hyperparameters of a rule: at most 7 of its own, whether it ascends, and the plane of its step count."""
MAXIMIZE, COUNT_PLANE = 7, 8
INITIAL_A, INITIAL_B = 9, 10
NUM_PARAMETERS = 11

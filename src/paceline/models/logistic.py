"""Sparse logistic regression: P(click) = 1/(1 + exp(−(bias + Σ w[key]·value))).

The arithmetic of one minibatch; where the weights come from and where gradients go is the caller's. The bias is the
weight of a key of its own, :data:`BIAS_KEY`, which every example has with value 1. Gradients are summed over the
minibatch, not averaged, as is usual for sparse features (McMahan et al., KDD 2013).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.data import Batch
from paceline.kernels.csr import csr_dot, csr_transposed_dot, logistic
from paceline.kernels.dedup import dedup, scratch_size

BIAS_KEY = np.uint64(0x5061_6365_6C69_6E65)
"""«Paceline» in ASCII: a number that no hashed feature is likely to have."""

_ONES = np.empty(0, np.float32)

Floats = npt.NDArray[np.float32]


class Minibatch:
    """A minibatch ready for arithmetic: its distinct keys, the bias' last, and the CSR matrix over them.

    `keys` is uint64 [m + 1]; pull their weights, pass them to :meth:`gradients`.
    """

    __slots__ = ("indices", "indptr", "keys", "labels", "num_examples", "probabilities", "values")

    def __init__(self, batch: Batch, scratch: npt.NDArray[np.int32]) -> None:
        num_nonzeros = len(batch.keys)
        unique = np.empty(num_nonzeros + 1, np.uint64)
        self.indices = np.empty(num_nonzeros, np.int32)
        count = dedup(batch.keys, scratch[: scratch_size(num_nonzeros)], unique, self.indices)
        unique[count] = BIAS_KEY
        self.keys = unique[: count + 1]
        self.indptr = batch.indptr
        self.labels = batch.labels
        self.values = _ONES if batch.values is None else batch.values
        self.num_examples = batch.num_examples
        self.probabilities = np.empty(self.num_examples, np.float32)

    def gradients(self, weights: Floats) -> tuple[Floats, float]:
        """Return the summed gradient (float32 [m + 1]) and the summed log loss, given weights (float32 [m + 1])."""
        residuals = np.empty(self.num_examples, np.float32)
        loss = self._forward(weights, residuals)
        gradient = np.empty(len(self.keys), np.float32)
        csr_transposed_dot(self.indptr, self.indices, self.values, residuals, gradient[:-1])
        gradient[-1] = residuals.sum(dtype=np.float64)
        return gradient, loss

    def predict(self, weights: Floats) -> Floats:
        """Return P(click) of each example (float32 [n])."""
        self._forward(weights, np.empty(self.num_examples, np.float32))
        return self.probabilities

    def _forward(self, weights: Floats, residuals: Floats) -> float:
        margins = np.empty(self.num_examples, np.float32)
        csr_dot(self.indptr, self.indices, self.values, weights, margins)
        margins += weights[-1]
        return float(logistic(margins, self.labels, self.probabilities, residuals))


class Preparation:
    """Makes minibatches, reusing its scratch memory."""

    def __init__(self) -> None:
        self._scratch = np.empty(scratch_size(1 << 14), np.int32)

    def prepare(self, batch: Batch) -> Minibatch:
        """Return the batch ready for arithmetic."""
        size = scratch_size(len(batch.keys))
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.int32)
        return Minibatch(batch, self._scratch)

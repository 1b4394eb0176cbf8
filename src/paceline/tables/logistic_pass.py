"""Train logistic regression with FTRL in one process: one kernel makes a pass over all examples in memory."""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.kernels.jit import njit
from paceline.tables.rules.ftrl import FTRL

ROW_WORDS: Final = 3
"""The number of float32 in a row: the weight, and the numbers z and n of its state (see :class:`FTRL`)."""

_F0 = np.float32(0)
_F1 = np.float32(1)
_update = FTRL.update


@njit(cache=True, nogil=True, error_model="numpy")
def logistic_pass(indptr, ids, values, labels, weights, order, offset, batch_size, hyper, rows, gradients, touched):  # type: ignore[no-untyped-def]
    """Update `rows` with the examples in `order`, one minibatch after another. Gradients are summed over a minibatch.

    The examples are a CSR matrix: `indptr` int64 [n + 1], `ids` int32 [nnz] and `values` float32 [nnz]. `labels` are
    float32 [n], and the examples' `weights` float32 [n]. `values` and `weights` have length 0 if all are 1. `order`
    (int64) has the numbers of the examples to use. `offset` (float64) is added to every margin. `hyper` is
    ``FTRL.hyper``. `rows` is float32 [features + 1, 3], and its last row is the bias. `gradients` (float32 [features +
    1]) and `touched` (uint8 [features + 1]) are scratch memory. It must be zero before the call, and is zero after the
    call.
    """
    ones = len(values) == 0
    bias = len(rows) - 1
    seen = np.empty(bias + 1, np.int64)
    for first in range(0, len(order), batch_size):
        last = min(first + batch_size, len(order))
        num_seen = 0
        total = np.float64(0)
        for at in range(first, last):
            i = order[at]
            margin = offset + rows[bias, 0]
            for k in range(indptr[i], indptr[i + 1]):
                margin += (_F1 if ones else values[k]) * rows[ids[k], 0]
            small = np.exp(-abs(margin))
            p = 1.0 / (1.0 + small) if margin >= 0.0 else small / (1.0 + small)
            residual = np.float32(p - labels[i])
            if len(weights):
                residual *= weights[i]
            total += residual
            for k in range(indptr[i], indptr[i + 1]):
                feature = ids[k]
                if not touched[feature]:
                    touched[feature] = 1
                    seen[num_seen] = feature
                    num_seen += 1
                gradients[feature] += residual if ones else residual * values[k]
        seen[num_seen] = bias
        gradients[bias] = np.float32(total)
        for at in range(num_seen + 1):
            feature = seen[at]
            _update(rows[feature], 1, 0, 1, gradients, feature, hyper, _F1, 1.0)
            gradients[feature] = _F0
            touched[feature] = 0


KERNELS: Final = (logistic_pass,)


def compile_kernels() -> None:
    """Compile the kernel, or load it from Numba's cache."""
    one = np.zeros(1, np.float32)
    logistic_pass(
        np.zeros(2, np.int64), np.zeros(0, np.int32), one, one, one, np.zeros(0, np.int64), 0.0, 1,
        np.array(FTRL().hyper), np.zeros((1, ROW_WORDS), np.float32), one.copy(), np.zeros(1, np.uint8),
    )  # fmt: skip

"""PyTorch's reduce operations in our terms."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from torch.distributed import ReduceOp

from paceline.errors import UsageError

_RED_OP_TYPE: Any = ReduceOp.RedOpType
NAMES: Final[dict[int, str]] = {
    int(_RED_OP_TYPE.SUM): "sum",
    int(_RED_OP_TYPE.AVG): "mean",
    int(_RED_OP_TYPE.PRODUCT): "product",
    int(_RED_OP_TYPE.MIN): "min",
    int(_RED_OP_TYPE.MAX): "max",
    int(_RED_OP_TYPE.BAND): "bitwise_and",
    int(_RED_OP_TYPE.BOR): "bitwise_or",
    int(_RED_OP_TYPE.BXOR): "bitwise_xor",
}
"""By the number of the operation, which is a ReduceOp's hash: the quickest way to it."""


def op_and_factor(op: Any) -> tuple[str, Any]:
    """Return our name of a reduction, and what its input is to be multiplied with (None: nothing)."""
    name = NAMES.get(hash(op))
    if name is not None:
        return name, None
    if op == _RED_OP_TYPE.PREMUL_SUM:
        return "sum", op.__getstate__()[1]
    raise UsageError(
        f"got the reduce operation {op}, expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM"
    )


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    """Return the tensor times a factor, as a new one; itself if there is none."""
    return tensor if factor is None else tensor * factor

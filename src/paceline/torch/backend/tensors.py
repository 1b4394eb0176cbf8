"""Convert tensors for the collectives to supported dtypes and contiguous vectors; convert names of reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from paceline.collectives import Group
from paceline.collectives.arrays import distinct, words
from paceline.errors import UsageError
from paceline.kernels.combine import DTYPES

After: TypeAlias = Callable[[], None]
"""A function to run after a call: it copies the result into the caller's tensors."""

_KNOWN: Final = frozenset(getattr(torch, name) for name in DTYPES)
_SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_tensor(arguments: tuple[Any, ...]) -> Tensor | None:
    """Return the first tensor of a call's first two arguments, which may be lists of lists."""
    for argument in arguments[:2]:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument
    return None


def only(tensors: Sequence[Any]) -> Any:
    """Return the only tensor of a list. PyTorch passes a list because it once supported several devices per process."""
    if len(tensors) != 1:
        raise UsageError(f"got a list of {len(tensors)} tensors, expected one tensor per process")
    return tensors[0]


def rows_of(tensor: Tensor, splits: Sequence[int], size: int, name: str) -> list[int]:
    """Return the number of rows of every rank's part. Raises UsageError for wrong splits, before the call starts."""
    num_rows = tensor.shape[0] if tensor.dim() else 0
    rows = list(splits) or [num_rows // size] * size
    if len(rows) != size or min(rows) < 0 or sum(rows) != num_rows:
        raise UsageError(
            f"got {name} splits {rows} for {num_rows} rows and {size} ranks; pass one per rank, {num_rows} in total"
        )
    return rows


def movable(tensor: Tensor) -> Tensor:
    """Return the tensor or, if its dtype is not supported, a view of its memory with a supported dtype.

    The view is correct for copies, but not for all reductions. A tensor with the conjugate or negative bit is copied,
    because its memory does not contain its values.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype in _KNOWN:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def writable(tensor: Tensor) -> Tensor:
    """Return the result of :func:`movable` for a tensor that receives results.

    Raises UsageError if the tensor's memory cannot be written.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            "cannot write a result to a tensor with the conjugate or negative bit. Pass "
            "tensor.resolve_conj().resolve_neg()"
        )
    tensor = movable(tensor)
    if not tensor.is_contiguous():
        distinct(words(tensor, tensor.element_size()))
    return tensor


def source(tensor: Tensor) -> Tensor:
    """Return the items of a tensor as a contiguous vector, which is a copy if necessary."""
    return movable(tensor).reshape(-1)


def target(tensor: Tensor) -> tuple[Tensor, After | None]:
    """Return a contiguous vector to write to, and a function to call after the write (None: not needed)."""
    tensor = writable(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1), None
    vector = tensor.new_empty(tensor.numel())
    return vector, lambda: _copy(vector, [tensor])


def sources(tensors: Sequence[Tensor]) -> Tensor:
    """Return the items of several tensors as one vector, without a copy if the tensors are adjacent in memory."""
    tensors = [movable(tensor) for tensor in tensors]
    whole = _as_one_vector(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if whole is None else whole


def targets(tensors: Sequence[Tensor]) -> tuple[Tensor, After | None]:
    """Do the same as :func:`target` for the items of several tensors."""
    tensors = [writable(tensor) for tensor in tensors]
    whole = _as_one_vector(tensors)
    if whole is not None:
        return whole, None
    vector = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    return vector, lambda: _copy(vector, tensors)


def sizes(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the number of items of every tensor; None if all are equal."""
    found = counts(tensors)
    return None if len(set(found)) == 1 else found


def counts(tensors: Sequence[Tensor]) -> list[int]:
    return [movable(tensor).numel() for tensor in tensors]


def in_items(rows: list[int] | None, tensor: Tensor, vector: Tensor) -> list[int] | None:
    """Convert numbers of rows of `tensor` to numbers of items of `vector`, which has the tensor's items."""
    if rows is None or not sum(rows):
        return rows
    return [number * (vector.numel() // tensor.shape[0]) for number in rows]


def check_reducible(tensors: Sequence[Tensor], op: str) -> None:
    for tensor in tensors:
        if tensor.dtype not in _KNOWN and not (tensor.is_complex() and op in ("sum", "mean")):
            raise UsageError(
                f"got the reduction {op!r} for a tensor of dtype {tensor.dtype}, expected one of {', '.join(DTYPES)}, "
                "or a complex one with SUM or AVG"
            )


def one_after_another(afters: Sequence[After | None]) -> After | None:
    work = [after for after in afters if after is not None]
    if not work:
        return None

    def run_all() -> None:
        for after in work:
            after()

    return run_all


def _as_one_vector(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one vector for tensors that are adjacent in memory, such as parts of :func:`torch.chunk`, else None."""
    first = tensors[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or tensor.data_ptr() != address
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        address += tensor.numel() * tensor.element_size()
    count = (address - first.data_ptr()) // first.element_size()
    return first.detach().as_strided((count,), (1,))


def _copy(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        # Inference tensors can be written only in inference mode, which this thread does not inherit from the caller.
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(vector[start:end].view(tensor.shape))
        start = end


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
"""Paceline's name of each reduction. The key is the hash of PyTorch's ReduceOp, because this lookup is fastest."""


def reducible(tensor: Tensor, name: str, *, is_target: bool) -> Tensor:
    """Return the tensor; for a sum or mean of complex numbers, return a view of its memory as real numbers."""
    if tensor.is_complex() and name in ("sum", "mean"):
        return writable(tensor) if is_target else movable(tensor)
    return tensor


def with_op(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return options


def sum_sparse(group: Group, tensor: Tensor, op: str) -> None:
    """Sum a sparse COO tensor over all ranks in place, by gathering indices and values. The result is coalesced."""
    if op != "sum":
        raise UsageError(f"got the reduction {op!r} for a sparse tensor, expected SUM")
    if tensor.layout != torch.sparse_coo:
        raise UsageError(f"got a tensor of layout {tensor.layout}, expected a dense one or sparse COO")
    own = tensor.coalesce()
    indices, values = own.indices(), own.values()
    num_dims, num = indices.shape
    is_complex = values.is_complex()
    counts = group.gather_sizes(values)
    all_indices = torch.as_tensor(group.all_gather(indices.t().contiguous(), sizes=counts))
    moved: Any = torch.view_as_real(values) if is_complex else values
    all_values = group.all_gather(moved.contiguous(), sizes=counts)
    if is_complex:
        all_values = torch.view_as_complex(all_values)
    total = torch.sparse_coo_tensor(
        all_indices.view(-1, num_dims).t(), all_values, tensor.shape, dtype=tensor.dtype, check_invariants=False
    )
    assert all_indices.shape[0] == sum(counts) >= num
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def op_and_factor(op: Any) -> tuple[str, Any]:
    """Return Paceline's name of a reduction, and the factor for its input (None without a factor)."""
    name = NAMES.get(hash(op))
    if name is not None:
        return name, None
    if op == _RED_OP_TYPE.PREMUL_SUM:
        return "sum", op.__getstate__()[1]
    raise UsageError(
        f"got the reduce operation {op}, expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM"
    )


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    return tensor if factor is None else tensor * factor

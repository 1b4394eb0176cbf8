"""The collectives of a process group that compute: all-reduce, reduce, reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from paceline.collectives import Group
from paceline.errors import PacelineError, UsageError
from paceline.torch import profiling as _profiling
from paceline.torch.backend import tensors as _tensors
from paceline.torch.backend.base import BaseProcessGroup, on_cpu
from paceline.torch.backend.calls import Step
from paceline.torch.backend.errors import in_torch_terms
from paceline.torch.backend.work import FinishedWork

_ALL_REDUCE: Final = c10d.AllreduceOptions()
_COALESCED: Final = c10d.AllreduceCoalescedOptions()
_REDUCE: Final = c10d.ReduceOptions()
_REDUCE_SCATTER: Final = c10d.ReduceScatterOptions()
_RED_OP_TYPE: Any = ReduceOp.RedOpType
_NAMES: Final[dict[int, str]] = {
    int(_RED_OP_TYPE.SUM): "sum",
    int(_RED_OP_TYPE.AVG): "mean",
    int(_RED_OP_TYPE.PRODUCT): "product",
    int(_RED_OP_TYPE.MIN): "min",
    int(_RED_OP_TYPE.MAX): "max",
    int(_RED_OP_TYPE.BAND): "bitwise_and",
    int(_RED_OP_TYPE.BOR): "bitwise_or",
    int(_RED_OP_TYPE.BXOR): "bitwise_xor",
}
"""By the number of the operation, which is the hash of a ReduceOp: the fastest access."""


class Reducing(BaseProcessGroup):
    """Abstract: see :class:`~paceline.torch.PacelineProcessGroup`."""

    def allreduce(self, tensors: Any, opts: Any = _ALL_REDUCE, timeout: Any = None, *, op: Any = None) -> Work:
        """Reduce a tensor over all ranks, in place."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        tensor = only(tensors)
        if not tensor.is_cpu:
            return self._on_device(tensor, "allreduce", tensors, opts if op is None else op)
        if op is not None or not isinstance(opts, c10d.AllreduceOptions):
            opts = _with_op(opts if op is None else op)
        name = _NAMES.get(hash(opts.reduceOp))
        is_plain = name is not None and tensor.layout is torch.strided and not tensor.is_complex()
        if is_plain and not opts.asyncOp and not _profiling.is_enabled():
            # The fast path of synchronous all-reduces.
            try:
                self._calls.group().all_reduce(tensor, name, out=tensor)  # type: ignore[arg-type]
            except PacelineError as error:
                raise in_torch_terms(error, self._terms) from None
            return FinishedWork(tensors)
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, opts)
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = _COALESCED) -> Work:
        """Reduce each of several tensors over all ranks, in place."""
        if tensors and not tensors[0].is_cpu:
            return self._on_device(tensors[0], "allreduce_coalesced", tensors, opts)
        return self._all_reduce(tensors, opts)

    @on_cpu
    def reduce(self, tensors: Sequence[Tensor], opts: Any = _REDUCE) -> Work:
        """Reduce a tensor into the root's tensor."""
        tensor, root = only(tensors), opts.rootRank
        name, factor = op_and_factor(opts.reduceOp)
        is_root = root == self._group.rank
        reduced = _reducible(tensor, name, is_target=is_root)
        out = reduced if is_root else None
        step = Step("reduce", (_scaled(reduced, factor), name), {"root": root, "out": out})
        return self._calls.run("reduce", [step], tensors, is_async=opts.asyncOp, shown=tensors)

    @on_cpu
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        """Reduce the inputs r of all ranks into rank r's output."""
        given = only(inputs)
        if len(given) != self._group.size:
            raise UsageError(f"got {len(given)} tensors to reduce and scatter, expected one for each rank")
        return self._reduce_scatter("reduce_scatter", outputs, [given], [_tensors.sizes(given)], opts)

    @on_cpu
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _REDUCE_SCATTER) -> Work:
        """Reduce the parts r of all ranks' inputs into rank r's output."""
        return self._reduce_scatter("_reduce_scatter_base", [output], [[input]], [None], opts)

    @on_cpu
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        """As :meth:`reduce_scatter_single`, for several tensors."""
        given = [[tensor] for tensor in inputs]
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, given, [None] * len(given), opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        name, factor = op_and_factor(opts.reduceOp)
        reduced = [_reducible(tensor, name, is_target=True) for tensor in tensors]
        if factor is not None:
            for tensor in reduced:
                tensor.detach().mul_(factor)
        steps = [Step("all_reduce", (tensor, name), {"out": tensor}) for tensor in reduced]
        return self._calls.run("all_reduce", steps, tensors, is_async=opts.asyncOp, shown=tensors)

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        """Reduce a sparse tensor, always synchronously: the sizes depend on all ranks."""
        name, factor = op_and_factor(opts.reduceOp)
        event = _profiling.TracedOperation("sparse_all_reduce", [tensor]) if _profiling.is_enabled() else None
        try:
            if factor is not None:
                tensor.detach().mul_(factor)
            _sum_sparse(self._calls.group(), tensor, name)
        except PacelineError as error:
            raise in_torch_terms(error, self._terms) from None
        finally:
            if event is not None:
                event.end()
        return FinishedWork([tensor])

    def _reduce_scatter(
        self,
        event: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        sizes: Sequence[list[int] | None],
        opts: Any,
    ) -> Work:
        """Reduce each list of inputs, concatenated, into its output."""
        name, factor = op_and_factor(opts.reduceOp)
        steps: list[Step] = []
        afters: list[_tensors.After | None] = []
        shown: list[Tensor] = []
        for output, given, counts in zip(outputs, inputs, sizes, strict=True):
            _tensors.check_reducible(given, name)
            source = _tensors.sources(given)
            shown.append(source)
            out, after = _tensors.target(output)
            steps.append(Step("reduce_scatter", (_scaled(source, factor), name), {"sizes": counts, "out": out}))
            afters.append(after)
        return self._calls.run(
            event, steps, outputs, is_async=opts.asyncOp, shown=shown, after=_tensors.one_after_another(afters)
        )


def only(tensors: Sequence[Any]) -> Any:
    """Return the only tensor of a list; PyTorch's lists are for several devices in one process."""
    if len(tensors) != 1:
        raise UsageError(f"got {len(tensors)} tensors, expected one")
    return tensors[0]


def _reducible(tensor: Tensor, name: str, *, is_target: bool) -> Tensor:
    if tensor.is_complex() and name in ("sum", "mean"):
        return _tensors.writable(tensor) if is_target else _tensors.movable(tensor)
    return tensor


def _with_op(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return options


def _sum_sparse(group: Group, tensor: Tensor, op: str) -> None:
    """Sum a sparse COO tensor of equal shape over all ranks, in place. The result is coalesced.

    Every rank gathers the indices and values of all ranks, and adds the values of equal indices.
    """
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
    """Return Paceline's name of a reduction, and the factor of its input, or None."""
    name = _NAMES.get(hash(op))
    if name is not None:
        return name, None
    if op == _RED_OP_TYPE.PREMUL_SUM:
        return "sum", op.__getstate__()[1]
    raise UsageError(
        f"got the reduce operation {op}, expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM"
    )


def _scaled(tensor: Tensor, factor: Any) -> Tensor:
    """Return a new tensor times the factor; the same tensor for None."""
    return tensor if factor is None else tensor * factor

"""The process group of ``torch.distributed``, over a group of Paceline."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Store, Work

from paceline.collectives import Group
from paceline.errors import PacelineError, UsageError
from paceline.torch.backend import tensors as _tensors
from paceline.torch.backend.calls import Calls, MonitoredBarrier, Step
from paceline.torch.backend.errors import Terms, in_torch_terms
from paceline.torch.backend.work import FinishedWork, MessageWork, TracedOperation, is_profiling, through_host
from paceline.torch.device import DeviceGroups

_ALL_REDUCE: Final = c10d.AllreduceOptions()
_COALESCED: Final = c10d.AllreduceCoalescedOptions()
_REDUCE: Final = c10d.ReduceOptions()
_REDUCE_SCATTER: Final = c10d.ReduceScatterOptions()
_BROADCAST: Final = c10d.BroadcastOptions()
_GATHER: Final = c10d.GatherOptions()
_SCATTER: Final = c10d.ScatterOptions()
_ALL_GATHER: Final = c10d.AllgatherOptions()
_ALL_TO_ALL: Final = c10d.AllToAllOptions()
_BARRIER: Final = c10d.BarrierOptions()
_Method = TypeVar("_Method", bound=Callable[..., Any])
_PATIENCE_S: Final = 1.0
"""The longest time that a shutdown waits for pending asynchronous calls."""


def on_cpu(method: _Method) -> _Method:
    """Decorate a method for tensors on the CPU: pass calls with other tensors to the group of their device."""

    @functools.wraps(method)
    def routed(self: PacelineProcessGroup, *arguments: Any, **options: Any) -> Any:
        tensor = _tensors.first_tensor(arguments)
        if tensor is None or tensor.is_cpu:
            return method(self, *arguments, **options)
        return self._on_device(tensor, method.__name__, *arguments, **options)

    return routed  # type: ignore[return-value]


_AnyProcessGroup: Any = ProcessGroup
"""The base class, without types: mypy would reject methods of the subclass that override overloaded methods."""


class PacelineProcessGroup(_AnyProcessGroup):  # type: ignore[misc]
    """A process group of ``torch.distributed`` that uses a :class:`paceline.collectives.Group`.

    ``init_process_group`` and ``new_group`` create it. The names and arguments of the methods are PyTorch's, because
    ``torch.distributed`` and its C++ code call them. Dense and contiguous tensors on the CPU are not copied. If another
    rank fails, ``wait()`` or the call itself raises an error that is both an error of Paceline and a
    ``torch.distributed.DistBackendError``.
    """

    def __init__(self, store: Store, group: Group, global_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(group.rank, group.size)  # a store here would make C++ ignore these methods
        self._store = store
        self._group = group
        self._terms = Terms(group.timeout, global_ranks)
        self._calls = Calls(group, self._terms)
        self._devices = DeviceGroups(store, group.rank, group.size, group.timeout, group.name)
        self._monitored = MonitoredBarrier(group)
        self._name, self._description = group.name, ""

    @property
    def group(self) -> Group:
        """The group that runs the calls; :meth:`~paceline.collectives.Group.explain` shows the algorithms."""
        return self._group

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        return "paceline"

    name = getBackendName

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        group = None if device.type == "cpu" else self._devices.of_device(device)
        return self if group is None else group._get_backend(device)

    def _on_device(self, tensor: Tensor, method: str, *arguments: Any, **options: Any) -> Work:
        group = self._devices.of_device(tensor.device)
        if group is None:
            return through_host(functools.partial(getattr(self, method), **options), arguments)
        work: Work = getattr(group, method)(*arguments, **options)
        return work

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: this group does not allocate tensors, but uses the caller's memory."""
        return False

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _has_hooks(self) -> bool:
        return False

    def allreduce(self, tensors: Any, opts: Any = _ALL_REDUCE, timeout: Any = None, *, op: Any = None) -> Work:
        """Reduce a tensor over all ranks, in place."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        tensor = _tensors.only(tensors)
        if not tensor.is_cpu:
            return self._on_device(tensor, "allreduce", tensors, opts if op is None else op)
        if op is not None or not isinstance(opts, c10d.AllreduceOptions):
            opts = _tensors.with_op(opts if op is None else op)
        name = _tensors.NAMES.get(hash(opts.reduceOp))
        is_plain = name is not None and tensor.layout is torch.strided and not tensor.is_complex()
        if is_plain and not opts.asyncOp and not is_profiling():
            # Synchronous all-reduces have their own path, which is faster because it creates no Step.
            try:
                self._calls.group().all_reduce(tensor, name, out=tensor)  # type: ignore[arg-type]
            except PacelineError as error:
                raise in_torch_terms(error, self._terms) from None
            return FinishedWork(tensors)
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, opts)
        return self._all_reduce(tensors, opts)

    @on_cpu
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = _COALESCED) -> Work:
        """Reduce each of several tensors over all ranks, in place."""
        return self._all_reduce(tensors, opts)

    @on_cpu
    def reduce(self, tensors: Sequence[Tensor], opts: Any = _REDUCE) -> Work:
        """Reduce a tensor into the root's tensor."""
        tensor, root = _tensors.only(tensors), opts.rootRank
        name, factor = _tensors.op_and_factor(opts.reduceOp)
        is_root = root == self._group.rank
        reduced = _tensors.reducible(tensor, name, is_target=is_root)
        out = reduced if is_root else None
        step = Step("reduce", (_tensors.scaled(reduced, factor), name), {"root": root, "out": out})
        return self._calls.run("reduce", [step], tensors, is_async=opts.asyncOp, shown=tensors)

    @on_cpu
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        """Reduce input r of every rank into the output of rank r."""
        given = self._one_per_rank(_tensors.only(inputs))
        return self._reduce_scatter("reduce_scatter", outputs, [given], [_tensors.sizes(given)], opts)

    @on_cpu
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _REDUCE_SCATTER) -> Work:
        """Reduce part r of every rank's input into the output of rank r."""
        return self._reduce_scatter("_reduce_scatter_base", [output], [[input]], [None], opts)

    @on_cpu
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        """Run :meth:`reduce_scatter_single` for each of several tensors."""
        given = [[tensor] for tensor in inputs]
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, given, [None] * len(given), opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        name, factor = _tensors.op_and_factor(opts.reduceOp)
        reduced = [_tensors.reducible(tensor, name, is_target=True) for tensor in tensors]
        if factor is not None:
            for tensor in reduced:
                tensor.detach().mul_(factor)
        steps = [Step("all_reduce", (tensor, name), {"out": tensor}) for tensor in reduced]
        return self._calls.run("all_reduce", steps, tensors, is_async=opts.asyncOp, shown=tensors)

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        """Reduce a sparse tensor. The call is always synchronous, because the result's size depends on all ranks."""
        name, factor = _tensors.op_and_factor(opts.reduceOp)
        event = TracedOperation("sparse_all_reduce", [tensor]) if is_profiling() else None
        try:
            if factor is not None:
                tensor.detach().mul_(factor)
            _tensors.sum_sparse(self._calls.group(), tensor, name)
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
        """Concatenate each list of inputs, and reduce-scatter it into its output."""
        name, factor = _tensors.op_and_factor(opts.reduceOp)
        steps: list[Step] = []
        afters: list[_tensors.After | None] = []
        shown: list[Tensor] = []
        for output, given, counts in zip(outputs, inputs, sizes, strict=True):
            _tensors.check_reducible(given, name)
            source = _tensors.sources(given)
            shown.append(source)
            out, after = _tensors.target(output)
            steps.append(Step("reduce_scatter", (_tensors.scaled(source, factor), name), {"sizes": counts, "out": out}))
            afters.append(after)
        return self._calls.run(
            event, steps, outputs, is_async=opts.asyncOp, shown=shown, after=_tensors.one_after_another(afters)
        )

    def barrier(self, opts: Any = _BARRIER, timeout: Any = None) -> Work:
        """Wait until every rank has called this method."""
        if self._devices.is_made:
            self._devices.barrier()
        is_async = isinstance(opts, c10d.BarrierOptions) and opts.asyncOp
        return self._calls.run("barrier", [Step("barrier")], [], is_async=is_async)

    @on_cpu
    def broadcast(self, tensors: Any, opts: Any = _BROADCAST, timeout: Any = None) -> Work:
        """Copy the root's tensor into the tensors of the other ranks."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        has_options = isinstance(opts, c10d.BroadcastOptions)
        root, is_async = (opts.rootRank, opts.asyncOp) if has_options else (opts, True)
        tensor = (_tensors.movable if root == self._group.rank else _tensors.writable)(_tensors.only(tensors))
        step = Step("broadcast", (tensor,), {"root": root})
        return self._calls.run("broadcast", [step], tensors, is_async=is_async, shown=tensors)

    @on_cpu
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = _ALL_GATHER) -> Work:
        """Copy rank r's input into output r."""
        step, after = self._gather_into(_tensors.only(outputs), _tensors.only(inputs))
        return self._calls.run("all_gather", [step], outputs[0], is_async=opts.asyncOp, shown=inputs, after=after)

    @on_cpu
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = _ALL_GATHER
    ) -> Work:
        """Copy rank r's input i into output i of list r."""
        found = [
            self._gather_into(targets, given) for targets, given in zip(zip(*outputs, strict=True), inputs, strict=True)
        ]
        value = [tensor for targets in outputs for tensor in targets]
        after = _tensors.one_after_another([after for _, after in found])
        steps = [step for step, _ in found]
        return self._calls.run("all_gather", steps, value, is_async=opts.asyncOp, shown=inputs, after=after)

    @on_cpu
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = _ALL_GATHER) -> Work:
        """Copy rank r's input into part r of the output."""
        return self._all_gather_single("_all_gather_base", [output], [input], opts)

    @on_cpu
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _ALL_GATHER
    ) -> Work:
        """Run :meth:`all_gather_single` for each of several tensors."""
        return self._all_gather_single("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @on_cpu
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = _GATHER) -> Work:
        """Copy rank r's input into output r on the root."""
        source, root = _tensors.source(_tensors.only(inputs)), opts.rootRank
        value: Sequence[Tensor] = []
        out, after = None, None
        if root == self._group.rank:
            value = self._one_per_rank(_tensors.only(outputs))
            out, after = _tensors.targets(value)
        step = Step("gather", (source,), {"root": root, "out": out})
        return self._calls.run("gather", [step], value, is_async=opts.asyncOp, shown=inputs, after=after)

    @on_cpu
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _SCATTER) -> Work:
        """Copy the root's input r into the output of rank r."""
        out, after = _tensors.target(_tensors.only(outputs))
        root, source = opts.rootRank, None
        shown: Sequence[Tensor] = []
        if root == self._group.rank:
            shown = self._one_per_rank(_tensors.only(inputs))
            source = _tensors.sources(shown)
        step = Step("scatter", (source, out), {"root": root})
        return self._calls.run("scatter", [step], outputs, is_async=opts.asyncOp, shown=shown, after=after)

    @on_cpu
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = _ALL_TO_ALL,
    ) -> Work:
        """Send part d of the input to rank d. The splits are numbers of rows; empty splits mean equal parts."""
        is_even = not output_splits and not input_splits
        if is_even and output.numel() != input.numel():
            raise UsageError(
                f"got an output of {output.numel()} items for an input of {input.numel()}: make the sizes equal, or "
                "pass splits"
            )
        receives = None if is_even else _tensors.rows_of(output, output_splits, self._group.size, "output")
        sends = None if is_even else _tensors.rows_of(input, input_splits, self._group.size, "input")
        given, out, after = _tensors.movable(input), _tensors.writable(output), None
        if input.shape[1:] != output.shape[1:]:  # the tensors' rows differ in size, so count items
            given, (out, after) = _tensors.source(input), _tensors.target(output)
            sends, receives = _tensors.in_items(sends, input, given), _tensors.in_items(receives, output, out)
        step = Step("all_to_all", (given,), {"send_sizes": sends, "receive_sizes": receives, "out": out})
        return self._calls.run("all_to_all", [step], [output], is_async=opts.asyncOp, shown=[input], after=after)

    alltoall_base = all_to_all_single

    @on_cpu
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _ALL_TO_ALL) -> Work:
        """Send input d to rank d, and receive rank d's input into output d."""
        inputs, outputs = self._one_per_rank(inputs), self._one_per_rank(outputs)
        out, after = _tensors.targets(outputs)
        sizes = {"send_sizes": _tensors.counts(inputs), "receive_sizes": _tensors.counts(outputs)}
        step = Step("all_to_all", (_tensors.sources(inputs),), {"out": out, **sizes})
        return self._calls.run("all_to_all", [step], outputs, is_async=opts.asyncOp, shown=inputs, after=after)

    @on_cpu
    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Work:
        """Send a tensor to a rank."""
        return self._message("send", "send_async", _tensors.movable, tensors, to, tag)

    @on_cpu
    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        return self._message("recv", "recv_async", _tensors.writable, tensors, source, tag)

    @on_cpu
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from any rank."""
        return self._message("recvAnySource", "recv_async", _tensors.writable, tensors, None, tag)

    def _message(
        self,
        event: str,
        method: str,
        convert: Callable[[Tensor], Tensor],
        tensors: Sequence[Tensor],
        other: int | None,
        tag: int,
    ) -> Work:
        recorded = TracedOperation(event, tensors) if is_profiling() else None
        try:
            ticket = getattr(self._group, method)(convert(_tensors.only(tensors)), other, tag=tag)
        except PacelineError as error:
            raise in_torch_terms(error, self._terms) from None
        return MessageWork(ticket, tensors, self._terms, recorded)

    def _gather_into(self, targets: Sequence[Tensor], given: Tensor) -> tuple[Step, _tensors.After | None]:
        out, after = _tensors.targets(self._one_per_rank(targets))
        return Step("all_gather", (_tensors.source(given),), {"sizes": _tensors.sizes(targets), "out": out}), after

    def _all_gather_single(self, event: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Work:
        steps: list[Step] = []
        afters: list[_tensors.After | None] = []
        for output, given in zip(outputs, inputs, strict=True):
            out, after = _tensors.target(output)
            steps.append(Step("all_gather", (_tensors.source(given),), {"out": out}))
            afters.append(after)
        return self._calls.run(
            event, steps, outputs, is_async=opts.asyncOp, shown=inputs, after=_tensors.one_after_another(afters)
        )

    def _one_per_rank(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(tensors) != self._group.size:
            raise UsageError(f"got {len(tensors)} tensors, expected one for each of the {self._group.size} ranks")
        return tensors

    def shutdown(self) -> None:
        """Leave the group after its pending calls. The next call of other ranks fails. Idempotent."""
        self._devices.close(abort=False)
        self._end(_PATIENCE_S)

    def abort(self) -> None:
        """Leave the group at once; pending calls fail on all ranks. Idempotent."""
        self._devices.close(abort=True)
        self._end(0.0)

    def _end(self, patience_s: float) -> None:
        group = self._group
        deadline = time.monotonic() + patience_s
        while group.num_pending and time.monotonic() < deadline:
            time.sleep(0.001)
        if group.num_pending:
            group.abort()
        self._calls.close()
        group.close()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has called this method. On rank 0 the error names the missing ranks."""
        self._monitored.wait(self._group.timeout if timeout is None else timeout, wait_all_ranks=wait_all_ranks)

"""The collectives of a process group that only move data, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from paceline.errors import PacelineError, UsageError
from paceline.torch import profiling as _profiling
from paceline.torch.backend import tensors as _tensors
from paceline.torch.backend.base import BaseProcessGroup, on_cpu
from paceline.torch.backend.calls import Step
from paceline.torch.backend.errors import in_torch_terms
from paceline.torch.backend.reducing import only
from paceline.torch.backend.work import MessageWork

_BROADCAST: Final = c10d.BroadcastOptions()
_GATHER: Final = c10d.GatherOptions()
_SCATTER: Final = c10d.ScatterOptions()
_ALL_GATHER: Final = c10d.AllgatherOptions()
_ALL_TO_ALL: Final = c10d.AllToAllOptions()
_BARRIER: Final = c10d.BarrierOptions()


class Moving(BaseProcessGroup):
    """Abstract: see :class:`~paceline.torch.PacelineProcessGroup`."""

    def barrier(self, opts: Any = _BARRIER, timeout: Any = None) -> Work:
        """Return when every rank has called it."""
        if self._devices.is_made:
            self._devices.barrier()
        is_async = isinstance(opts, c10d.BarrierOptions) and opts.asyncOp
        return self._calls.run("barrier", [Step("barrier")], [], is_async=is_async)

    @on_cpu
    def broadcast(self, tensors: Any, opts: Any = _BROADCAST, timeout: Any = None) -> Work:
        """Fill a tensor with the root's."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        has_options = isinstance(opts, c10d.BroadcastOptions)
        root, is_async = (opts.rootRank, opts.asyncOp) if has_options else (opts, True)
        tensor = (_tensors.movable if root == self._group.rank else _tensors.writable)(only(tensors))
        step = Step("broadcast", (tensor,), {"root": root})
        return self._calls.run("broadcast", [step], tensors, is_async=is_async, shown=tensors)

    @on_cpu
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = _ALL_GATHER) -> Work:
        """Fill output r with rank r's input."""
        step, after = self._gather_into(only(outputs), only(inputs))
        return self._calls.run("all_gather", [step], outputs[0], is_async=opts.asyncOp, shown=inputs, after=after)

    @on_cpu
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = _ALL_GATHER
    ) -> Work:
        """Fill output i of list r with rank r's input i."""
        found = [
            self._gather_into(targets, given) for targets, given in zip(zip(*outputs, strict=True), inputs, strict=True)
        ]
        value = [tensor for targets in outputs for tensor in targets]
        after = _tensors.one_after_another([after for _, after in found])
        steps = [step for step, _ in found]
        return self._calls.run("all_gather", steps, value, is_async=opts.asyncOp, shown=inputs, after=after)

    @on_cpu
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = _ALL_GATHER) -> Work:
        """Fill part r of the output with rank r's input."""
        return self._all_gather_single("_all_gather_base", [output], [input], opts)

    @on_cpu
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _ALL_GATHER
    ) -> Work:
        """As :meth:`all_gather_single`, for several tensors."""
        return self._all_gather_single("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @on_cpu
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = _GATHER) -> Work:
        """Fill the root's output r with rank r's input."""
        source, root = _tensors.source(only(inputs)), opts.rootRank
        value: Sequence[Tensor] = []
        out, after = None, None
        if root == self._group.rank:
            value = self._one_per_rank(only(outputs))
            out, after = _tensors.targets(value)
        step = Step("gather", (source,), {"root": root, "out": out})
        return self._calls.run("gather", [step], value, is_async=opts.asyncOp, shown=inputs, after=after)

    @on_cpu
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _SCATTER) -> Work:
        """Fill rank r's output with the root's input r."""
        out, after = _tensors.target(only(outputs))
        root, source = opts.rootRank, None
        shown: Sequence[Tensor] = []
        if root == self._group.rank:
            shown = self._one_per_rank(only(inputs))
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
        """Send part d of the input to rank d; the splits are rows, empty for equal parts."""
        is_even = not output_splits and not input_splits
        if is_even and output.numel() != input.numel():
            raise UsageError(
                f"got an output of {output.numel()} items for an input of {input.numel()}, expected as many, or splits"
            )
        receives = None if is_even else self._rows(output, output_splits, "output")
        sends = None if is_even else self._rows(input, input_splits, "input")
        given, out, after = _tensors.movable(input), _tensors.writable(output), None
        if input.shape[1:] != output.shape[1:]:  # allowed if the numbers of items are equal
            given, (out, after) = _tensors.source(input), _tensors.target(output)
            sends, receives = _tensors.in_items(sends, input, given), _tensors.in_items(receives, output, out)
        step = Step("all_to_all", (given,), {"send_sizes": sends, "receive_sizes": receives, "out": out})
        return self._calls.run("all_to_all", [step], [output], is_async=opts.asyncOp, shown=[input], after=after)

    alltoall_base = all_to_all_single

    @on_cpu
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _ALL_TO_ALL) -> Work:
        """Send input d to rank d."""
        inputs, outputs = self._one_per_rank(inputs), self._one_per_rank(outputs)
        out, after = _tensors.targets(outputs)
        sizes = {"send_sizes": _tensors.counts(inputs), "receive_sizes": _tensors.counts(outputs)}
        step = Step("all_to_all", (_tensors.sources(inputs),), {"out": out, **sizes})
        return self._calls.run("all_to_all", [step], outputs, is_async=opts.asyncOp, shown=inputs, after=after)

    # messages

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

    # parts

    def _message(
        self,
        event: str,
        method: str,
        convert: Callable[[Tensor], Tensor],
        tensors: Sequence[Tensor],
        other: int | None,
        tag: int,
    ) -> Work:
        recorded = _profiling.TracedOperation(event, tensors) if _profiling.is_enabled() else None
        try:
            ticket = getattr(self._group, method)(convert(only(tensors)), other, tag=tag)
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

    def _rows(self, tensor: Tensor, splits: Sequence[int], name: str) -> list[int]:
        """Return the rows of every rank's part. An error during the call would end the group, so check before it."""
        num_rows, size = tensor.shape[0] if tensor.dim() else 0, self._group.size
        rows = list(splits) or [num_rows // size] * size
        if len(rows) != size or min(rows) < 0 or sum(rows) != num_rows:
            raise UsageError(
                f"got {name} splits {rows} for {num_rows} rows and {size} ranks; they must add up to the rows"
            )
        return rows

"""Compute a model as replicas in threads of one process: split the batch, join outputs and gradients.

Every forward creates new replicas, so that changes of the model (mode, hooks, frozen parameters) apply to all replicas.

On the CPU, autograd computes a graph in one thread. So each replica has a graph of its own, inside one
``autograd.Function``. The function's backward runs all replicas' backwards at the same time, and adds their gradients
in the order of the replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.errors import UsageError
from paceline.torch.device_threads import DeviceThreads
from paceline.torch.strategies.replicas.modules import ReplacedForward, ReplicaModule
from paceline.torch.strategies.splitting import check_outputs, gather, num_rows, scatter, shares_of, split


class ReplicaValues(ABC):
    """Abstract: provides parameters to replicas. Each strategy with replicas has its own subclass."""

    @abstractmethod
    def is_shared(self, replica: int) -> bool:
        """Return whether a replica computes with the model's own parameters, because it is on their device."""

    @abstractmethod
    def fetch(self, replica: int, parameter: nn.Parameter) -> torch.Tensor:
        """Return the values of `parameter` on a replica's device, detached from autograd."""


class Replicas:
    """Replaces a model's forward by a computation on several devices, without other changes of the model.

    The model's hooks receive the complete batch. Hooks of submodules receive a replica's part. Compiled submodules run
    uncompiled, because compiled code uses the model's own parameters. Tensors in the arguments are split along
    dimension 0 by ``torch.chunk``, and outputs are joined on the first device. A number, such as a loss, becomes its
    mean over the examples. After a forward, the model has the buffers and attributes of replica 0. Replicas on the CPU
    draw from one random generator, in the order of their calls. Second derivatives are not supported.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], values: ReplicaValues) -> None:
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise UsageError("a TorchScript module cannot be replicated: prepare() the module that it was made from")
        if any(type(part).__name__ == "OptimizedModule" for part in module.modules()):
            raise UsageError(
                "the result of torch.compile() cannot be replicated, because it computes with its own parameters: "
                "prepare() the model first, then compile it"
            )
        self.module = module
        self.devices = tuple(devices)
        self._values = values
        self._threads = DeviceThreads(self.devices, "replica")
        self._replaced = ReplacedForward(module, self.forward)
        # A recurrent or attention layer may have time steps in dimension 0, so check the outputs of the first batch.
        self._was_compared = not any(getattr(part, "batch_first", None) is False for part in module.modules())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the complete batch. An exception names the replica and its device."""
        leaves, structure = tree_flatten((args, kwargs))
        parts = split(leaves, len(self.devices))
        if len(parts) == 1 and self._values.is_shared(0):
            output, structure = tree_flatten(self._replaced.compute(*args, **kwargs))
            check_outputs([output], [num_rows(parts[0])])
            return tree_unflatten(output, structure)
        if not self._was_compared and self._values.is_shared(0):
            self._was_compared = True
            self._compare_parts(parts, structure, args, kwargs)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not torch.is_grad_enabled() or not (trained or inputs):
            return _run_apart(self, parts, structure)
        run = _Pass(self, trained, leaves)
        return run.restore(_Replicated.apply(run, parts, structure, *trained, *inputs))  # type: ignore[no-untyped-call]

    def _compare_parts(self, parts: list[list[Any]], structure: Any, args: Any, kwargs: Any) -> None:
        """Raise UsageError if the output for a batch differs from the outputs for its parts, in evaluation mode."""
        cuda = {device.index for device in self.devices if device.type == "cuda"}
        before = [(part, dict(vars(part))) for part in self.module.modules()]
        state = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.module.eval()
        try:
            with torch.random.fork_rng(cuda), torch.no_grad():
                expected = tree_flatten(self._replaced.compute(*args, **kwargs))[0]
                found = tree_flatten(_run_apart(self, parts, structure))[0]
        finally:
            for part, attributes in before:  # restore each module's mode, and remove attributes set by the forward
                vars(part).clear()
                vars(part).update(attributes)
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    buffer.copy_(state[name])
        for one, other in zip(expected, found, strict=True):
            if not isinstance(one, torch.Tensor) or not one.is_floating_point():
                continue
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True):
                raise UsageError(
                    "the model's result for a batch differs from the results for its parts: replicas split every "
                    "tensor along its first dimension, which must be the batch; use batch_first=True, or another "
                    "strategy (all-reduce)"
                )

    def close(self) -> None:
        self._replaced.release()
        self._threads.close()


class _Pass:
    """One forward of all replicas, and the data for its backward. Without trained parameters, there is no backward."""

    def __init__(self, owner: Replicas, trained: Sequence[nn.Parameter], leaves: Sequence[Any]) -> None:
        self._owner = owner
        self._trained = trained
        self._sources = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self._inputs = [leaves[i] for i in self._sources]
        self._starts: list[list[torch.Tensor | None]] = []
        """The leaves of each replica's graph: first the trained parameters, then the inputs that need gradients."""
        self._ends: list[Sequence[torch.Tensor]] = []
        """Each replica's parts of the output tensors, connected to the replica's graph."""
        self._shares: list[float] = []
        self._output: list[Any] = []
        self._output_structure: Any = None

    def forward(self, parts: list[list[Any]], structure: Any) -> tuple[torch.Tensor, ...]:
        owner = self._owner
        count = len(parts)
        with torch.inference_mode(False), torch.no_grad():
            replicas = [self._make(replica) for replica in range(count)]
            replicas[0].watch()

        def compute(replica: int) -> tuple[list[Any], Any]:
            device = owner.devices[replica]
            part = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in parts[replica]]
            starts: list[torch.Tensor] = []
            for i in self._sources:
                part[i] = part[i].detach().requires_grad_()
                starts.append(part[i])
            self._starts[replica] += starts
            args, kwargs = tree_unflatten(part, structure)
            # call forward directly, because the model's hooks receive the complete batch
            return tree_flatten(replicas[replica].module.forward(*args, **kwargs))

        self._starts = [[replica.parameters.get(id(parameter)) for parameter in self._trained] for replica in replicas]
        outputs = owner._threads.run(compute, count, grad=bool(self._trained or self._sources))
        with torch.no_grad():
            replicas[0].keep_state()
        self._output, self._output_structure = outputs[0]
        if any(one != self._output_structure for _, one in outputs):
            raise UsageError("the replicas' outputs differ in structure: return the same from each forward")
        sizes = [num_rows(part) for part in parts]
        check_outputs([output for output, _ in outputs], sizes)
        self._shares = shares_of(sizes)
        self._ends = [
            column
            for column in zip(*(output for output, _ in outputs), strict=True)
            if isinstance(column[0], torch.Tensor)
        ]
        device = owner.devices[0]
        return tuple(gather([tensor.detach() for tensor in column], device, self._shares) for column in self._ends)

    @property
    def is_differentiable(self) -> list[bool]:
        return [any(tensor.requires_grad for tensor in column) for column in self._ends]

    def restore(self, joined: Sequence[torch.Tensor]) -> Any:
        tensors = iter(joined)
        leaves = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._output]
        self._output = []
        return tree_unflatten(leaves, self._output_structure)

    def backward(self, gradients: Sequence[torch.Tensor | None], *, keep_graph: bool) -> list[torch.Tensor | None]:
        """Return the gradients of the trained parameters and the inputs, given the gradients of the output tensors."""
        if not self._starts:
            raise UsageError(
                "backward() was called twice through the same output of the model: pass retain_graph=True in the first "
                "call, or call the model again"
            )
        owner, starts, count = self._owner, self._starts, len(self._starts)
        ends: list[list[torch.Tensor]] = [[] for _ in range(count)]
        ends_gradients: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for column, gradient in zip(self._ends, gradients, strict=True):
            if gradient is None:
                continue
            for replica, part in enumerate(scatter(gradient, column, self._shares)):
                if column[replica].requires_grad:
                    ends[replica].append(column[replica])
                    ends_gradients[replica].append(part)
        if not keep_graph:
            self._starts, self._ends = [], []
        if all(device.type == "cpu" for device in owner.devices):

            def walk(replica: int) -> None:
                if ends[replica]:
                    torch.autograd.backward(ends[replica], ends_gradients[replica], retain_graph=keep_graph)

            owner._threads.run(walk, count)
        else:
            # This may be autograd's thread for an accelerator, so waiting for other threads could be a deadlock.
            # Autograd itself uses one thread per accelerator.
            torch.autograd.backward(
                [end for one in ends for end in one],
                [gradient for one in ends_gradients for gradient in one],
                retain_graph=keep_graph,
            )
        columns = [[_take_gradient(start) for start in column] for column in zip(*starts, strict=True)]
        num_trained = len(self._trained)
        sums = [_sum(column, p.device) for column, p in zip(columns[:num_trained], self._trained, strict=True)]
        for number, tensor in enumerate(self._inputs, start=num_trained):
            sums.append(_join(columns[number], tensor, [start[number] for start in starts]))
        return sums

    def _make(self, replica: int) -> ReplicaModule:
        owner = self._owner
        values = {id(p): owner._values.fetch(replica, p) for p in owner.module.parameters()}
        shares_buffers = replica == 0 and owner._values.is_shared(0)
        return ReplicaModule(owner._replaced, values, owner.devices[replica], shares_buffers=shares_buffers)


class _Replicated(torch.autograd.Function):
    """The node that contains the replicas' graphs in the program's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, run: _Pass, parts: list[list[Any]], structure: Any, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the joined outputs. Backward returns a gradient for each of `tensors`.

        `tensors` are the trained parameters, then the inputs that require gradients.
        """
        ctx.run = run
        ctx.set_materialize_grads(False)
        joined = run.forward(parts, structure)
        ctx.mark_non_differentiable(
            *(tensor for tensor, has in zip(joined, run.is_differentiable, strict=True) if not has)
        )
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "backward(create_graph=True) was called through replicas of the model, which have no second "
                "derivatives: leave create_graph out, or use the strategy one-device"
            )
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, None, None, *ctx.run.backward(gradients, keep_graph=keep_graph))


def _run_apart(owner: Replicas, parts: list[list[Any]], structure: Any) -> Any:
    run = _Pass(owner, [], [])
    return run.restore(run.forward(parts, structure))


def _take_gradient(start: torch.Tensor | None) -> torch.Tensor | None:
    if start is None:
        return None
    gradient, start.grad = start.grad, None
    return gradient


def _sum(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """Return the sum of the gradients that are not None, in order. The sum may use the memory of the first gradient."""
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.to(device)
            total = gradient if total is None else total.add_(gradient)
    return total


def _join(
    gradients: Sequence[torch.Tensor | None], tensor: torch.Tensor, starts: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """Return the gradient of a split input, given the gradients of its parts `starts`."""
    if all(gradient is None for gradient in gradients):
        return None
    if not tensor.dim():
        return _sum(gradients, tensor.device)
    parts = [
        torch.zeros_like(start) if gradient is None else gradient
        for gradient, start in zip(gradients, starts, strict=True)
        if start is not None
    ]
    return gather(parts, tensor.device)

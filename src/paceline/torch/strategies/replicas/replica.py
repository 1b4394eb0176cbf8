"""A subclass of DistributedDataParallel for the strategies, with the attributes of the wrapped model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.torch.strategies.ranks import Ranks
from paceline.torch.strategies.reached import Reached, mean_of_closure


class Replica(DistributedDataParallel):
    """DistributedDataParallel that also has the model's attributes. Without gradients, one rank may call it alone."""

    def __init__(self, module: nn.Module, *, reached: Reached | None = None, **options: Any) -> None:
        super().__init__(module, **options)
        self._options = options
        self._reached = reached
        self._prepared = {name: parameter for name, parameter in module.named_parameters() if parameter.numel()}
        self._trained = self._find_trained()
        if reached is not None:
            reached.watch(self._trained)

    def _find_trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._prepared.values() if parameter.requires_grad]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **options)
        if self._reached is not None:
            trained = self._find_trained()
            if len(trained) != len(self._trained) or any(map(operator.is_not, trained, self._trained)):
                self._wrap_again()
            self._reached.forward(syncs=bool(self.require_backward_grad_sync))
        try:
            return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            text = describe_unused(torch.distributed.get_rank(), list(without_gradient(self.module)))
        raise UsageError(text)

    def will_sync_module_buffers(self) -> bool:
        """Return whether a forward first copies rank 0's buffers: not in evaluation, which one rank may run alone."""
        return self.module.training and bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def _wrap_again(self) -> None:
        """Wrap the model again after the set of trained parameters has changed. All ranks must do this together."""
        syncs, hooks = self.require_backward_grad_sync, self._comm_hooks
        module, reached, options, prepared = self.module, self._reached, self._options, self._prepared
        DistributedDataParallel.__init__(self, module, **options, init_sync=False)
        self.require_backward_grad_sync = syncs
        for hook, state in hooks:
            self.register_comm_hook(state, hook)
        self._options, self._reached, self._prepared = options, reached, prepared
        self._trained = self._find_trained()
        assert reached is not None
        reached.watch(self._trained)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module")
            if module is None:
                raise
            return getattr(module, name)

    def state_dict(self, *values: Any, **options: Any) -> Any:
        return self.module.state_dict(*values, **options)

    def load_state_dict(self, *values: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*values, **options)

    def named_parameters(self, *values: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.named_parameters(*values, **options)

    def named_buffers(self, *values: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_buffers(*values, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        model: nn.Module = copy.deepcopy(self.module, memo)
        return model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle only the model, so that a program without this package can load it."""
        return copy.copy, (self.module,)


def without_gradient(model: nn.Module) -> Iterator[str]:
    """Yield the names of trained parameters without a gradient, except embeddings' anchors."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None and parameter.numel():
            yield name


def check_steps(
    optimizer: Optimizer, optimizers: list[Optimizer], watched: list[Reached], ranks: Ranks, *, may_be_unused: bool
) -> None:
    """Make ``optimizer.step()`` raise UsageError if this rank lacks a gradient for which other ranks wait.

    `optimizers` has all optimizers, `watched` one object for each model. Before the error, the ranks' group is closed,
    so that other ranks stop waiting. If the step has a closure, it returns the mean loss over all ranks.
    """

    def check(_: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        closure = options.get("closure", args[1] if args[1:] else None)
        if closure is not None:
            assert ranks.group is not None
            return args[:1], {**options, "closure": mean_of_closure(ranks.group, closure)}
        own = parameters_of(optimizer)
        foreign = {
            parameter for other in optimizers if other is not optimizer for parameter in parameters_of(other)
        } - own
        for reached in watched:
            if own.isdisjoint(reached.prepared.values()):
                continue
            reached.check(own)
            reached.warn_of_non_finite()
            for parameter in [] if may_be_unused else reached.prepared.values():
                if parameter in foreign or not parameter.requires_grad:
                    continue
                if parameter.grad is None and not reached.has_reached(parameter):
                    ranks.close()
                    raise_for_replaced(reached.model, reached.prepared, ranks.rank)
                    raise UsageError(describe_unused(ranks.rank, list(without_gradient(reached.model))))
        return None

    def stepped(*_: Any) -> None:
        for reached in watched:
            reached.stepped(parameters_of(optimizer))

    optimizer.register_step_pre_hook(check)
    optimizer.register_step_post_hook(stepped)


def parameters_of(optimizer: Optimizer) -> set[nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def raise_for_replaced(model: nn.Module, prepared: Mapping[str, nn.Parameter], rank: int) -> None:
    current = dict(model.named_parameters())
    for name, parameter in prepared.items():
        if name in current and current[name] is not parameter:
            raise UsageError(
                f"rank {rank}: parameter {name!r} was replaced after prepare(), but the optimizer still has the old "
                "one: replace it before prepare(), or write into the parameter (weight.copy_(...))"
            )


def describe_unused(rank: int, names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    parameters = f"the parameters {shown}" if names else "some parameters of the model"
    return (
        f"rank {rank}: {parameters} got no gradient from this backward pass, but the other ranks wait for a gradient: "
        "leave these parameters out of the model (or requires_grad_(False)), or choose "
        "AllReduce(find_unused_parameters=True)"
    )

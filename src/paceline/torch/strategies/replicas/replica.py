"""DistributedDataParallel as the strategies use it: one rank's copy of the model, told from the outside by little."""

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
    """DistributedDataParallel that looks like the model it wraps: attributes and state dict are the model's.

    Without gradients (evaluation) the model is called alone: a rank may do so as often as it likes. A ``requires_grad``
    that the program changes counts from the next forward on.
    """

    def __init__(self, module: nn.Module, *, reached: Reached | None = None, **options: Any) -> None:
        super().__init__(module, **options)
        self._options = options
        self._reached = reached
        self._prepared = {name: each for name, each in module.named_parameters() if each.numel()}
        self._trained = self._find_trained()
        if reached is not None:
            reached.watch(self._trained)

    def _find_trained(self) -> list[nn.Parameter]:
        return [each for each in self._prepared.values() if each.requires_grad]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model; what gradients come of it are averaged."""
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
        """Return whether a forward begins with rank 0's buffers: in evaluation ranks may call the model alone."""
        return self.module.training and bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def _wrap_again(self) -> None:
        """Have other parameters averaged than before; every rank does so at once."""
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
        """Return the model's own state."""
        return self.module.state_dict(*values, **options)

    def load_state_dict(self, *values: Any, **options: Any) -> Any:
        """Load the model's own state."""
        return self.module.load_state_dict(*values, **options)

    def named_parameters(self, *values: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's own parameters, by the names of its state."""
        yield from self.module.named_parameters(*values, **options)

    def named_buffers(self, *values: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's own buffers, by the names of its state."""
        yield from self.module.named_buffers(*values, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the model alone. The copy is not averaged."""
        model: nn.Module = copy.deepcopy(self.module, memo)
        return model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model alone, so that a program without this package can load it."""
        return copy.copy, (self.module,)


def without_gradient(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that should have got a gradient and have none; anchors of embeddings aside."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None and parameter.numel():
            yield name


def check_steps(
    optimizer: Optimizer, optimizers: list[Optimizer], watched: list[Reached], ranks: Ranks, *, may_be_unused: bool
) -> None:
    """Have every ``optimizer.step()`` raise UsageError if gradients are missing that reduction waits for.

    `optimizers` are all, of which each answers for its own parameters, and `watched` the models of all. The ranks'
    group is closed before: the other ranks, which do wait, learn by it that this one will not come. A closure returns
    the mean loss of all ranks.
    """

    def check(_: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        closure = options.get("closure", args[1] if args[1:] else None)
        if closure is not None:
            assert ranks.group is not None
            return args[:1], {**options, "closure": mean_of_closure(ranks.group, closure)}
        own = parameters_of(optimizer)
        others = {each for other in optimizers if other is not optimizer for each in parameters_of(other)} - own
        for reached in watched:
            if own.isdisjoint(reached.prepared.values()):
                continue
            reached.check(own)
            reached.warn_of_non_finite()
            for parameter in [] if may_be_unused else reached.prepared.values():
                if parameter in others or not parameter.requires_grad:
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
    """Return all parameters of an optimizer."""
    return {each for group in optimizer.param_groups for each in group["params"]}


def raise_for_replaced(model: nn.Module, prepared: Mapping[str, nn.Parameter], rank: int) -> None:
    """Raise UsageError if the model has another parameter now under one of the names of those that were `prepared`."""
    now = dict(model.named_parameters())
    for name, parameter in prepared.items():
        if name in now and now[name] is not parameter:
            raise UsageError(
                f"rank {rank}: parameter {name!r} was replaced by another one after prepare(), and the optimizer still "
                "has the first: make such changes before, or write into the parameter (weight.copy_(...))"
            )


def describe_unused(rank: int, names: list[str]) -> str:
    """Say which parameters had no part in a rank's loss."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    which = f"the parameters {shown}" if names else "some parameters"
    return (
        f"rank {rank}: {which} got no gradient from this backward pass, and the other ranks wait for it: leave them "
        "out of the model (or requires_grad_(False)), or choose AllReduce(find_unused_parameters=True)"
    )

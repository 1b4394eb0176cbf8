"""The strategy ``sharded``: each process has a part of every parameter, its gradient and its optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from typing_extensions import override

from paceline.environment import Timeout, environment, timedelta_of
from paceline.meeting.rendezvous import find_rank
from paceline.strategies import ShardingOptions, choose_sharding
from paceline.torch.strategies.all_reduce import broadcast_values
from paceline.torch.strategies.base import Strategy, state_of
from paceline.torch.strategies.devices import choose_device
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks
from paceline.torch.strategies.sharded.calls import as_shard, compute_complete, refuse_copies
from paceline.torch.strategies.sharded.parameters import (
    as_complete,
    check_optimizers,
    check_parameters,
    clip_shards,
    replace,
    retire,
    shard_state,
    shard_values,
    share_buffers,
    without_views,
)
from paceline.torch.strategies.sharded.unfinished import Unfinished
from paceline.torch.strategies.sharded.units import choose_units, shard_dimension


class Sharded(Strategy):
    """Fully sharded data parallelism over PyTorch's ``fully_shard`` (FSDP2).

    Each process has 1/n of every parameter, of its gradient and of the optimizer's state. The parameters of a *unit* (a
    block of the model) are gathered before the unit's forward and again before its backward, and freed after each pass.
    After a backward, each process receives its part of the averaged gradients. The result is as under ``all-reduce``.

    - `units`: names of the modules that are units, with ``*`` for any one part of a name (``blocks.*``); default:
      ``paceline run --shard``, else :func:`~paceline.torch.strategies.sharded.units.choose_units`.
    - `data_parallel`: number of groups of processes. The shards of a group are one complete model. The groups average
      their gradients.
    - `timeout`: time to wait for a rank.

    Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; Zhao
    et al., "PyTorch FSDP", VLDB 2023.

    Raises UsageError for options that contradict the number of processes.
    """

    name: ClassVar[str] = "sharded"
    fills_in_parts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        units: Sequence[str] | None = None,
        data_parallel: int | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        settings = environment()
        known = ShardingOptions.of_environment(settings)
        if units is None and known is not None:
            units = known.units
        if data_parallel is None and known is not None:
            data_parallel = known.data_parallel
        num_ranks = dist.get_world_size() if dist.is_initialized() else find_rank(settings)[1]
        self.options = choose_sharding(",".join(units or ()) or None, data_parallel, num_ranks)
        chosen = choose_device(device, settings.local_rank or 0)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        super().__init__(Ranks.meet(timedelta_of(timeout), backend="paceline"), device=chosen, seed=seed)
        self.units: list[str] = []
        """The names of the model's units. :meth:`prepare` sets them."""
        self._group: Any = None
        """The process group of the ranks with the shards of one model; None on a single rank."""

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        if self.embedder is not None:
            self.embedder.step_with(optimizers)
        assert self.module is not None
        for model in models:
            check_parameters(model)
        check_optimizers(optimizers, self.module)
        inner = [getattr(model, "_orig_mod", model) for model in models]  # without torch.compile's wrapper
        units = [choose_units(model, self.options.units) for model in inner]
        self.units = [*self.units, *(name for names in units for name in names)]
        if self.world_size == 1:
            if self.deferred is not None:
                self.deferred.fill()
            return models, optimizers
        shards: dict[int, nn.Parameter] = {}
        before: list[nn.Parameter] = []  # keep them alive, so that their ids stay unique
        for model, names in zip(inner, units, strict=True):
            complete = dict(model.named_parameters())
            before += complete.values()
            broadcast_values(model)
            self._shard(model, names)
            current = dict(model.named_parameters())
            shards |= {id(parameter): current[name] for name, parameter in complete.items()}
        own: list[Any] = [*optimizers]
        for optimizer in own:
            replace(optimizer, shards)
            optimizer.register_load_state_dict_pre_hook(shard_state)
        return models, optimizers

    def _shard(self, model: nn.Module, units: Sequence[str]) -> None:
        shards, side_by_side = self.options.shards, self.options.data_parallel
        names = ("data", "shard") if side_by_side > 1 else ("shard",)
        shape = (side_by_side, shards) if side_by_side > 1 else (shards,)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        self._group = mesh.get_group("shard")
        compute_complete(mesh, self)
        replicated = [parameter for parameter in model.parameters() if shard_dimension(parameter.shape, shards) is None]

        def place(parameter: nn.Parameter) -> Shard:
            return Shard(shard_dimension(parameter.shape, shards) or 0)

        for name in (*units, ""):
            unit = model.get_submodule(name)
            unit.register_forward_hook(without_views)
            complete = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
            if self.deferred is not None:
                needed = {id(parameter) for parameter in complete}
                self.deferred.fill(lambda tensor, needed=needed: id(tensor) in needed)  # type: ignore[misc]
            for parameter in complete:
                parameter.data = parameter.data.contiguous()
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=True,  # a step would not update gathered parameters
                shard_placement_fn=place,
                ignored_params=set(replicated),
            )
            sharded: Any = type(unit)
            sharded.__deepcopy__ = sharded.__reduce_ex__ = refuse_copies
            retire(parameter for parameter in complete if all(parameter is not other for other in replicated))
        numbers: list[Any] = [
            parameter for parameter in replicated if parameter.numel() and parameter.is_floating_point()
        ]
        for parameter in numbers:
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._average)
            parameter.requires_grad_(is_trained)
        Unfinished.watch(model)
        model.register_forward_pre_hook(self._meet_forward)
        modules: list[Any] = [*model.modules()]
        for module in modules:
            if module._parameters:
                module.register_load_state_dict_pre_hook(shard_values)
        if any(True for _ in model.buffers()):
            model.register_forward_pre_hook(share_buffers)

    @torch.no_grad()
    def _average(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(self.reduce(parameter.grad))

    def _meet_forward(self, called: nn.Module, _: Any) -> None:
        """Raise UsageError if not all ranks call the model, for example if only rank 0 evaluates it."""
        if torch._C._current_graph_task_id() == -1:  # otherwise backward repeats a checkpointed forward
            models = [getattr(model, "_orig_mod", model) for model in self.models]  # without torch.compile's wrapper
            number = next(number for number, other in enumerate(models) if other is called)
            how = "train" if called.training and torch.is_grad_enabled() else "evaluate"
            self._ranks.exchange_as(f"calls model {number} to {how} it", None)

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context without effect, because a rank has no memory for complete gradients. In it, every backward
        averages the gradients and adds them to the shards. The result is the same.
        """
        return contextlib.nullcontext()

    @override
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self._group is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        assert self.module is not None
        return clip_shards(self.module.parameters(), max_norm, norm_type, self._group)

    @override
    def gather_values(self) -> dict[str, Tensor]:
        """Return the complete parameters and persistent buffers by name, on rank 0. Every rank must call this."""
        # If only one rank saves, this exchange raises an error that names the rank.
        self._ranks.exchange_as("gathers the model's values, as save() does", None)
        values = {name: as_complete(value, keep=self.is_main) for name, value in super().gather_values().items()}
        return values if self.is_main else {}

    @override
    def _scatter_values(self, values: Mapping[str, Tensor]) -> None:
        assert self.module is not None
        own = state_of(self.module)
        super()._scatter_values({name: as_shard(value, own[name]) for name, value in values.items()})

    @override
    def gather_optimizer_state(self, number: int = 0) -> dict[int, dict[str, Any]]:
        """Return the complete optimizer state by parameter number on rank 0. Every rank must call this method."""
        return {
            position: {key: as_complete(value, keep=self.is_main) for key, value in entries.items()}
            for position, entries in super().gather_optimizer_state(number).items()
        }

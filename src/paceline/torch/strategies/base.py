"""What every strategy is: the way one training loop is spread over devices, processes and servers."""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.closing import Closing
from paceline.errors import UsageError
from paceline.torch.embeddings import Embedder, RowTables, find_embeddings
from paceline.torch.strategies.deferred import DeferredValues
from paceline.torch.strategies.loaders import Loader
from paceline.torch.strategies.ranks import Ranks


class Strategy(Closing, ABC):
    """How a training loop is spread. The loop itself never changes::

        strategy = paceline.torch.strategy()
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        strategy.save("model/")

    Abstract: a subclass says in :meth:`_spread` how the model and the optimizer are spread, and overrides the hooks
    that differ for it. `seed` decides how data are shuffled; give every rank the same one. A strategy may be used as a
    context manager, and is closed by :meth:`close` or when the process ends.
    """

    name: ClassVar[str]
    """As ``paceline run --strategy`` spells it."""
    shards_data: ClassVar[bool] = True
    """Whether each rank gets its own part of the data."""
    fills_in_parts: ClassVar[bool] = False
    """Whether a model without memory gets only the values that this rank keeps."""
    takes_sparse: ClassVar[bool] = False
    """Whether parameters and buffers may have another layout than a dense one."""
    takes_uneven: bool = False
    """Whether ranks may have unequal numbers of batches in an epoch."""

    def __init__(self, ranks: Ranks, *, device: torch.device | str | None = None, seed: int = 0) -> None:
        self._ranks = ranks
        self.seed = seed
        self.device = choose_device(device, ranks.local_rank)
        self.storage = self.device
        """Where the model's variables live: elsewhere than on the device only if a strategy says so."""
        self.module: nn.Module | None = None
        """The prepared model, not wrapped; several: a ``ModuleList`` of them, in the order of :meth:`prepare`."""
        self.optimizers: list[Optimizer] = []
        """The prepared optimizers, as they were given."""
        self.schedulers: list[Any] = []
        self.deferred: DeferredValues | None = None
        """What gives values to modules of the last models that were built without memory; None if there are none."""
        self.embedder: Embedder | None = None
        """What serves the models' embeddings; None if they have none."""
        self._step_guard: Any = None
        """The handle of the hook that refuses steps within backward, where the strategy needs one."""

    # Who we are.

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self._ranks.rank

    @property
    def local_rank(self) -> int:
        """This process's number among those of its host."""
        return self._ranks.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train."""
        return self._ranks.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def data_place(self) -> tuple[int, int]:
        """Which part of the data this process reads, and of how many."""
        return self.rank, self.world_size

    @property
    def optimizer(self) -> Optimizer | None:
        """The first prepared optimizer, as it was given."""
        return self.optimizers[0] if self.optimizers else None

    # Getting ready.

    def prepare(
        self,
        *given: Any,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        loader: Any = None,
        scheduler: Any = None,
    ) -> Any:
        """Return models, optimizers, loaders and schedulers, in the given order, ready for this strategy.

        One object alone is returned alone, and None is left out. It may be called for each model of several (a GAN's,
        a teacher and a student), or once for all of them; an optimizer comes with its models or after them.

        A model is moved to the strategy's device, and every rank starts from rank 0's values and buffers. What was
        built under ``torch.device("meta")`` gets its values from ``reset_parameters`` of its modules. `loader` is
        a ``torch.utils.data.DataLoader``: each rank gets its part, of a map dataset reshuffled in every epoch
        (see :class:`~paceline.torch.strategies.loaders.Loader`); its batch size is per rank. `scheduler` is a
        learning-rate scheduler of an optimizer. Loaders for evaluation are prepared by :meth:`prepare_loader`.

        Raises UsageError, on every rank, for models or loaders that differ between ranks, for a loader of length 0, and
        for an optimizer that the strategy has no rule for.
        """
        parts = [each for each in (*given, model, optimizer, loader, scheduler) if each is not None]
        models = [each for each in parts if isinstance(each, nn.Module)]
        optimizers = [each for each in parts if isinstance(each, Optimizer)]
        if not models and (self.module is None or not parts):
            raise UsageError(f"prepare({', '.join(type(each).__name__ for each in parts)}): expected a torch.nn.Module")
        prepared: list[Any] = [*models, *optimizers]
        spread: list[Any] = [*prepared]
        if models:
            self._meet_models(models, optimizers)
        if prepared:
            self.optimizers += optimizers
            new_models, new_optimizers = self._spread(models, optimizers)
            spread = [*new_models, *new_optimizers]
        ready = {id(one): other for one, other in zip(prepared, spread, strict=True)}
        for each in parts:
            if id(each) not in ready and each is not loader and hasattr(each, "step") and hasattr(each, "state_dict"):
                self.schedulers.append(each)
                ready[id(each)] = each
        for each in parts:
            if id(each) not in ready:
                ready[id(each)] = self.prepare_loader(each, prefetch=True)
        found = [ready[id(each)] for each in parts]
        return found[0] if len(found) == 1 else tuple(found)

    def _meet_models(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Check that `models` are the same on every rank, move them, and give their embeddings tables."""
        joined = as_one(models)
        lazy = [name for name, each in joined.named_parameters() if nn.parameter.is_lazy(each)]
        if lazy:
            raise UsageError(
                f"prepare(): parameter {lazy[0]!r} of a lazy module has no shape yet: call the model once on a batch "
                "before prepare(), and make the optimizer after that"
            )
        self._ranks.agree(_signature(joined), _describe_difference)
        if not self.takes_sparse:
            check_dense(joined, f"strategy {self.name}: ")
        self.deferred = DeferredValues.of(joined, self._ranks.exchange(torch.initial_seed())[0])
        if self.deferred is not None and not self.fills_in_parts:
            self.deferred.fill()
        joined.to(self.storage)
        if self.deferred is None:
            give_own_memory(joined)
        before = self.models
        self.module = as_one([*before, *models])
        for number, model in enumerate(models, len(before)):
            prefix = f"models[{number}]." if number else ""
            embeddings = {prefix + name: each for name, each in find_embeddings(model).items()}
            if embeddings:
                self.embedder = self.embedder or Embedder(self._row_tables())
                self.embedder.serve(embeddings, optimizers)

    @property
    def models(self) -> list[nn.Module]:
        """The prepared models, not wrapped."""
        if self.module is None:
            return []
        return list(self.module) if isinstance(self.module, _Models) else [self.module]

    def prepare_loader(self, loader: Any, *, shard: bool = True, prefetch: bool = False) -> Loader:
        """Return a loader that yields this rank's part of the data, on the strategy's device.

        With ``shard=False`` every rank gets all of it. `prefetch` is for the training loader: the rows that embeddings
        will need are fetched one batch ahead.
        """
        return Loader(loader, self, shard=shard and self.shards_data, trains=prefetch)

    @abstractmethod
    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        """Return what the loop is to use for new models, which are on the device, and new optimizers."""

    @abstractmethod
    def _row_tables(self) -> RowTables:
        """Return where the rows of embeddings live."""

    # In the loop.

    def accumulate(self, is_last: bool = False) -> AbstractContextManager[None]:
        """Return a context in which ``backward()`` only adds to the gradients: nothing is sent, ``step()`` comes later.

        ``with strategy.accumulate(is_last=(i + 1) % 4 == 0):`` around forward and backward sends with every fourth.
        """
        return contextlib.nullcontext() if is_last else self.no_sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which ``backward()`` only adds to this rank's gradients."""
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients as ``torch.nn.utils.clip_grad_norm_``, of the whole batch of all ranks; return their norm.

        Call it between ``backward()`` and ``optimizer.step()``. Embeddings' rows are not clipped.
        """
        assert self.module is not None, "prepare() comes first"
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def epoch(self, num_batches: int | None) -> AbstractContextManager[None]:
        """Return a context that the training loader's iteration runs in; `num_batches` is this rank's, if known."""
        return contextlib.nullcontext()

    def _ran_out(self) -> None:
        """Know that the training loader has ended by itself; :meth:`epoch` is still open."""

    # Together.

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Return `value` over all ranks, on each: a number, a tensor, or a dictionary of them (for metrics).

        `op` is ``mean``, ``sum``, ``min`` or ``max``. Numbers come back as float, tensors as tensors of their kind.
        """
        if op not in ("mean", "sum", "min", "max"):
            raise UsageError(f"reduce(op={op!r}): expected mean, sum, min or max")
        if isinstance(value, Mapping):
            return {key: self.reduce(value[key], op) for key in sorted(value)}
        if isinstance(value, torch.Tensor):
            if self._ranks.group is None:
                return value.clone()
            wide = value.detach().to("cpu", torch.float64, copy=True)
            return self._ranks.group.all_reduce(wide, op).to(value.device, value.dtype)
        if self._ranks.group is None:
            return float(value)
        return float(self._ranks.group.all_reduce(torch.tensor(float(value), dtype=torch.float64), op))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._ranks.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print at once, on rank 0 only; `options` are those of the built-in `print`."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    # Keeping.

    def save(self, directory: str | os.PathLike[str], **extra: Any) -> None:
        """Write a checkpoint; every rank calls it, rank 0 writes, all wait. Loads under any strategy and world size.

        It has the model, the optimizer's and the scheduler's state, the embeddings' tables, and `extra` (what JSON can
        hold: the epoch, for instance). A checkpoint that was there is replaced, whole or not at all.
        """
        from paceline.torch.strategies.checkpoints import save

        save(self, directory, extra)

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a checkpoint that any strategy has saved, and return its `extra`; every rank calls it after `prepare`.

        Raises ModelError for one that is missing, damaged, or of another model.
        """
        from paceline.torch.strategies.checkpoints import load

        return load(self, directory)

    def gather_optimizer_state(self, number: int = 0) -> dict[int, dict[str, Any]]:
        """Return the state of optimizer `number`, by the parameter's number; every rank calls it, rank 0's counts."""
        state: dict[int, dict[str, Any]] = self.optimizers[number].state_dict()["state"]
        return state

    def _scatter_optimizer_state(self, state: dict[int, dict[str, Any]], number: int = 0) -> None:
        """Take an optimizer state as :meth:`gather_optimizer_state` returns it; every rank has it."""
        optimizer = self.optimizers[number]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def gather_values(self) -> dict[str, torch.Tensor]:
        """Return the current parameters and persistent buffers by name, whole, on rank 0; every rank calls it.

        The module on rank 0 holds them then, too; under ``sharded`` it holds its shards.
        """
        assert self.module is not None, "prepare() comes first"
        return state_of(self.module)

    def _scatter_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take whole values by name, which are the same on every rank, for the model's; every rank calls it."""
        assert self.module is not None
        own = state_of(self.module)
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)

    # The end.

    def close(self) -> None:
        """Leave the other ranks and the servers. Idempotent."""
        if self._step_guard is not None:
            self._step_guard.remove()
        if self.embedder is not None:
            self.embedder.close()
        self._ranks.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"


class _Models(nn.ModuleList):
    """Several models that one strategy trains."""


def as_one(models: list[nn.Module]) -> nn.Module:
    """Return a model that has the parameters of `models`: it alone if it is one."""
    return models[0] if len(models) == 1 else _Models(models)


def choose_device(wanted: torch.device | str | None, local_rank: int) -> torch.device:
    """Return the device of a rank: the one wanted, else the CUDA device of its number, else the CPU.

    Raises UsageError for CUDA where there is none.
    """
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        return torch.device("cuda", local_rank % num_cuda) if num_cuda else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"local rank {local_rank}: device={wanted!r}: {error}") from None
    if device.type != "cuda":
        return device
    if not num_cuda:
        raise UsageError(
            f"local rank {local_rank}: device={str(wanted)!r} was asked for, and there is no CUDA device here: leave "
            "it out"
        )
    device = torch.device("cuda", local_rank % num_cuda) if device.index is None else device
    if device.index >= num_cuda:
        raise UsageError(
            f"local rank {local_rank}: device={str(wanted)!r} was asked for, and there are {num_cuda} CUDA devices here"
        )
    return device


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; embeddings' anchors, which hold nothing, aside."""
    state = module.state_dict(keep_vars=True).items()
    return {name: each.detach() for name, each in state if isinstance(each, torch.Tensor) and each.numel()}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are trained, embeddings' anchors (which hold nothing) aside."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            yield name, parameter


def give_own_memory(model: nn.Module) -> None:
    """Give each parameter and buffer the strides of its shape, and an expanded one memory.

    Torch refuses to copy into others, as ranks do that share values.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.layout is not torch.strided:
            continue
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        elif tensor.is_contiguous() and tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
            tensor.data = tensor.data.view(-1).view(tensor.shape)


def check_dense(model: nn.Module, told_by: str) -> None:
    """Raise UsageError if the model has a parameter or a buffer that is not dense; `told_by` begins the sentence."""
    kinds = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    for kind, (name, tensor) in ((kind, each) for kind, named in kinds for each in named):
        if tensor.layout is torch.strided:
            continue
        instead = "make its values the parameter, and the tensor of them in forward"
        if kind == "buffer":
            instead = f"keep it as a plain attribute that is the same on every rank (self.{name.split('.')[-1]} = ...)"
        raise UsageError(
            f"{told_by}{kind} {name!r} is a tensor of layout {str(tensor.layout).removeprefix('torch.')}, and only "
            f"dense ones are shared and saved: make it dense (to_dense()), or {instead}"
        )


def _signature(model: nn.Module) -> list[list[Any]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    described = [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors]
    rows = [
        [name, [each.dim], f"rows of {each.initializer}, seed={each.seed}, update={each.update}"]
        for name, each in find_embeddings(model).items()
    ]
    return described + rows


def _describe_difference(rank: int, theirs: list[list[Any]], first: list[list[Any]]) -> str:
    def show(found: list[list[Any]], position: int) -> str:
        if position >= len(found):
            return "nothing"
        name, shape, dtype = found[position]
        return f"{name!r} ({dtype} {shape})"

    position = next((i for i, (a, b) in enumerate(zip(theirs, first, strict=False)) if a != b), None)
    position = min(len(theirs), len(first)) if position is None else position
    return (
        f"rank {rank} has another model than rank 0: {show(theirs, position)} where rank 0 has "
        f"{show(first, position)}; build the same model on every rank"
    )


def warn(text: str) -> None:
    """Say something to the user on standard error, once, where no exception is due."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)

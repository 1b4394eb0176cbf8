"""The base of all strategies: one training loop on several devices, processes and servers."""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.closing import Closing
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.observe import recording
from paceline.observe.notebooks import NotebookTable
from paceline.torch.embeddings import Embedder, ReplicatedTables, RowTables, find_embeddings
from paceline.torch.strategies.agreement import (
    describe_optimizers,
    describe_other_model,
    describe_other_optimizer,
    signature_of,
)
from paceline.torch.strategies.deferred import DeferredValues
from paceline.torch.strategies.devices import choose_device
from paceline.torch.strategies.loaders import Loader
from paceline.torch.strategies.ranks import ElasticEvents, Ranks
from paceline.torch.strategies.registered import RegisteredStates
from paceline.torch.strategies.snapshots import Snapshots

if TYPE_CHECKING:
    from paceline.observe.kubeflow import KubeflowStatus
    from paceline.torch.strategies.measuring.profiling import StepProfiler
    from paceline.torch.strategies.step_phases import StepPhases


class Strategy(Closing, NotebookTable, ElasticEvents, ABC):
    """Distribute a training loop. The loop itself never changes::

        strategy = paceline.torch.strategy()
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        strategy.save("checkpoint/")

    Abstract: a subclass distributes the model and the optimizer in :meth:`_spread`, and overrides other methods where
    necessary. `seed` determines how data is shuffled; pass the same seed on every rank. Use the strategy as a context
    manager, or call :meth:`close`; otherwise the strategy is closed when the process ends.
    """

    name: ClassVar[str]
    """The name for ``paceline run --strategy``."""
    shards_data: ClassVar[bool] = True
    """Whether each rank reads only a part of the data."""
    fills_in_parts: ClassVar[bool] = False
    """Whether each rank initializes only its own parameters of a model that was built on the meta device."""
    takes_sparse: ClassVar[bool] = False
    """Whether parameters and buffers may be sparse."""
    takes_uneven: bool = False
    """Whether ranks may have different numbers of batches in an epoch."""

    def __init__(self, ranks: Ranks, *, device: torch.device | str | None = None, seed: int = 0) -> None:
        self._ranks = ranks
        self.seed = seed
        self.device = choose_device(device, ranks.local_rank)
        self.storage = self.device
        """The device of the model's parameters and buffers. Under some strategies it is not :attr:`device`."""
        self.module: nn.Module | None = None
        """The prepared model without wrappers; several models as a ``ModuleList``, in the order of :meth:`prepare`."""
        self.optimizers: list[Optimizer] = []
        """The optimizers that the program passed to :meth:`prepare`."""
        self.schedulers: list[Any] = []
        self.loaders: list[Loader] = []
        """The prepared loaders, whose positions checkpoints contain."""
        self.registered = RegisteredStates()
        """The objects of :meth:`register_state`."""
        self.snapshots: Snapshots | None = None
        """Saves the training at regular times; None without ``snapshot_dir`` of :func:`paceline.torch.strategy`."""
        self.profiler: StepProfiler | None = None
        """Measures the steps of the program and then ends it; None without ``PACELINE_PROFILE``."""
        self.status: KubeflowStatus | None = None
        """Sends the main rank's progress to Kubeflow; None outside of a Kubeflow TrainJob."""
        self.phases: StepPhases | None = None
        """Records the phases of the training loop; None if the launcher collects no metrics."""
        recorder = recording.start(environment())
        if recorder is not None:
            from paceline.torch.strategies.step_phases import StepPhases

            self.phases = StepPhases(recorder, self._is_exchange)
        self.deferred: DeferredValues | None = None
        """Initializes those modules of the last prepared models that were built on the meta device; or None."""
        self.embedder: Embedder | None = None
        """Connects the models' embeddings with their tables; None without embeddings."""
        self._step_guard: Any = None
        """Handle of the hook that rejects optimizer steps within backward; None for strategies without the hook."""

    @property
    def rank(self) -> int:
        """Number of this process among all processes."""
        return self._ranks.rank

    @property
    def local_rank(self) -> int:
        """Number of this process among the processes of its host."""
        return self._ranks.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._ranks.size

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes: rank 0, except while the loop repeats the epochs before a snapshot.

        While ``paceline explain`` or ``paceline compare`` measures the program, no rank prints and writes.
        """
        is_repeating = self.snapshots is not None and self.snapshots.is_repeating
        return self.rank == 0 and not is_repeating and self.profiler is None

    @property
    def data_place(self) -> tuple[int, int]:
        """The number of the part of the data that this process reads, and the number of parts."""
        return self.rank, self.world_size

    @property
    def optimizer(self) -> Optimizer | None:
        """The first optimizer that the program passed to :meth:`prepare`."""
        return self.optimizers[0] if self.optimizers else None

    def prepare(
        self,
        *given: Any,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        loader: Any = None,
        scheduler: Any = None,
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers for this strategy, and return them in the given order.

        A single object is returned without a tuple, and None is left out. For several models (a GAN, a teacher and a
        student), call this method once, or once per model. Pass each optimizer with its models or after them.

        A model is moved to the strategy's device, and every rank starts from rank 0's values and buffers. Modules built
        under ``torch.device("meta")`` get their values from ``reset_parameters``. `loader` is a
        ``torch.utils.data.DataLoader``. Each rank gets its part of the data, reshuffled in every epoch if the loader
        shuffles (:class:`~paceline.torch.strategies.loaders.Loader`). The loader's batch size is per rank. `scheduler`
        is a learning-rate scheduler of an optimizer. Prepare loaders for evaluation by :meth:`prepare_loader`.

        Raises UsageError on every rank for models or loaders that differ between ranks, for a loader of length 0, and
        for an optimizer that the strategy does not support.
        """
        parts = [part for part in (*given, model, optimizer, loader, scheduler) if part is not None]
        models = [part for part in parts if isinstance(part, nn.Module)]
        optimizers = [part for part in parts if isinstance(part, Optimizer)]
        if not models and (self.module is None or not parts):
            raise UsageError(f"prepare({', '.join(type(part).__name__ for part in parts)}): expected a torch.nn.Module")
        prepared: list[Any] = [*models, *optimizers]
        spread: list[Any] = [*prepared]
        if models:
            self._meet_models(models, optimizers)
        if prepared:
            self._ranks.agree(describe_optimizers(optimizers), describe_other_optimizer)
            self.optimizers += optimizers
            new_models, new_optimizers = self._spread(models, optimizers)
            spread = [*new_models, *new_optimizers]
            if self.phases is not None:
                self.phases.watch(new_optimizers, self._ranks.group)
        ready = {id(one): other for one, other in zip(prepared, spread, strict=True)}
        for part in parts:
            if id(part) not in ready and part is not loader and hasattr(part, "step") and hasattr(part, "state_dict"):
                self.schedulers.append(part)
                ready[id(part)] = part
        for part in parts:
            if id(part) not in ready:
                ready[id(part)] = loader = self.prepare_loader(part, prefetch=True)
                self.loaders.append(loader)
        found = [ready[id(part)] for part in parts]
        return found[0] if len(found) == 1 else tuple(found)

    def _meet_models(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Check that all ranks have the same `models`, move the models, and create their embeddings' tables."""
        joined = as_one(models)
        lazy = [name for name, parameter in joined.named_parameters() if nn.parameter.is_lazy(parameter)]
        if lazy:
            raise UsageError(
                f"prepare(): parameter {lazy[0]!r} of a lazy module has no shape yet: call the model on a batch before "
                "prepare(), and create the optimizer after that call"
            )
        self._ranks.agree(signature_of(joined), describe_other_model)
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
            embeddings = {prefix + name: embedding for name, embedding in find_embeddings(model).items()}
            if embeddings:
                self.embedder = self.embedder or Embedder(self._row_tables())
                self.embedder.serve(embeddings, optimizers)

    @property
    def models(self) -> list[nn.Module]:
        """The prepared models without wrappers."""
        if self.module is None:
            return []
        return list(self.module) if isinstance(self.module, _Models) else [self.module]

    def register_state(self, name: str, state: Any) -> None:
        """Include an object's state in checkpoints, and in the state that new ranks of an elastic training receive.

        `state` is a ``torch.Generator``, or has ``state_dict()`` and ``load_state_dict()``: for example an average of
        the model, or your own counters. The state dict may contain tensors, arrays, numbers, text, lists, tuples and
        dictionaries. Rank 0's state is stored, and every rank receives it. Call this method on every rank, before
        :meth:`load` and before the training loop. A checkpoint without this name does not change the object.

        Raises UsageError for a name that is in use, and for an object or state that cannot be stored.
        """
        self.registered.add(name, state)

    def prepare_loader(self, loader: Any, *, shard: bool = True, prefetch: bool = False) -> Loader:
        """Return a loader that yields this rank's part of the data, on the strategy's device.

        With ``shard=False`` every rank gets all data. With `prefetch`, the loader requests the next batch's rows of
        embeddings in advance. Use it for the training loader only.
        """
        return Loader(loader, self, shard=shard and self.shards_data, trains=prefetch)

    @abstractmethod
    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        """Distribute models, which are already on the device, and optimizers. Return those for the training loop."""

    def _is_exchange(self) -> bool:
        """Return whether the ranks exchange gradients after each ``backward()``, for which all ranks wait."""
        return False

    def _row_tables(self) -> RowTables:
        """Return the store of the embeddings' rows."""
        return ReplicatedTables(self._ranks.group)

    def transferred_state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that a new rank receives from rank 0, by name."""
        return {} if self.module is None else state_of(self.module)

    def accumulate(self, is_last: bool = False) -> AbstractContextManager[None]:
        """Return a context in which ``backward()`` only adds to the gradients, without messages.

        With `is_last`, ``backward()`` sends the gradients as usual. To send the sum of four backwards, put forward and
        backward into ``with strategy.accumulate(is_last=(i + 1) % 4 == 0):``. Do not call ``optimizer.step()`` in this
        context.
        """
        return contextlib.nullcontext() if is_last else self.no_sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which ``backward()`` only adds to this rank's gradients."""
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole batch (over all ranks); return the norm of the gradients.

        Works as ``torch.nn.utils.clip_grad_norm_``. Call it between ``backward()`` and ``optimizer.step()``. The
        gradients of embeddings' rows are not clipped.
        """
        assert self.module is not None, "prepare() comes first"
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def epoch(self, num_batches: int | None) -> AbstractContextManager[None]:
        """Return a context for one epoch of the training loader; `num_batches` is its length on this rank, if known."""
        return contextlib.nullcontext()

    def _ran_out(self) -> None:
        """The training loader calls this method when it has no more data, before the context of :meth:`epoch` ends."""

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Return the reduction of `value` (a number, a tensor, or a dictionary of them) over all ranks, on each rank.

        `op` is ``mean``, ``sum``, ``min`` or ``max``. Numbers are returned as float, tensors in their dtype and device.
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
        """Wait until every rank has called this method."""
        self._ranks.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only, and flush; `options` are those of the built-in `print`."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def report_progress(self, done: float | None = None, **metrics: Any) -> None:
        """Show the progress of the training in the status of a Kubeflow TrainJob, and in the metrics of the run.

        `done` is the finished fraction of the training, from 0 to 1. `metrics` are numbers, also of NumPy, or tensors
        with one element, such as the loss. Other values are not in the metrics. You can call this method often: rank 0
        sends the newest values to Kubeflow every ten seconds. Without Kubeflow and without an option for metrics
        (``paceline run --metrics``), the method has no effect.
        """
        metrics = {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()
        }
        if self.status is not None and self.is_main:
            self.status.update(done, metrics)
        if recording.recorder is not None:
            for name, value in (metrics if done is None else {"done": done, **metrics}).items():
                if isinstance(value, SupportsFloat):
                    # Such as a tensor with several elements: a run that works without metrics must not fail with them.
                    with contextlib.suppress(ArithmeticError, RuntimeError, TypeError, ValueError):
                        recording.recorder.set("paceline_reported_value", float(value), name)

    def save(self, directory: str | os.PathLike[str], **extra: Any) -> None:
        """Write a checkpoint, which any strategy and world size can load. Every rank must call this method.

        The checkpoint contains the model, the states of optimizers and schedulers, the positions of the prepared
        loaders, the embeddings' tables, the states of :meth:`register_state`, and `extra` (JSON values such as the
        epoch). Rank 0 writes, and all ranks wait. A new checkpoint replaces an old one atomically.
        """
        from paceline.torch.strategies.checkpoints import save

        save(self, directory, extra)

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a checkpoint of any strategy, and return its `extra`. Every rank must call this method, after `prepare`.
        Raises ModelError for a missing or damaged checkpoint, and for a checkpoint of another model.
        """
        from paceline.torch.strategies.checkpoints import load

        return load(self, directory)

    def gather_optimizer_state(self, number: int = 0) -> dict[int, dict[str, Any]]:
        """Return an optimizer's state by parameter number, complete on rank 0. Every rank must call this method."""
        state: dict[int, dict[str, Any]] = self.optimizers[number].state_dict()["state"]
        return state

    def _scatter_optimizer_state(self, state: dict[int, dict[str, Any]], number: int = 0) -> None:
        """Load an optimizer's state from :meth:`gather_optimizer_state`. Every rank passes the complete state."""
        optimizer = self.optimizers[number]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def gather_values(self) -> dict[str, torch.Tensor]:
        """Return the complete parameters and persistent buffers by name, on rank 0. Every rank must call this method.

        Afterwards rank 0's module has these values too, except under ``sharded``.
        """
        assert self.module is not None, "prepare() comes first"
        return state_of(self.module)

    def _scatter_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Load complete values by name into the model. Every rank must call this method with the same values."""
        assert self.module is not None
        own = state_of(self.module)
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)

    def close(self) -> None:
        """Disconnect from the other ranks and the servers. Idempotent."""
        if self._step_guard is not None:
            self._step_guard.remove()
        if self.embedder is not None:
            self.embedder.close()
        self._ranks.close()

    def __repr__(self) -> str:
        rows = self.described_rows().items()
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in rows)})"

    @override
    def described_rows(self) -> dict[str, Any]:
        return {"rank": self.rank, "world_size": self.world_size, "device": str(self.device)}


class _Models(nn.ModuleList):
    """The models of a strategy, if there are several."""


def as_one(models: list[nn.Module]) -> nn.Module:
    """Return one module that contains all `models`; for a single model, the model itself."""
    return models[0] if len(models) == 1 else _Models(models)


def state_of(module: nn.Module, without: Collection[torch.Tensor] = frozenset()) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, without the empty anchors of embeddings."""
    state = module.state_dict(keep_vars=True).items()
    tensors = {name: tensor for name, tensor in state if isinstance(tensor, torch.Tensor) and tensor not in without}
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are trained, without the empty anchors of embeddings."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            yield name, parameter


def give_own_memory(model: nn.Module) -> None:
    """Copy expanded parameters and buffers to contiguous memory, because torch cannot write to expanded tensors."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.layout is not torch.strided:
            continue
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        elif tensor.is_contiguous() and tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
            tensor.data = tensor.data.view(-1).view(tensor.shape)


def check_dense(model: nn.Module, source: str) -> None:
    """Raise UsageError for a parameter or buffer that is not dense. The text of the error begins with `source`."""
    kinds = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    for kind, (name, tensor) in ((kind, named_tensor) for kind, named in kinds for named_tensor in named):
        if tensor.layout is torch.strided:
            continue
        instead = "make its values the parameter, and create the tensor in forward"
        if kind == "buffer":
            instead = f"keep it as a plain attribute that is the same on every rank (self.{name.split('.')[-1]} = ...)"
        raise UsageError(
            f"{source}{kind} {name!r} is a tensor of layout {str(tensor.layout).removeprefix('torch.')}, but only "
            f"dense tensors are shared and saved: make it dense (to_dense()), or {instead}"
        )


def warn(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)

"""The strategy ``pipeline``: each process runs some layers of the model, on the microbatches of each batch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from typing_extensions import override

from paceline.environment import Timeout, environment, timedelta_of
from paceline.errors import UsageError
from paceline.meeting.rendezvous import find_rank
from paceline.strategies import PipelineFlags, PipelineOptions, choose_pipeline
from paceline.torch.strategies.base import Strategy, state_of
from paceline.torch.strategies.deferred import is_stand_in
from paceline.torch.strategies.pipeline.loop.ownership import gather_state
from paceline.torch.strategies.pipeline.plan.choosing import PipelinePlan
from paceline.torch.strategies.pipeline.runner import Runner
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks


class Pipeline(Strategy):
    """Pipeline parallelism over the schedules of ``torch.distributed.pipelining``.

    The first call cuts the model into stages. Each process has only the parameters of its stages. Every process of a
    pipeline runs the whole training loop on the same batches. The result equals that of one process on the same batch,
    except that BatchNorm normalizes over microbatches.

    `stages`: number of processes of a pipeline. `data_parallel`: number of pipelines, which read different parts of the
    data and average their gradients. `schedule`: a key of :data:`~paceline.strategies.SCHEDULES` or ``auto``.
    `microbatches`: number of parts of a batch; None: the number with the shortest predicted step. `split`: names of
    modules that begin a stage. `stage_memory`: limit in bytes for parameters, optimizer state and activations on a
    process. The default of each option is the value that ``paceline run`` received.

    Sources: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM" (1F1B), SC 2021; Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.

    Raises UsageError for options that contradict each other or the number of processes.
    """

    name: ClassVar[str] = "pipeline"
    fills_in_parts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        stages: int | None = None,
        data_parallel: int | None = None,
        schedule: str | None = None,
        microbatches: int | None = None,
        split: Sequence[str] | None = None,
        stage_memory: int | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        settings = environment()
        known = PipelineOptions.of_environment(settings)
        self.options = choose_pipeline(
            PipelineFlags(
                stages=stages if stages is not None or known is None else known.stages,
                data_parallel=data_parallel if data_parallel is not None or known is None else known.data_parallel,
                schedule=schedule if schedule is not None or known is None else known.schedule,
                microbatches=_text(microbatches if microbatches is not None or known is None else known.microbatches),
                split=",".join(split if split is not None else () if known is None else known.split) or None,
                stage_memory=_text(stage_memory if stage_memory is not None or known is None else known.stage_memory),
            ),
            find_rank(settings)[1],
        )
        chosen = torch.device("cpu" if device is None else device)
        if chosen.type != "cpu":
            raise UsageError(f"strategy pipeline runs on the CPU, got device={str(device)!r}: leave it out")
        super().__init__(Ranks.meet(timedelta_of(timeout), backend="paceline"), device=chosen, seed=seed)
        shape = (self.options.data_parallel, self.options.stages)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "stage"))
        self._runner: Runner | None = None

    @property
    @override
    def data_place(self) -> tuple[int, int]:
        """The number of this process's part of the data, and the number of parts. Each pipeline has one part."""
        return self.rank // self.options.stages, self.options.data_parallel

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        if self.embedder is not None:
            raise UsageError(
                "strategy pipeline does not support embeddings of paceline.torch. Use torch.nn.Embedding, or another "
                "strategy"
            )
        if len(self.models) != 1 or len(optimizers) > 1 or not models:
            raise UsageError(
                f"strategy pipeline supports one model with one optimizer, but prepare() got {len(self.models)} models "
                f"and {len(self.optimizers)} optimizers. Call prepare() once, or choose another strategy"
            )
        model, optimizer = models[0], optimizers[0] if optimizers else None
        data_group = self.mesh.get_group("data") if self.options.data_parallel > 1 else None
        stage_group = self.mesh.get_group("stage")
        self._runner = Runner(model, optimizer, self.options, self._ranks, stage_group, data_group, self.deferred)
        return [PipelinedModel(model, self._runner)], optimizers

    @contextlib.contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ``backward()`` does not average gradients over parallel pipelines."""
        assert self._runner is not None
        before, self._runner.averages = self._runner.averages, False
        try:
            yield
        finally:
            self._runner.averages = before

    @override
    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Return the reduction over all pipelines. The processes of a pipeline pass one value, which counts once."""
        found = super().reduce(value, op)
        if op != "sum" or isinstance(value, Mapping):  # the base class calls this method for each value of a mapping
            return found
        once = found / self.options.stages
        return once.to(value.dtype) if isinstance(value, torch.Tensor) else once

    @override
    def gather_values(self) -> dict[str, torch.Tensor]:
        """Return all values on rank 0, whose module keeps them until the next call of the model.

        All ranks must call this method.
        """
        runner = self._runner
        if runner is not None and runner.ownership is not None and self.data_place[0] == 0:
            runner.ownership.gather_values(runner.group)
        return super().gather_values()

    @override
    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a checkpoint of any strategy. Each rank keeps only the values of its stages."""
        if self.deferred is not None and self.plan is None:
            raise UsageError(
                'load() got a model that was built under torch.device("meta"), whose stages are unknown before its '
                "first call. Call the model on a batch before load(), for example under torch.no_grad()"
            )
        return super().load(directory)

    @override
    def _scatter_values(self, values: Mapping[str, torch.Tensor]) -> None:
        assert self.module is not None
        own = state_of(self.module)
        super()._scatter_values({name: value for name, value in values.items() if not is_stand_in(own[name])})

    @override
    def gather_optimizer_state(self, number: int = 0) -> dict[int, dict[str, Any]]:
        """Return the optimizer state in torch's form, by parameter number, on rank 0. Every rank must call this."""
        state = super().gather_optimizer_state(number)
        runner = self._runner
        if runner is None or runner.ownership is None or self.data_place[0] != 0 or self.options.stages == 1:
            return state
        assert self.optimizer is not None
        assert self.module is not None
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        keepers = [
            runner.ownership.keeper(names[id(parameter)]) if id(parameter) in names else 0
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        ]
        return gather_state(state, keepers, runner.group.rank(), runner.group)

    def _scatter_optimizer_state(self, state: dict[int, dict[str, Any]], number: int = 0) -> None:
        assert self.optimizer is not None
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        super()._scatter_optimizer_state({k: entries for k, entries in state.items() if not is_stand_in(parameters[k])})
        if self._runner is not None:
            self._runner.release()

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan: cuts, schedule and predictions; None before the first call of the model."""
        return None if self._runner is None else self._runner.plan

    def report(self) -> str | None:
        """Return a text that compares measured and predicted times; None before the fourth step."""
        return None if self._runner is None else self._runner.report()

    @override
    def close(self) -> None:
        """Leave the other ranks; rank 0 prints the measured times. Idempotent."""
        runner, self._runner = self._runner, None
        text = None if runner is None or not self.is_main else runner.report()
        if text is not None:
            print(text, file=sys.stderr, flush=True)
        super().close()


class PipelinedModel(nn.Module):
    """A model whose layers run on several processes. The parameters are those of the original model. A parameter that
    only other processes need has the value NaN here.
    """

    def __init__(self, module: nn.Module, runner: Runner) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_runner", runner)

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise UsageError(
            "copy.deepcopy() does not support a model whose layers are on several processes. Copy it before prepare(), "
            "and load rank 0's values from strategy.gather_values() into the copy"
        )

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, which must be the same on every process of the pipeline."""
        return self.__dict__["_runner"].call(args, kwargs)

    def named_parameters(self, *values: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.__dict__["_module"].named_parameters(*values, **options)

    def named_buffers(self, *values: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self.__dict__["_module"].named_buffers(*values, **options)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.__dict__["_module"].named_children()

    def named_modules(self, *values: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.__dict__["_module"].named_modules(*values, **options)

    @override
    def train(self, mode: bool = True) -> PipelinedModel:
        self.__dict__["_module"].train(mode)
        self.training = mode
        return self

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state. Raises UsageError if some values are on other processes."""
        self.__dict__["_runner"].check_complete("state_dict()")
        return self.__dict__["_module"].state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load values. Every process must call this method, and keeps only the values of its stages."""
        runner = self.__dict__["_runner"]
        runner.hold_all()
        keys = self.__dict__["_module"].load_state_dict(state_dict, strict, assign)
        runner.release()
        return keys


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)

"""The backend for trainers of Ray Train, whose workers then train with ``paceline.torch.strategy()``."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import ray.train
from ray.train.backend import Backend, BackendConfig
from typing_extensions import override

from paceline.environment import environment
from paceline.errors import PeerError, UsageError
from paceline.launch.coordinator import start_coordinator
from paceline.meeting.coordinator import CoordinatorServer
from paceline.meeting.own_launcher import close_own_launchers
from paceline.strategies import ElasticFlags, ElasticOptions, StrategyChoice, StrategyFlags, choose_strategy
from paceline.transport import TLS, Address, make_token

_START_S: Final = 300.0
"""Time limit for the start of all workers. The training then begins with the workers that have started."""
_HEARTBEAT_S: Final = 30.0


@dataclass(kw_only=True)
class PacelineConfig(BackendConfig):
    """The backend of a trainer of Ray Train: ``DataParallelTrainer(train, backend_config=PacelineConfig(), ...)``.

    In the training function, ``paceline.torch.strategy()`` and ``paceline.collectives.init()`` work as under ``paceline
    run``. Each worker is a rank.

    - `strategy`: a strategy without servers, as in ``paceline run --strategy``.
    - `min_ranks`: continue without a failed worker, as ``paceline run --min-ranks`` does, while at least this many
      workers live. Ray replaces the worker if the trainer has a ``FailureConfig(max_failures=N)``. Without `min_ranks`,
      Ray starts all workers again.

    Raises UsageError for other values.
    """

    strategy: str | None = None
    min_ranks: int | None = None
    backend: ClassVar[str] = "paceline"  # otherwise TorchTrainer sets it

    def __post_init__(self) -> None:
        choice = self.choose(self.min_ranks or 2)
        if choice.servers:
            raise UsageError(
                f"PacelineConfig: strategy {choice.name} needs servers, which Ray Train does not start. Call "
                "paceline.ray.run(..., servers=N)"
            )
        if self.min_ranks is not None and not hasattr(Backend, "has_replica_groups"):
            raise UsageError(
                f"PacelineConfig(min_ranks={self.min_ranks}): Ray {ray.__version__} cannot replace a single worker. "
                "Install Ray 2.60 or later"
            )

    def choose(self, num_workers: int) -> StrategyChoice:
        """Return the strategy for a number of workers. Raises UsageError."""
        flags = StrategyFlags(elastic=ElasticFlags(min_ranks=self.min_ranks))
        return choose_strategy(self.strategy, processes=num_workers, flags=flags)

    @property
    @override
    def backend_cls(self) -> type[Backend]:
        return PacelineBackend if self.min_ranks is None else ElasticBackend

    @property
    @override
    def train_func_context(self) -> Any:
        return contextlib.nullcontext if self.min_ranks is None else _ElasticFunction


class PacelineBackend(Backend):
    """Sets the variables of ranks in Ray's workers."""

    share_cuda_visible_devices = True

    @override
    def on_training_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        host, port = worker_group.execute_single(0, _find_free_address)
        variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "PACELINE_TOKEN": make_token()}
        worker_group.execute(_set_variables, {**backend_config.choose(len(worker_group)).variables(), **variables})


class ElasticBackend(Backend):
    """Serves the coordinator in Ray's controller. Ray replaces a worker that fails, and the other workers continue."""

    has_replica_groups = True

    def __init__(self) -> None:
        self.coordinator: CoordinatorServer | None = None
        """The coordinator of the running training."""
        self._variables: dict[str, str] = {}
        self._num_rejected = 0
        """The number of workers that Ray has started since the training failed."""

    @override
    def on_training_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        if self.coordinator is None or _has_all_workers(worker_group):
            self._serve(backend_config.choose(len(worker_group)))
        elif self.coordinator.failure is not None:
            # The new worker fails too. When all workers have failed, Ray starts all of them again. If Ray replaces
            # single workers again and again instead, end the training.
            self._num_rejected += 1
            if self._num_rejected > int(self._variables["WORLD_SIZE"]):
                raise PeerError(f"the training has failed: {self.coordinator.failure}")
        worker_group.execute(_set_variables, self._variables)

    def _serve(self, choice: StrategyChoice) -> None:
        self._close()
        assert isinstance(choice.options, ElasticOptions)
        token, tls = make_token(), TLS.of_environment(environment())
        self.coordinator = start_coordinator(
            choice.options,
            Address("tcp", ray.util.get_node_ip_address(), 0),
            token,
            tls,
            max_ranks=choice.options.num_ranks,
            start_timeout_s=_START_S,
            timeout_s=_HEARTBEAT_S,
        )
        self._num_rejected = 0
        self._variables = {
            "PACELINE_STRATEGY": choice.name,
            "PACELINE_COORDINATOR": self.coordinator.address.netloc,
            "PACELINE_TOKEN": token,
            "WORLD_SIZE": str(choice.options.num_ranks),
        }

    @override
    def on_shutdown(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        if _has_all_workers(worker_group):
            self._close()

    def _close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None


class _ElasticFunction:
    """The context of a training function. The rank ends with the function, although the worker's process continues."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        close_own_launchers()
        # A new worker ends with SystemExit(0) if the other workers have finished before it could join them.
        return isinstance(error, SystemExit) and not error.code


def _has_all_workers(worker_group: Any) -> bool:
    """Return whether this is the group of all workers, not of one worker that Ray replaces."""
    return hasattr(worker_group, "get_replica_groups")


def _find_free_address() -> tuple[str, int]:
    host = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return host, int(probe.getsockname()[1])


def _set_variables(variables: dict[str, str]) -> None:
    context = ray.train.get_context()
    os.environ.update(
        {
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            **variables,
        }
    )

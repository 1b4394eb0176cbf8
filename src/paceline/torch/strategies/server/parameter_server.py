"""Keep parameters on servers: ranks send gradients during backward, and receive values during the next forward.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI'14. The order of the pulls
follows Hashemi et al., "TicTac", and Jayarajan et al., "Priority-based Parameter Propagation", both MLSys'19.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.environment import Timeout, timedelta_of
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.filters import Filter
from paceline.protocol import Consistency, Sequential
from paceline.ps.client.filtered import filters_of_dense_tables
from paceline.torch.embeddings import ClusterTables, RowTables
from paceline.torch.gradient_filters import row_filters
from paceline.torch.strategies.base import Strategy, named_parameters, warn
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks, check_not_elastic
from paceline.torch.strategies.reached import refuse_steps_in_backward
from paceline.torch.strategies.server.cluster import check_cluster, check_is_first, connect_workers
from paceline.torch.strategies.server.dense_parameters import DenseParameters
from paceline.torch.strategies.server.dense_tables import lay_out
from paceline.torch.strategies.server.optimizer import ServerOptimizer


class ParameterServer(Strategy):
    """One process per device. Servers store the parameters and the optimizer's state, and make the updates.

    The servers store every parameter of the optimizer as float32, in a table per parameter group, and update it by the
    optimizer's rule. ``backward()`` sends gradients in buckets of `bucket_mb` MiB. It sends a bucket when all its
    gradients are computed. ``optimizer.step()`` sends the remaining gradients. Then the rank receives the new values,
    those of the first layers first. Forward, like any other access, waits only for the parameters that it uses.

    Under sequential consistency, the program may write to parameters (clamping, initializing, loading) at any time.
    Under other consistencies, it may do so only before the first step. Every rank must write the same values. The next
    step sends them to the servers. Every rank starts with rank 0's buffers (such as BatchNorm's statistics). In
    training each rank changes its own buffers, and a checkpoint contains rank 0's. Ranks may have different numbers of
    batches. When a rank has no more batches, the other ranks continue without it until the next epoch.

    Under sequential consistency, changes of gradients between ``backward()`` and ``optimizer.step()`` (clipping, loss
    scaling) have the same effect as on one device. For this, ``backward()`` averages gradients over the ranks at its
    end, and the step sends them. After three steps in which the program does not access gradients and runs
    ``backward()`` once, ``backward()`` sends the gradients, and a later change raises UsageError. With `overlap=False`,
    ``backward()`` never sends gradients.

    - `unused`: a parameter without a gradient is an ``"error"``, or is skipped (``"skip"``). A skipped gradient counts
      as zero if another rank has a gradient. If no rank has a gradient, the parameter is not updated.
    - `timeout`: time to wait for other processes.
    - `filters`: filters for gradients, and for pushed rows of embeddings without own filters (a list, or a text such as
      ``quantize:4``; default: ``paceline run --filters``). Parameters' values are not filtered.
    - `pull_filters`: filters for pulled rows of embeddings (default: those of `filters` that work on values and bytes).
    - `consistency` (``BoundedDelay(tau=4)``), `replicas` and `min_replicas` (this number or more): the settings that
      the program requires. If the launcher has started servers with other settings, the constructor raises UsageError.

    Raises UsageError without servers: start the program with ``paceline run --strategy parameter-server``.
    """

    name: ClassVar[str] = "parameter-server"

    def __init__(
        self,
        *,
        consistency: Consistency | None = None,
        replicas: int | None = None,
        min_replicas: int | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        bucket_mb: float = 4.0,
        overlap: bool = True,
        unused: Literal["error", "skip"] = "error",
        filters: Sequence[Filter] | str | None = None,
        pull_filters: Sequence[Filter] | str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        if not 0 < bucket_mb <= 512:
            raise UsageError(f"ParameterServer(bucket_mb={bucket_mb!r}): expected more than 0 and at most 512 MiB")
        if unused not in ("error", "skip"):
            raise UsageError(f"ParameterServer(unused={unused!r}): expected 'error' or 'skip'")
        chosen = row_filters(filters, pull_filters)
        filters_of_dense_tables(chosen.filters)
        check_is_first(self.name)
        limit = timedelta_of(timeout)
        ranks = self._meet(limit)
        try:
            super().__init__(ranks, device=device, seed=seed)
            self.takes_uneven = True
            self.client = connect_workers(self.name, ranks.worker_rank, limit)
            try:
                check_cluster(self.client, self.name, consistency, replicas, min_replicas)
            except BaseException:
                self.client.close()
                raise
        except BaseException:
            ranks.close()
            raise
        self._bucket_bytes = int(bucket_mb * (1 << 20))
        self._is_sequential = isinstance(self.client.consistency, Sequential)
        self._skips_unused = unused == "skip"
        self._filters = chosen
        self._overlaps = overlap
        self._is_uneven: bool | None = None
        self._has_retired = False
        self._num_epochs = 0
        self.dense: DenseParameters | None = None
        """The model's parameters on the servers, without embeddings' rows; None before :meth:`prepare`."""
        self._trained: set[nn.Parameter] = set()
        atexit.register(self._end, at_once=True, with_process=True)

    def _meet(self, timeout: timedelta) -> Ranks:
        """Connect the ranks of the training."""
        check_not_elastic(self)
        return Ranks.meet(timeout)

    @property
    def _may_write(self) -> bool:
        """Whether this rank may have to write the checkpoint that the ranks save."""
        return self.is_main

    def _spread(self, models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[list[nn.Module], list[Optimizer]]:
        assert self.module is not None
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        groups = {optimizer: lay_out(optimizer, names, self._bucket_bytes) for optimizer in optimizers}
        trained = {optimizer: [slot.parameter for slots in groups[optimizer] for slot in slots] for optimizer in groups}
        self._trained.update(*trained.values())
        for model in models:
            untrained = [
                *(parameter for parameter in model.parameters() if parameter not in self._trained),
                *model.buffers(),
            ]
            self._ranks.broadcast(untrained)
            if self.world_size > 1 and self._trained.isdisjoint(model.parameters()) and not optimizers:
                refuse_gradients(model, self.rank, self._trained)
        if self.world_size > 1 and self._trained:
            self._step_guard = refuse_steps_in_backward(self.rank, self.module, self._step_guard)
        if self.dense is None and self._trained:
            self.dense = DenseParameters(
                self.client,
                self._ranks,
                self.device,
                overlaps=self._overlaps,
                skips_unused=self._skips_unused,
                filters=self._filters.filters,
            )
        if self.dense is not None:
            for model in self.models:
                self.dense.follow(model)
            for optimizer in optimizers:
                if trained[optimizer]:
                    self.dense.add(optimizer, groups[optimizer], names)
        return models, [
            ServerOptimizer(
                optimizer, functools.partial(self._step, optimizer), self.dense if trained[optimizer] else None
            )
            for optimizer in optimizers
        ]

    def _is_exchange(self) -> bool:
        waits = self._is_sequential and self.world_size > 1 and not self._is_uneven
        return waits and self.dense is not None and not self.dense.holds

    def _row_tables(self) -> RowTables:
        return ClusterTables(self.client, self._filters)

    @property
    def _has_samples(self) -> bool:
        """Whether this rank's batch has samples of its own."""
        return True

    def _step(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._trained and parameter.numel() and parameter.grad is not None:
                    raise UsageError(
                        f"rank {self.rank}: a parameter of shape {list(parameter.shape)} has a gradient, but was "
                        "frozen, or not in the optimizer, at prepare(): unfreeze or add it before prepare()"
                    )
        dense = self.dense if self.dense is not None and self.dense.has(optimizer) else None
        if dense is not None:
            dense.begin_step(optimizer)
        elif self.dense is not None:
            self.dense.wait_all()
        if self.embedder is not None:
            self.embedder.step(optimizer, has_effect=self._has_samples)
        if dense is None:
            self.client.tick()
        else:
            dense.end_step(optimizer)
        if self.embedder is not None:
            self.embedder.ticked()

    @contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ``backward()`` only adds to this rank's gradients, without sending."""
        dense = self.dense
        if dense is None:
            yield
            return
        before, dense.holds = dense.holds, True
        try:
            yield
        finally:
            dense.holds = before

    @override
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of the complete batch under sequential consistency.

        Under bounded delay and eventual consistency, clip by the norm of this rank's own gradients, which the servers
        apply separately. If the program did not access gradients in the first steps, ``backward()`` has already sent
        them, and this method raises UsageError. It also raises UsageError if ranks have different numbers of batches.
        """
        hands_on = None if self.dense is None else self.dense.hands_on
        if hands_on is not None and hands_on.is_early:
            raise UsageError(
                f"rank {self.rank}: clip_grad_norm_() after gradients were sent during backward(): call it from "
                "the first iteration on, or create the strategy with overlap=False"
            )
        if hands_on is not None and self._is_sequential and self.world_size > 1 and not hands_on.was_averaged:
            if self._is_uneven:
                raise UsageError(
                    f"rank {self.rank}: clip_grad_norm_() of the complete batch needs all ranks, but they have "
                    "different numbers of batches: give all ranks the same number"
                )
            hands_on.average()
        return super().clip_grad_norm_(max_norm, norm_type)

    @contextmanager
    @override
    def epoch(self, num_batches: int | None) -> Iterator[None]:
        """Return a context for an epoch. Under sequential consistency all ranks start it together."""
        # Ranks exchange their numbers of batches before the first epoch. Under sequential consistency they do so before
        # every epoch, because they wait for each other anyway. A rank that left the last epoch early must join when all
        # ranks have ended that epoch, and before they continue.
        has_retired, self._has_retired = self._has_retired, False
        any_retired = has_retired
        if self._is_sequential or self._is_uneven is None:
            self._end_loops()
            is_early = self.dense is not None and self.dense.hands_on.is_early
            reports = self._ranks.exchange_as("begins an epoch", [num_batches, has_retired, is_early])
            counts = [count for count, _, _ in reports]
            self._is_uneven = len(counts) > 1 and (None in counts or len(set(counts)) > 1)
            any_retired = any(retired for _, retired, _ in reports)
            if self.dense is not None:
                is_early = all(is_early for _, _, is_early in reports)
                self.dense.hands_on.begin_epoch(is_early=is_early, is_uneven=self._is_uneven)
                self.dense.write_back(all_present=True)
        if has_retired:
            self.client.join()
            if self.dense is not None:
                self.dense.pull_all()  # other ranks may have trained without this rank
        if any_retired and self._is_sequential:
            self.barrier()
        self._num_epochs = number = self._num_epochs + 1
        try:
            yield
        except GeneratorExit:  # the program ended the loop by `break`
            if number == self._num_epochs:
                self._leave_epoch()
            raise

    def _leave_epoch(self) -> None:
        """Leave the servers' iterations before the end of the data. Drop pushed gradients that no step follows."""
        dense = self.dense
        if self.world_size == 1 or self._has_retired or dense is None:
            return
        with contextlib.suppress(PacelineError):  # the program cannot catch an error here; the next request raises it
            dense.drop_pushes()
            self.client.retire()
            self._has_retired = True
            dense.begin_iteration()

    def _end_loops(self) -> None:
        """Before an exchange, wait until all ranks have ended their loops, in which they average gradients."""
        if self.dense is not None:
            self.dense.hands_on.meet()

    @override
    def barrier(self) -> None:
        self._end_loops()
        super().barrier()

    @override
    def reduce(self, value: Any, op: str = "mean") -> Any:
        self._end_loops()
        return super().reduce(value, op)

    def _ran_out(self) -> None:
        """If ranks have different numbers of batches, leave the servers' iterations until the next epoch."""
        if self._is_uneven and not self._has_retired:
            if self.dense is not None:
                self.dense.wait_all()
            self.client.retire()
            self._has_retired = True

    @override
    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        self._end_loops()
        return super().load(directory)

    @override
    def gather_values(self) -> dict[str, torch.Tensor]:
        if self.dense is not None:
            self.dense.wait_all()
            self._end_loops()
            self.dense.write_back(all_present=True)
            self.barrier()  # the values then include every rank's last push
            self.dense.pull_all()
        return super().gather_values()

    @override
    def _scatter_values(self, values: Mapping[str, torch.Tensor]) -> None:
        self.gather_values()  # wait for all messages
        super()._scatter_values(values)
        if self.dense is not None:
            self.dense.write_values()

    @override
    def gather_optimizer_state(self, number: int = 0) -> dict[int, dict[str, Any]]:
        if self.dense is not None:
            self.dense.wait_all()
        self.barrier()
        optimizer = self.optimizers[number]
        return self.dense.read_state(optimizer) if self.dense is not None and self._may_write else {}

    def _scatter_optimizer_state(self, state: dict[int, dict[str, Any]], number: int = 0) -> None:
        if self.dense is not None:
            self.dense.write_state(self.optimizers[number], state)

    @override
    def close(self) -> None:
        """Disconnect when all values in flight have arrived."""
        failure = self._end(at_once=False)
        if failure is not None:
            raise PeerError(failure)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(at_once=True, error=error)

    def _end(self, *, at_once: bool, error: BaseException | None = None, with_process: bool = False) -> str | None:
        """Close. If another rank has reported its exception and this rank has no exception, return the report."""
        atexit.unregister(self._end)
        error = getattr(sys, "last_value", None) if with_process else error
        dense, self.dense = self.dense, None
        if error is not None:
            self._ranks.report_failure(error)
        try:
            if dense is not None:
                dense.close(at_once=at_once)
        finally:
            failure = None if error is not None else self._ranks.failure()
            try:
                super().close()
            finally:
                self.client.close()
        if with_process and failure is not None:
            warn(f"rank {self.rank}: {failure}; the training is not complete")
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(1)
        return failure


def refuse_gradients(model: nn.Module, rank: int, trained: set[nn.Parameter]) -> None:
    """Make ``backward()`` raise UsageError if it computes a gradient of a `model`'s parameter not in `trained`."""

    def refuse(parameter: nn.Parameter) -> None:
        if parameter in trained:
            return
        raise UsageError(
            f"rank {rank}: backward() was called, but prepare() got no optimizer for the servers' steps, so gradients "
            "would differ between ranks: pass one (torch.optim.SGD instead of updates by hand), or choose "
            "--strategy all-reduce"
        )

    for _, parameter in named_parameters(model):
        parameter.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]

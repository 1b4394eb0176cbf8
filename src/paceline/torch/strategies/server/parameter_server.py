"""Parameters on servers: gradients go there while backward runs, values come back while the next forward does.

What the servers do with the gradients of several workers, the cluster's consistency says (``paceline run
--consistency``): under ``sequential`` they are averaged and applied once, with the result of one process on the joined
batch; under ``bounded:N`` and ``eventual`` each is applied when it arrives.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI'14; the order of the pulls
after Hashemi et al., "TicTac", and Jayarajan et al., "Priority-based Parameter Propagation", both MLSys'19.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from paceline.errors import PacelineError, UsageError
from paceline.protocol import Consistency, Sequential
from paceline.torch.embeddings import RowTables, ServerTables
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.ranks import DEFAULT_TIMEOUT, Ranks
from paceline.torch.strategies.replicas.replica import raise_for_replaced
from paceline.torch.strategies.server.cluster import check_cluster, connect_workers
from paceline.torch.strategies.server.dense_tables import Bucket, DenseTables, Slot, broadcast_tensors, lay_out
from paceline.torch.strategies.server.hands_on import HandsOn
from paceline.torch.strategies.server.optimizer import ServerOptimizer
from paceline.torch.strategies.server.push_pull import PushPull
from paceline.torch.strategies.server.staging import Staging
from paceline.torch.strategies.server.watched import arrive, depart, unwatch, watch
from paceline.torch.strategies.server.writing_back import check_may_write, write_back
from paceline.torch.strategies.waiting import make_wait

_NAMED = 5


class ParameterServer(Strategy):
    """One process per device; parameters and optimizer state live on servers, which do the updates.

    Every parameter that the optimizer has lies on the servers as float32, in a table per parameter group, updated by
    the rule that does as the optimizer does. ``backward()`` sends gradients in buckets of `bucket_mb` MiB as they come
    (a large parameter from its own memory), ``optimizer.step()`` the rest; then the values come back, the first layers'
    first, and forward waits for just those that it has reached, as does whatever else is done with a parameter. What
    the program writes into parameters (clamping, initializing, loading) is on the servers before the next step, under
    sequential consistency; elsewhere it may do so before the first step only. Every rank must write the same.

    Buffers (the statistics of BatchNorm, say) are rank 0's at the start, each rank's own in training, and rank 0's in a
    checkpoint. Ranks may have different numbers of batches: one that has run out is waited for no more until its next
    epoch.

    What the program does to gradients between ``backward()`` and ``optimizer.step()`` (clipping, scaling, loss scaling)
    has the effect that it has on one device: under sequential consistency ``backward()`` ends with their mean over the
    ranks, and nothing is sent before the step. A program that has not touched them for three steps, and runs
    ``backward()`` once a step, has them sent during ``backward()`` from then on; a change that comes after that is
    refused with UsageError. `overlap=False` sends nothing early, ever.

    `unused` says what becomes of a parameter without a gradient: an ``"error"``, or it is ``"skip"``: it counts as a
    gradient of zero where other ranks have one, and where none has it stays as it is, as with torch's optimizers.
    `timeout` is how long anything is waited for.

    The servers' consistency and replicas are the launcher's choice. A program that relies on them says so by
    `consistency` (``BoundedDelay(tau=4)``), `replicas` and `min_replicas` (so many or more), and is refused where they
    are not so.

    Raises UsageError where there are no servers: start the program with ``paceline run --strategy parameter-server``.
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
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        if not 0 < bucket_mb <= 512:
            raise UsageError(f"ParameterServer(bucket_mb={bucket_mb!r}): expected more than 0 and at most 512 MiB")
        if unused not in ("error", "skip"):
            raise UsageError(f"ParameterServer(unused={unused!r}): expected 'error' or 'skip'")
        ranks = Ranks.meet(timeout)
        try:
            super().__init__(ranks, device=device, seed=seed)
            self.takes_uneven = True
            self.client = connect_workers(self.name, ranks.rank, timeout)
            try:
                check_cluster(self.client, self.name, consistency, replicas, min_replicas)
            except BaseException:
                self.client.close()
                raise
        except BaseException:
            ranks.close()
            raise
        self._bucket_bytes = int(bucket_mb * (1 << 20))
        self._skips_unused = unused == "skip"
        self._overlaps = overlap
        self.hands_on: HandsOn | None = None
        self._holds = False  # within no_sync()
        self._is_uneven: bool | None = None
        self._has_retired = False
        self._num_epochs = 0
        self._slots: list[Slot] = []
        self._buckets: list[Bucket] = []  # in the model's order
        self._of_parameter: dict[nn.Parameter, Slot] = {}
        self._tables: DenseTables | None = None
        self._push_pull: PushPull | None = None
        self._undo: list[Callable[[], None]] = []
        atexit.register(self._end, at_once=True)

    @property
    def _is_sequential(self) -> bool:
        return isinstance(self.client.consistency, Sequential)

    # Getting ready.

    def _spread(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        groups: list[list[Slot]] = []
        if optimizer is not None:
            names = {parameter: name for name, parameter in model.named_parameters()}
            groups = lay_out(optimizer, names, self._bucket_bytes)
        order = {parameter: position for position, parameter in enumerate(model.parameters())}
        self._slots = [slot for slots in groups for slot in slots]
        self._slots.sort(key=lambda slot: order.get(slot.parameter, len(order)))
        self._buckets = list(dict.fromkeys(bucket for slot in self._slots for bucket in slot.buckets))
        self._of_parameter = {slot.parameter: slot for slot in self._slots}
        others = [*(each for each in model.parameters() if each not in self._of_parameter), *model.buffers()]
        broadcast_tensors(self._ranks, others)
        if optimizer is None:
            return model, None
        self._tables = DenseTables(self.client, self._ranks, optimizer, groups, "dense")
        if self._slots:
            self._start(model, optimizer)
        return model, ServerOptimizer(optimizer, self._step, self._read_optimizer_state, self._scatter_optimizer_state)

    def _start(self, model: nn.Module, optimizer: Optimizer) -> None:
        assert self._tables is not None
        self._tables.write({slot.number: optimizer.state.get(slot.parameter, {}) for slot in self._slots})
        self.hands_on = HandsOn(self._ranks, self._slots, joins=self._is_sequential, overlaps=self._overlaps)
        for slot in self._slots:
            optimizer.state.pop(slot.parameter, None)  # it is the servers' now
            watch(slot)
            slot.wait_for_values = functools.partial(self._wait_for, slot.parameter)
            self._undo.append(functools.partial(unwatch, slot))
            handle = slot.parameter.register_post_accumulate_grad_hook(self._gradient_came)  # type: ignore[no-untyped-call]
            self._undo.append(handle.remove)
        # The sum of the workers' gradients is made their mean, if the servers do not do so already.
        adds_up = isinstance(self.client.consistency, Sequential) and self.client.consistency.aggregate == "sum"
        staging = Staging(self.device, 1.0 / self.world_size if adds_up else 1.0)
        self._push_pull = PushPull(self.client, self._tables, staging, self.rank)
        self._undo.append(make_wait(model, self._wait_for))
        self._pull_all()

    def _row_tables(self) -> RowTables:
        return ServerTables(self.client)

    # In the loop.

    def _gradient_came(self, parameter: nn.Parameter) -> None:
        """Note a gradient that backward has left; if they are sent early, push the buckets that are complete."""
        assert self._push_pull is not None
        assert self.hands_on is not None
        slot = self._of_parameter[parameter]
        self.hands_on.came(slot, is_held=self._holds)
        if self._holds or not self.hands_on.is_early:
            return
        for bucket in slot.buckets:
            bucket.num_missing -= 1
            if not bucket.num_missing:
                self._push_pull.push(bucket)

    def _step(self) -> None:
        """End the iteration: what ``optimizer.step()`` does."""
        assert self._tables is not None
        self._check_parameters()
        if self.hands_on is not None:
            self.hands_on.end()
        # Its values read, this worker is at the iteration on every server: all of the one before is applied, and
        # nothing of this one will be until this worker ticks. So under sequential consistency new hyperparameters are
        # for exactly this iteration; elsewhere for what arrives from now on.
        self._wait_all()
        self._write_back()
        if self.is_main:
            self._tables.follow_rules()
        if self.embedder is not None:
            self.embedder.step()
        if self._push_pull is None:
            self.client.tick()
        else:
            for bucket in self._buckets:
                if not bucket.was_pushed:
                    self._push_pull.push(bucket)
            self._push_pull.end_iteration(self._buckets)
            self._depart()
        if self.embedder is not None:
            self.embedder.ticked()
        self._tables.num_steps += 1
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        for bucket in self._buckets:
            bucket.begin()
        if self.hands_on is not None:
            self.hands_on.begin()

    def _check_parameters(self) -> None:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._of_parameter and parameter.numel() and parameter.grad is not None:
                    raise UsageError(
                        f"rank {self.rank}: a parameter of shape {list(parameter.shape)} has a gradient, and was "
                        "frozen, or not the optimizer's, when prepare() was called: settle what is trained before"
                    )
        for slot in self._slots:
            slot.check_unchanged(self.rank)
        if self._skips_unused:
            return
        unused = [slot.name for slot in self._slots if slot.grad is None and slot.parameter.requires_grad]
        if unused:
            assert self.module is not None
            raise_for_replaced(self.module, {slot.name: slot.parameter for slot in self._slots}, self.rank)
            more = f" and {len(unused) - _NAMED} more" if unused[_NAMED:] else ""
            named = ", ".join(map(repr, unused[:_NAMED])) + more
            raise UsageError(
                f"rank {self.rank}: no gradient for {named}: the loss of this iteration does not depend on them, or "
                "backward() was not called; if that is meant, make the strategy with ParameterServer(unused='skip'), "
                "else take them out of the model"
            )

    @contextmanager
    def _holding(self) -> Iterator[None]:
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which ``backward()`` only adds to this rank's gradients, and nothing is sent."""
        return self._holding()

    @override
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Under sequential consistency the norm is that of the whole batch.

        Under bounded delay and eventual consistency it is that of this rank's own gradients, which are applied by
        themselves. Raises UsageError where gradients were sent during ``backward()``, since the first steps did not
        touch them, and where ranks have unequal numbers of batches.
        """
        hands_on = self.hands_on
        if hands_on is not None and hands_on.is_early:
            raise UsageError(
                f"rank {self.rank}: clip_grad_norm_() comes when gradients were sent during backward(): call it from "
                "the first iteration on, or make the strategy with overlap=False"
            )
        if hands_on is not None and self._is_sequential and self.world_size > 1 and not hands_on.was_averaged:
            if self._is_uneven:
                raise UsageError(
                    f"rank {self.rank}: clip_grad_norm_() of the whole batch needs all ranks, and they have unequal "
                    "numbers of batches: give the ranks equally many"
                )
            hands_on.average()
        return super().clip_grad_norm_(max_norm, norm_type)

    @contextmanager
    def epoch(self, num_batches: int | None) -> Iterator[None]:
        """Return a context for an epoch. Under sequential consistency all begin it together."""
        # Ranks in step lose nothing by meeting here; others do, and so they compare once. One that is back must not
        # count before the others have ended their epoch, nor the others train before it is back.
        has_retired, self._has_retired = self._has_retired, False
        any_retired = has_retired
        if self._is_sequential or self._is_uneven is None:
            self._meet()
            hands_on = [] if self.hands_on is None else self.hands_on.state
            told = self._ranks.exchange_as("begins an epoch", [num_batches, has_retired, hands_on])
            counts = [count for count, _, _ in told]
            self._is_uneven = len(counts) > 1 and (None in counts or len(set(counts)) > 1)
            if self.hands_on is not None:
                self.hands_on.begin_epoch([state for _, _, state in told], is_uneven=self._is_uneven)
            any_retired = any(retired for _, retired, _ in told)
            self._write_back(all_are_here=True)
        if has_retired:
            self.client.join()
            self._pull_all()  # the others have trained on
        if any_retired and self._is_sequential:
            self.barrier()
        self._num_epochs = number = self._num_epochs + 1
        try:
            yield
        except GeneratorExit:  # the loop was left by `break`; the others may go on
            if number == self._num_epochs:
                self._leave_epoch()
            raise

    def _leave_epoch(self) -> None:
        """Leave the iterations before the data have ended; what was pushed without a step is dropped."""
        push_pull = self._push_pull
        if self.world_size == 1 or self._has_retired or push_pull is None:
            return
        with contextlib.suppress(PacelineError):  # nobody could catch it here; the next call to the servers raises it
            if any(slot.num_backward for slot in self._slots) and not self._find_written():
                push_pull.pull(self._buckets)  # comes after the pushes that are under way
            self._wait_all()
            self.client.retire()
            self._has_retired = True
            self._begin_iteration()

    def _meet(self) -> None:
        """Wait until all ranks are about to do something together: some may be in the loop that this one has left."""
        if self.hands_on is not None:
            self.hands_on.meet()

    @override
    def barrier(self) -> None:
        self._meet()
        super().barrier()

    @override
    def reduce(self, value: Any, op: str = "mean") -> Any:
        self._meet()
        return super().reduce(value, op)

    def _ran_out(self) -> None:
        """Leave the iterations until the next epoch, unless all ranks end with the same one."""
        if self._is_uneven and not self._has_retired:
            self._wait_all()
            self.client.retire()
            self._has_retired = True

    # Values that are on their way.

    def _wait_for(self, parameter: nn.Parameter) -> None:
        slot = self._of_parameter.get(parameter)
        if slot is None:
            return
        push_pull = self._push_pull
        if push_pull is not None and not (push_pull.is_current and self.device.type == "cpu"):
            for bucket in slot.buckets:
                push_pull.wait(bucket)
        arrive(slot)

    def _wait_all(self) -> None:
        for slot in self._slots:
            self._wait_for(slot.parameter)

    def _pull_all(self) -> None:
        """Take the servers' values for the parameters'."""
        if self._push_pull is not None:
            self._push_pull.pull(self._buckets)
            self._wait_all()
            for slot in self._slots:
                slot.values.settle()
                if slot.values.is_exposed:
                    slot.values.seal()

    def _depart(self) -> None:
        """Know that new values are on their way to the parameters, which counts as a change of them."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([slot.parameter for slot in self._slots])
        for slot in self._slots:
            slot.values.settle()
            depart(slot)
        if _is_compiling_code():  # it reads parameters without a word
            self._wait_all()
        for slot in self._slots:
            if slot.values.is_exposed:  # nor does whoever reads and writes through an alias of its memory say one
                self._wait_for(slot.parameter)
                slot.values.seal()

    # What the program writes.

    def _find_written(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.values.was_written]

    def _write_back(self, *, all_are_here: bool = False) -> None:
        """Give the servers what the program has written into parameters.

        Under sequential consistency rank 0's values are there before anything of this iteration is applied, for it has
        not ticked. Elsewhere others' steps come at any time, so that only the first iteration can begin with it.
        """
        written = self._find_written()
        if not written or self._tables is None or self.hands_on is None:
            return
        all_take_part = all_are_here or self.hands_on.all_take_part
        check_may_write(written[0], self._ranks, self._tables, self.client.consistency, all_take_part=all_take_part)
        write_back(written, self._ranks, self._tables)
        if all_are_here or not self._is_sequential:
            self._ranks.barrier()

    @override
    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        self._meet()
        return super().load(directory)

    @override
    def gather_values(self) -> None:
        if self._push_pull is not None:
            self._wait_all()
            self._meet()
            self._write_back(all_are_here=True)
            self.barrier()  # every rank's last push is acknowledged, and so is in what is read now
            self._pull_all()

    def _scatter_values(self) -> None:
        if self._push_pull is not None:
            assert self._tables is not None
            self._tables.write(None)
            self._pull_all()

    def _read_optimizer_state(self) -> dict[int, dict[str, Any]]:
        """Return the state on the servers; any rank may call it by itself."""
        self._wait_all()
        return {} if self._tables is None else self._tables.read_state()

    @override
    def gather_optimizer_state(self) -> dict[int, dict[str, Any]]:
        self._wait_all()
        self.barrier()
        return self._read_optimizer_state() if self.is_main else {}

    def _scatter_optimizer_state(self, state: dict[int, dict[str, Any]]) -> None:
        if self._push_pull is not None:
            assert self._tables is not None
            self._wait_all()
            self._meet()
            if self.is_main:
                self._tables.follow_rules()
            self._tables.write(state)
            self._pull_all()

    # The end.

    @override
    def close(self) -> None:
        """Values that are on their way arrive first."""
        self._end(at_once=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=kind is not None)

    def _end(self, *, at_once: bool) -> None:
        atexit.unregister(self._end)
        push_pull, self._push_pull = self._push_pull, None
        try:
            if push_pull is not None:
                push_pull.close(at_once=at_once)
            for undo in self._undo:
                undo()
        finally:
            self._undo = []
            try:
                super().close()
            finally:
                self.client.close()


def _is_compiling_code() -> bool:
    """Whether ``torch.compile`` has compiled anything here."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])

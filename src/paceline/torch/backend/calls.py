"""Run a process group's calls, in the caller's thread or in the group's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._distributed_c10d import Work

from paceline.collectives import Group
from paceline.errors import PacelineError
from paceline.torch.backend.errors import Terms, in_torch_terms
from paceline.torch.backend.tensors import After
from paceline.torch.backend.work import FinishedWork, TicketWork, TracedOperation, Value, is_in_callback, is_profiling


class Step(NamedTuple):
    """One call of the group: a method, without ``_async``, and arguments."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  (read only)


class Calls:
    """The calls of one process group."""

    def __init__(self, group: Group, terms: Terms) -> None:
        self._group, self._terms = group, terms
        self._nested: Group | None = None

    def group(self) -> Group:
        """Return the group for a call of this thread. Callbacks use a second group, created at first use."""
        if not is_in_callback():
            return self._group
        if self._nested is None:
            self._nested = self._group.subgroup(range(self._group.size))
            assert self._nested is not None
        return self._nested

    def close(self) -> None:
        if self._nested is not None:
            self._nested.close()

    def run(
        self,
        event: str,
        steps: Sequence[Step],
        value: Value,
        *,
        is_async: bool,
        shown: Sequence[Tensor] = (),
        after: After | None = None,
    ) -> Work:
        """Run `steps`, then `after`; synchronous calls run in the caller's thread, which saves microseconds."""
        if not steps:
            return FinishedWork(value)
        is_profiled = is_profiling()
        try:
            group = self.group()
            if (is_async or is_profiled) and group is self._group:
                recorded = TracedOperation(event, shown) if is_profiled else None
                tickets = [
                    getattr(group, f"{method}_async")(*arguments, **options) for method, arguments, options in steps
                ]
                work = TicketWork(tickets, value, self._terms, after=after, event=recorded)
                if not is_async:
                    work.wait()
                return work
            for method, arguments, options in steps:
                getattr(group, method)(*arguments, **options)
        except PacelineError as error:
            raise in_torch_terms(error, self._terms) from None
        if after is not None:
            after()
        return FinishedWork(value)

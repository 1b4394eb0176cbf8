"""Call a training function again after each change of the ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from paceline.errors import name_ranks
from paceline.horovod.calls import drop_handles
from paceline.horovod.context import init, rank, shutdown, size
from paceline.horovod.elastic.state import State
from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.horovod.membership import elastic_group
from paceline.strategies import ELASTIC_ADVICE

_log = logging.getLogger(__name__)
_MOST_REPETITIONS: Final = 5
"""The number of times that the same ranks restart without progress."""
_REPEATED_COMMITS: Final = 1
"""A loop over ``state.batch`` repeats its last commit after each restart, so a single commit does not count as
progress."""


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function ``func(state, ...)``, so that it continues after a change of the ranks.

    All ranks first get the state of rank 0. If a rank dies, the operations of the other ranks raise
    HorovodInternalError, and these ranks restore their last commit. If a rank joins, :meth:`State.commit` and
    :meth:`State.check_host_updates` raise HostsUpdatedInterrupt on all ranks, which keep their states. In both cases
    the ranks connect again, the reset callbacks run, and all ranks get the state of rank 0, which is never a new rank.
    Then `func` is called again.

    Without ``paceline run --min-ranks`` the ranks do not change, and HorovodInternalError ends the training.
    """

    @functools.wraps(func)
    def call(state: State, *arguments: Any, **options: Any) -> Any:
        group, num_failures = elastic_group(), 0
        last: tuple[tuple[int, ...], int] = (), 0
        while True:
            members = () if group is None else group.members
            try:
                state.sync()
                if group is not None:
                    group.set_ready()
                return func(state, *arguments, **options)
            except HorovodInternalError as error:
                if group is None:
                    raise HorovodInternalError(
                        f"{error}. The training cannot continue with other ranks. {ELASTIC_ADVICE}"
                    ) from error
                is_repeated = members == last[0] and state.num_commits <= last[1] + _REPEATED_COMMITS
                num_failures = num_failures + 1 if is_repeated else 1
                last = members, state.num_commits
                if num_failures > _MOST_REPETITIONS:
                    raise
                state.restore()
                reason, start = str(error), "from the last commit"
            except HostsUpdatedInterrupt:
                reason, start = "new ranks have joined", "with the current state"
            shutdown()
            drop_handles()
            init()
            if rank() == 0:
                lost = [number for number, member in enumerate(members) if group and member not in group.members]
                reason = f"{name_ranks(lost)} died" if lost else reason
                _log.warning("%s; the training continues %s. Number of ranks: %d", reason, start, size())
            state.on_reset()

    return call

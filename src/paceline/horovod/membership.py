"""Connect the ranks of the program. In an elastic training, connect them again after each change of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

from paceline import collectives
from paceline.collectives import Group
from paceline.collectives.elastic import ElasticGroup
from paceline.collectives.start import load_kernels
from paceline.environment import environment
from paceline.errors import GroupClosedError, UsageError
from paceline.strategies import is_elastic

all_ranks: Group | None = None
"""The group of all ranks of the program, which remains after ``shutdown`` for the next ``init``."""
_elastic: ElasticGroup | None = None
"""This process's membership in an elastic training, in place of the group of all ranks."""


def elastic_group() -> ElasticGroup | None:
    """Return this process's membership in an elastic training; None if the number of ranks is fixed."""
    return _elastic


def meet(comm: Sequence[int] | None, start_timeout: timedelta, timeout: timedelta) -> Group:
    """Return a new group of all present ranks, or of the ranks in `comm`. All ranks must call this function.

    `timeout` limits each call of the group. If the number of ranks is fixed, `start_timeout` limits the first
    connection. In an elastic training, a new rank waits here until the other ranks call this function again.
    """
    global all_ranks
    if is_elastic(environment()):
        if comm is not None:
            raise UsageError(f"init(comm={list(comm)}): not supported with --min-ranks. Leave comm out")
        return _meet_elastic(timeout)
    if all_ranks is None:
        all_ranks = collectives.init(timeout=start_timeout)
    group = all_ranks.subgroup(comm or range(all_ranks.size), timeout=timeout)
    if group is None:
        raise UsageError(f"rank {all_ranks.rank} called init(comm={list(comm or ())}), which does not contain it")
    return group


def _meet_elastic(timeout: timedelta) -> Group:
    global _elastic
    if _elastic is not None:
        _elastic.admit(0)
        return _elastic.group
    from paceline.torch.strategies.elastic.place import find_place  # here, because the import takes time

    place = find_place(timeout)
    if place.is_newcomer:
        load_kernels()
    elastic = place.connect(timeout, None)
    try:
        elastic.enter(patience=timedelta(seconds=environment().horovod_elastic_timeout_s))
    except GroupClosedError:
        print("paceline: the training ended before this rank could take part", file=sys.stderr, flush=True)
        sys.exit(0)
    _elastic = elastic
    return elastic.group

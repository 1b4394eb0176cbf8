"""The caller's part of a run that calls a function: check the call, and collect the values and failures of ranks."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import cloudpickle

from paceline.command_options import words_of
from paceline.environment import environment
from paceline.errors import PeerError, UsageError, first_line, name_ranks
from paceline.launch.functions.node import FunctionCall
from paceline.launch.run.blame import RankFailure, choose_culprit, follow_names, waiting_time
from paceline.launch.run.options import RunOptions
from paceline.launch.run.setup import plan_roles
from paceline.launch.supervisor import describe_status
from paceline.strategies import ElasticFlags, StrategyFlags
from paceline.transport.security.authentication import check_or_make_token

END_S: Final = 15.0
"""Time limit for the end of the other nodes after a failure."""


def make_call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    num_nodes: int,
    nproc_per_node: int,
    strategy: str | None,
    servers: int | None,
    min_ranks: int | None = None,
    max_ranks: int | None = None,
) -> FunctionCall:
    """Check the options and pickle the function. Raises UsageError."""
    options = RunOptions(
        strategy=strategy,
        nproc_per_node=nproc_per_node,
        servers=servers,
        flags=StrategyFlags(elastic=ElasticFlags(min_ranks=min_ranks)),
        max_ranks=max_ranks,
    )
    plan = plan_roles(replace(options, nnodes=num_nodes), can_grow=max_ranks is not None)
    return FunctionCall(
        num_ranks=nproc_per_node,
        is_elastic=plan.is_elastic,
        num_more=plan.more_nodes,
        words=tuple(words_of(options)),
        program=pickle_call(function, arguments),
        token=check_or_make_token(environment().token, "PACELINE_TOKEN"),
        job=secrets.token_hex(8),
    )


def pickle_call(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Return the pickled function with its arguments. Raises UsageError."""
    try:
        return bytes(cloudpickle.dumps((function, tuple(arguments))))
    except Exception as error:
        raise UsageError(
            f"the function or an argument cannot be pickled: {first_line(error)}. Create this object in the function"
        ) from error


class RankResults:
    """The values and failures of the ranks of a run. Dask or Ray reports the end or the failure of each node."""

    def __init__(self, nodes: Sequence[str] | Mapping[int, str], num_ranks: int) -> None:
        """`nodes` are the nodes' names in messages, by number. Each node has `num_ranks` ranks."""
        self._nodes, self._num_ranks = nodes, num_ranks
        self._living = {*range(len(nodes))}
        self._values: dict[int, bytes] = {}
        self._failures: list[RankFailure] = []
        self._errors: dict[int, Exception] = {}
        """The error to raise for a failed rank."""
        self._failed_at = 0.0

    def add_end(self, number: int, status: int, reports: Mapping[int, bytes]) -> None:
        """Record the end of a node: its exit status, and the reports of its ranks."""
        self._living.discard(number)
        node = self._nodes[number]
        for rank, report in reports.items():
            if not report:
                continue
            value, error, text = pickle.loads(report)
            if value is not None:
                self._values[rank] = value
                continue
            cause: Exception = PeerError(f"rank {rank} failed on the {node}:\n\n{text}")
            with contextlib.suppress(Exception):  # an exception's own code may raise any error
                error = pickle.loads(error)
                error.__cause__ = cause
                cause = error
            self._add(RankFailure(rank, 1, tuple(text.encode().splitlines())), cause)
        ended = [rank for rank in self._ranks_of(number) if not reports.get(rank)]
        silent = [rank for rank in ended if rank not in reports] or ended
        if silent and (status != 1 or not self._failures):  # the status is 1 if a rank has raised an exception
            cause_of_end = describe_status(128 - status if status > 128 else status)  # 128 + N: killed by signal N
            text = f"{name_ranks(silent)} on the {node} {cause_of_end}, and returned no value"
            self._add(RankFailure(silent[0], status, ()), PeerError(f"{text}. See the output of the ranks"))

    def add_values(self, reports: Mapping[int, bytes]) -> None:
        """Record the values of a node of an elastic run, where a rank may have failed although its node has not."""
        values = {rank: pickle.loads(report)[0] for rank, report in reports.items() if report}
        self._values |= {rank: value for rank, value in values.items() if value is not None}

    def add_loss(self, number: int, reason: str) -> None:
        """Record that a node, or the worker of Dask on the node, has failed."""
        self._living.discard(number)
        error = PeerError(f"the {self._nodes[number]} has failed: {reason}")
        self._add(RankFailure(self._ranks_of(number)[0], -1, ()), error)

    def raise_cause(self) -> bool:
        """Raise the error of the rank that failed first, unless a later failure of another rank may be the cause.

        Return whether a rank has failed.
        """
        if not self._failures:
            return False
        culprit = choose_culprit(self._failures)
        living = [rank for number in self._living for rank in self._ranks_of(number)]
        waits_until = self._failed_at + waiting_time(self._failures, living)
        if culprit is None and (not living or time.monotonic() >= waits_until):
            culprit = follow_names(self._failures)[0]
        if culprit is not None:
            raise self._errors[culprit.rank]
        return True

    def load_values(self) -> list[Any]:
        """Return the values of all ranks, by rank."""
        return [pickle.loads(self._values[rank]) for rank in sorted(self._values)]

    def _ranks_of(self, number: int) -> range:
        return range(number * self._num_ranks, (number + 1) * self._num_ranks)

    def _add(self, failure: RankFailure, error: Exception) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._failures.append(failure)
        self._errors.setdefault(failure.rank, error)

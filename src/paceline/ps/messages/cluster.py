"""The settings and the tables of a cluster, and the messages about them between processes and the scheduler."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.protocol import Accept, Eventual, check_stale_policy, parse_consistency, parse_stale_policy
from paceline.protocol.bounds import Natural
from paceline.protocol.scheduler.messages import SchedulerSettings
from paceline.tables.bounds import NonFinitePolicy, TableNumber
from paceline.tables.non_finite import REFUSE, check_policy
from paceline.tables.spec import TableSpec


class ClusterSettings(SchedulerSettings, frozen=True, kw_only=True):
    """The settings of a cluster, from the command line to its members."""

    consistency: str = str(Eventual())
    """In the format of ``--consistency``."""
    stale: str = str(Accept())
    """The policy for stale gradients, in the format of ``--stale``."""
    min_replicas: int = 0
    """Replicas that must have a push before it is acknowledged."""
    non_finite: NonFinitePolicy = REFUSE
    """The servers' policy for infinities and NaN (:mod:`paceline.tables.non_finite`)."""

    def check(self) -> None:
        """Raise UsageError unless a cluster can have these settings."""
        servers, replicas = self.num_servers, self.replicas
        if servers < 1 or self.num_workers < 1:
            raise UsageError(
                f"servers={servers}, workers={self.num_workers}: a cluster needs at least 1 server and 1 worker"
            )
        if not 0 <= replicas < servers:
            needed = max(replicas, 0) + 1
            raise UsageError(
                f"replicas={replicas} with {servers} servers: a row and its replicas need {needed} servers. Add some, "
                "or lower replicas"
            )
        if not 0 <= self.min_replicas <= replicas:
            raise UsageError(
                f"min_replicas={self.min_replicas} with replicas={replicas}: expected 0 to {replicas}. Add replicas, "
                "or lower min_replicas"
            )
        check_stale_policy(parse_consistency(self.consistency), parse_stale_policy(self.stale))
        check_policy(self.non_finite)


class KnownTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table's number, its first spec, and its current spec, whose hyperparameters may have changed."""

    number: TableNumber
    declared: TableSpec
    spec: TableSpec
    revision: Natural = 0
    """The number of the last change of its hyperparameters."""

    def __post_init__(self) -> None:
        if (self.declared.name, self.declared.kind) != (self.spec.name, self.spec.kind):
            raise UsageError(f"table {self.number} was declared as {self.declared} and is {self.spec} now")


class DeclareTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Assign a number to a table; answered by int. Raises TableMismatchError if it has another spec."""

    spec: TableSpec


class NoteUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change the hyperparameters of a table (the rule itself must be the same).

    Answered by the number of this change, which then goes to all servers with SetUpdate.
    """

    table: str
    update: dict[str, Any]


class ListTables(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by a list of TableSpec, with the current hyperparameters."""

"""The place of this process in an elastic training, which its launcher or the coordinator has assigned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from paceline.collectives.elastic import ElasticGroup
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.meeting.own_launcher import OwnLauncher, announce_rank
from paceline.protocol.balance import Balance
from paceline.protocol.stragglers import StepTimes
from paceline.strategies import ELASTIC_ADVICE, ElasticOptions
from paceline.transport import TLS, Address


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlace:
    """The address of the coordinator, the number (incarnation) of this process, and the options of the training."""

    address: Address
    token: str
    tls: TLS | None
    member: int
    is_newcomer: bool
    options: ElasticOptions
    launcher: OwnLauncher | None = None
    """The connection by which this rank reports its end; None if its launcher reports it."""

    def connect(self, timeout: timedelta, balanced_batch: int | None) -> ElasticGroup:
        """Connect to the coordinator.

        `balanced_batch` is the number of samples in a step that the ranks divide in proportion to their speeds.
        """
        factor = self.options.drop_stragglers
        has_times = factor is not None or balanced_batch is not None
        return ElasticGroup(
            self.address,
            self.token,
            self.member,
            is_newcomer=self.is_newcomer,
            tls=self.tls,
            timeout=timeout,
            step_times=StepTimes(factor or math.inf, self.options.min_ranks) if has_times else None,
            balance=None if balanced_batch is None else Balance(balanced_batch),
        )


def find_place(timeout: timedelta) -> ElasticPlace:
    """Return the place that the launcher has assigned. Without one, request a place from ``PACELINE_COORDINATOR``.

    Raises UsageError if the environment has no coordinator, and the errors of
    :func:`~paceline.meeting.own_launcher.announce_rank`.
    """
    settings = environment()
    tls, options, member = TLS.of_environment(settings), ElasticOptions.of_environment(settings), settings.incarnation
    if options is not None and member is not None and settings.master_addr and settings.master_port and settings.token:
        return ElasticPlace(
            address=Address("tcp", settings.master_addr, settings.master_port),
            token=settings.token,
            tls=tls,
            member=member,
            is_newcomer=member >= options.num_ranks,
            options=options,
        )
    if settings.coordinator is None:
        raise UsageError(f"ElasticAllReduce() needs a coordinator. {ELASTIC_ADVICE}")
    launcher = announce_rank(settings, tls, timeout.total_seconds())
    return ElasticPlace(
        address=launcher.address,
        token=launcher.token,
        tls=tls,
        member=launcher.member,
        is_newcomer=launcher.is_newcomer,
        options=ElasticOptions.decode(launcher.options),
        launcher=launcher,
    )

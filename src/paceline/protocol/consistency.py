"""Two settings of a cluster: the maximum delay between workers, and the policy for stale gradients.

:mod:`paceline.protocol.clocks` enforces the consistency; the servers apply the policy. ``parse_consistency(str(c)) ==
c`` and ``parse_stale_policy(str(p)) == p``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """Every worker sees all updates of the previous iteration. The result is as if one process trained on all batches.

    The gradients of one iteration are aggregated in rank order and applied once. Source: OSDI'14 "Scaling Distributed
    Machine Learning with the Parameter Server", section 3.4 (bulk synchronous, Valiant 1990). Raises UsageError if
    `aggregate` is neither "sum" nor "mean".
    """

    aggregate: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        if self.aggregate not in ("sum", "mean"):
            raise UsageError(f"Sequential(aggregate={self.aggregate!r}): expected 'sum' or 'mean'.")

    @property
    def tau(self) -> int | None:
        """The maximum delay in iterations: 0."""
        return 0

    def __str__(self) -> str:
        return "sequential" if self.aggregate == "sum" else f"sequential:{self.aggregate}"


@dataclass(frozen=True, slots=True)
class BoundedDelay:
    """A worker runs at most ``tau`` iterations ahead of the slowest live worker; updates are applied on arrival.

    Raises UsageError for a negative ``tau``. Source: OSDI'14, section 3.4; Ho et al. 2013 "More Effective Distributed
    ML via a Stale Synchronous Parallel Parameter Server".
    """

    tau: int
    """The maximum delay in iterations.

    With 0, workers wait as with :class:`Sequential`, but servers apply updates on arrival.
    """

    def __post_init__(self) -> None:
        _check_count("BoundedDelay", "tau", self.tau)

    def __str__(self) -> str:
        return f"bounded:{self.tau}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eventual:
    """Workers never wait for each other; updates are applied on arrival. Source: OSDI'14, section 3.4."""

    @property
    def tau(self) -> int | None:
        """The maximum delay: None, because the delay has no limit."""
        return None

    def __str__(self) -> str:
        return "eventual"


Consistency: TypeAlias = Sequential | BoundedDelay | Eventual


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Apply stale gradients unchanged."""

    def __str__(self) -> str:
        return "accept"


@dataclass(frozen=True, slots=True)
class DropStale:
    """Drop gradients staler than ``beyond`` (Ringmaster ASGD, 2025). Raises UsageError if ``beyond`` is negative."""

    beyond: int
    """The largest staleness of a gradient that is still applied, in iterations."""

    def __post_init__(self) -> None:
        _check_count("DropStale", "beyond", self.beyond)

    def __str__(self) -> str:
        return f"drop:{self.beyond}"


@dataclass(frozen=True, slots=True)
class DelayCompensate:
    """Correct stale gradients, to first order, for the change of the weights since the gradients were computed.

    Source: DC-ASGD, Zheng et al. 2017 "Asynchronous Stochastic Gradient Descent with Delay Compensation". The update
    rules implement the arithmetic.

    Raises:
        UsageError: ``strength`` is negative, infinite or NaN.
    """

    strength: float = 0.04
    """The weight of the correction: the paper's lambda, which is 0.04 for CIFAR-10."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise UsageError(f"DelayCompensate(strength={self.strength!r}): expected a finite number, at least 0.")

    def __str__(self) -> str:
        return f"compensate:{self.strength!r}"


StalePolicy: TypeAlias = Accept | DropStale | DelayCompensate


def parse_consistency(text: str) -> Consistency:
    """Parse ``sequential``, ``sequential:mean``, ``bounded:4`` or ``eventual``. Raises UsageError for other texts."""
    name, colon, argument = text.strip().partition(":")
    if name == "sequential" and not colon:
        return Sequential()
    if name == "sequential" and argument == "sum":
        return Sequential(aggregate="sum")
    if name == "sequential" and argument == "mean":
        return Sequential(aggregate="mean")
    if name == "bounded" and _is_count(argument):
        return BoundedDelay(tau=int(argument))
    if name == "eventual" and not colon:
        return Eventual()
    raise UsageError(
        f"consistency={text!r}: expected 'sequential', 'sequential:mean', 'bounded:N' with N iterations of delay (such "
        "as 'bounded:4'), or 'eventual'"
    )


def parse_stale_policy(text: str) -> StalePolicy:
    """Parse ``accept``, ``drop:8``, ``compensate`` or ``compensate:0.04``. Raises UsageError for other texts."""
    name, colon, argument = text.strip().partition(":")
    if name == "accept" and not colon:
        return Accept()
    if name == "drop" and _is_count(argument):
        return DropStale(beyond=int(argument))
    if name == "compensate" and not colon:
        return DelayCompensate()
    if name == "compensate":
        try:
            return DelayCompensate(strength=float(argument))
        except ValueError:  # not a number, or out of DelayCompensate's range; the message below is for both cases
            pass
    raise UsageError(
        f"Unknown policy for stale gradients {text!r}: expected 'accept', 'drop:N' with N the largest "
        "staleness in iterations (such as drop:8), or 'compensate:X' with X a finite number, at least 0 "
        "(such as compensate:0.04)."
    )


def check_stale_policy(consistency: Consistency, stale: StalePolicy) -> None:
    """Raise UsageError for a stale policy under sequential consistency, where gradients are never stale."""
    if isinstance(consistency, Sequential) and not isinstance(stale, Accept):
        raise UsageError(
            f"the stale-gradient policy {stale} has no effect under sequential consistency, because gradients are "
            "never stale: leave it out, or choose bounded or eventual"
        )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18


def _check_count(owner: str, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{owner}({field}={value!r}): expected a whole number of iterations, at least 0.")

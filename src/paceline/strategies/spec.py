"""The declaration of a strategy: its class, its needs and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
from typing_extensions import Self

from paceline.environment import Environment
from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """The valid options of a strategy. Abstract."""

    strategy: ClassVar[str]
    """The name of the strategy."""

    @property
    def num_processes(self) -> int:
        """Number of processes that the options are for."""
        raise NotImplementedError

    @classmethod
    def of_environment(cls, environment: Environment) -> Self | None:
        """Return the launcher's options; None without a launcher, and under another strategy."""
        if environment.strategy_options is None or environment.strategy != cls.strategy:
            return None
        return cls.decode(environment.strategy_options)

    def encode(self) -> str:
        """Return the options as text, for an environment variable."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Decode the result of :meth:`encode`. Raises UsageError."""
        from paceline.transport import register_type  # it imports NumPy, which listing the strategies does not need

        try:
            return msgspec.json.decode(text, type=register_type(cls))
        except msgspec.MsgspecError as error:
            raise UsageError(f"PACELINE_STRATEGY_OPTIONS={text!r} was not written by paceline run: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """Declare a strategy to the launcher, to the command line and to ``paceline.torch.strategy()``."""

    name: str
    """The name on the command line and in ``PACELINE_STRATEGY``."""
    meaning: str
    """Where the processes, the model and its gradients are, in one line."""
    implementation: str
    """The class, as ``module:class``. Only ``paceline.torch`` imports it."""
    is_one_process: bool = False
    """Whether it runs in a single process, on any number of devices."""
    has_replicas: bool = False
    """Whether ``--replicas`` is a number of replicas of the model in one process."""
    consistency: str | None = None
    """The servers' default consistency; None for a strategy without servers."""
    filters: tuple[Literal["gradients", "tables"], ...] = ()
    """Messages that filters apply to: gradients between ranks, and the servers' tables."""
    flags: tuple[str, ...] = ()
    """Fields of :class:`~paceline.strategies.StrategyFlags` that the strategy uses."""
    without_flags: str = ""
    """A remark about strategies that do not use the flags, for an error message: ``has no pipeline stages``."""
    choose_options: Callable[[Mapping[str, Any], int | None], StrategyOptions] | None = None
    """Make the options from the given flags, by name, and the number of processes. Raises UsageError.

    The number is None to find the number of processes that the flags require; it is None only if
    `flags_set_processes`.
    """
    flags_set_processes: bool = False
    """Whether the flags determine the number of processes, if ``--nproc-per-node`` is missing."""
    neutral_settings: tuple[str, ...] = ()
    """Arguments of the class that do not change the result. ``strategy()`` ignores them under other strategies."""

    @property
    def has_servers(self) -> bool:
        return self.consistency is not None

"""Define the declaration of a strategy: its class, requirements and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import msgspec
from typing_extensions import Self

from paceline.environment import Environment, parse_duration
from paceline.errors import UsageError

_SNAPSHOT_EVERY_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """The valid options of a strategy. Abstract."""

    strategy: ClassVar[str]
    """The strategy's name."""

    @property
    def num_processes(self) -> int:
        """Number of processes that the options require."""
        raise NotImplementedError

    @classmethod
    def of_environment(cls, environment: Environment) -> Self | None:
        """Return the options that the launcher set; None without a launcher, or if it chose another strategy."""
        if environment.strategy_options is None or environment.strategy != cls.strategy:
            return None
        return cls.decode(environment.strategy_options)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        from paceline.transport import register_type  # not at the top, because it imports NumPy

        try:
            return msgspec.json.decode(text, type=register_type(cls))
        except msgspec.MsgspecError as error:
            raise UsageError(f"PACELINE_STRATEGY_OPTIONS={text!r} was not written by paceline run: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """The declaration of a strategy for the launcher, the command line and ``paceline.torch.strategy()``."""

    name: str
    """The name on the command line and in ``PACELINE_STRATEGY``."""
    meaning: str
    """One line for the list of strategies: where the processes, the model and the gradients are."""
    implementation: str
    """The strategy's class, as ``module:class``. Only ``paceline.torch`` imports the class."""
    elastic_implementation: str | None = None
    """The class for ranks that may die and join; None if the strategy needs all ranks."""
    only_copies: str = ""
    """The data that no other rank has, so that the training cannot continue without a dead rank. For error messages."""
    is_one_process: bool = False
    """Whether the strategy runs in a single process, on any number of devices."""
    has_replicas: bool = False
    """Whether ``--replicas`` counts replicas of the model in one process."""
    consistency: str | None = None
    """The servers' default consistency; None for a strategy without servers."""
    takes_snapshots: bool = False
    """Whether the training can write snapshots by itself, and continue from them after a restart."""
    filters: tuple[Literal["gradients", "tables"], ...] = ()
    """Messages that filters may change: gradients between ranks, and the servers' tables."""
    flags: tuple[str, ...] = ()
    """Fields of :class:`~paceline.strategies.StrategyFlags` that the strategy uses."""
    without_flags: str = ""
    """The reason why other strategies do not use the flags, for error messages: ``has no pipeline stages``."""
    choose_options: Callable[[Mapping[str, Any], int | None], StrategyOptions | None] | None = None
    """Create the options, given the flags by name and the number of processes. Raises UsageError.

    If `flags_set_processes`, the number may be None. The options then contain the number that the flags require.
    """
    flags_set_processes: bool = False
    """Whether the flags determine the number of processes if ``--nproc-per-node`` is missing."""
    neutral_settings: tuple[str, ...] = ()
    """Arguments of the class that do not change the result. ``strategy()`` ignores them for other strategies."""

    def check_snapshots(
        self, directory: object, every: str | None, name: str = "snapshot_dir", name_of_every: str = "snapshot_every"
    ) -> float:
        """Return the seconds between two snapshots in `directory`. Raises UsageError, with the names of the values."""
        if not self.takes_snapshots:
            raise UsageError(f"{name}='{directory}': not supported by strategy {self.name}. Leave it out")
        seconds = _SNAPSHOT_EVERY_S if every is None else parse_duration(every)
        if seconds is None:
            raise UsageError(f"{name_of_every}={every!r}: expected a time such as 30s, 5m or 1h")
        return seconds

    @property
    def has_servers(self) -> bool:
        return self.consistency is not None

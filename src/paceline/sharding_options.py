"""What a sharded training is asked for: the options of ``--strategy sharded``, and what follows from them. Pure.

Both the launcher, which knows no torch, and ``paceline.torch`` go by it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """How a model is sharded, checked. Make one with :func:`choose_sharding`."""

    units: tuple[str, ...]
    """Modules that are gathered at once, ``*`` for any part of a name; empty: chosen by the model."""
    shards: int
    """Processes that a model is sharded over."""
    data_parallel: int
    """Groups of that many processes, side by side, each with its own part of the data."""

    def encode(self) -> str:
        """Return it as text, for an environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ShardingOptions:
        """Return what :meth:`encode` was called on. Raises UsageError."""
        try:
            found = json.loads(text)
            return cls(**{**found, "units": tuple(found["units"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"PACELINE_SHARDING={text!r} is not what paceline run writes: {error}") from None


def choose_sharding(shard: str | None, data_parallel: int | None, processes: int) -> ShardingOptions:
    """Check the options of a sharded training on `processes`, and fill in what was not said (None).

    Raises UsageError for numbers that do not fit together, and for names that are empty or come twice.
    """
    num_groups = 1 if data_parallel is None else data_parallel
    if num_groups < 1 or processes % num_groups:
        raise UsageError(
            f"--data-parallel {num_groups}: expected a divisor of the {processes} processes: so many groups of them "
            "shard the model, each among its own"
        )
    units = () if shard is None else tuple(name.strip() for name in shard.split(","))
    if "" in units or len(set(units)) < len(units):
        raise UsageError(f"--shard {shard}: expected different module names with commas between them, as blocks.*")
    return ShardingOptions(units=units, shards=processes // num_groups, data_parallel=num_groups)

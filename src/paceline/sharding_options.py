"""Define and check the options of ``--strategy sharded``. Pure.

Used by the launcher, which does not import torch, and by ``paceline.torch``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """The valid options of a sharded training, created by :func:`choose_sharding`."""

    units: tuple[str, ...]
    """Modules that are gathered as a whole, with ``*`` for any part of a name; empty: chosen by the model."""
    shards: int
    """Number of processes for the shards of one model."""
    data_parallel: int
    """Number of such groups of processes, each with its own part of the data."""

    def encode(self) -> str:
        """Return the options as text, for an environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ShardingOptions:
        """Decode the result of :meth:`encode`. Raises UsageError."""
        try:
            found = json.loads(text)
            return cls(**{**found, "units": tuple(found["units"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"PACELINE_SHARDING={text!r} was not written by paceline run: {error}") from None


def choose_sharding(shard: str | None, data_parallel: int | None, processes: int) -> ShardingOptions:
    """Check the options of a sharded training on `processes`, and set the defaults.

    Raises UsageError for inconsistent numbers, and for empty or repeated names.
    """
    num_groups = 1 if data_parallel is None else data_parallel
    if num_groups < 1 or processes % num_groups:
        raise UsageError(
            f"--data-parallel {num_groups}: expected a divisor of the {processes} processes, because each group "
            "of processes shards the model among its own processes"
        )
    units = () if shard is None else tuple(name.strip() for name in shard.split(","))
    if "" in units or len(set(units)) < len(units):
        raise UsageError(f"--shard {shard}: expected different module names with commas between them, such as blocks.*")
    return ShardingOptions(units=units, shards=processes // num_groups, data_parallel=num_groups)

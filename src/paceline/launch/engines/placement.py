"""The place of a launcher among the launchers that an engine has started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from typing_extensions import Self

from paceline.decoded_types import register_type
from paceline.environment import Environment
from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The number and the node of this launcher among the launchers that an engine has started."""

    launcher: int
    """Number of this launcher, from 0."""
    num_launchers: int
    local_launcher: int = 0
    """Number of this launcher among those on its node."""
    num_local_launchers: int = 1
    num_cores: int | None = None
    """Number of cores for all launchers on this node; None if the engine does not report it."""
    address: str
    """Address of launcher 0's node."""
    job: str
    """Identifier of the engine's job, which all its launchers share."""
    step: str = ""
    """Identifier of these launchers within the job."""
    num_ranks: tuple[int, ...] | None = None
    """Number of ranks of each launcher; None if the options set one number for all launchers."""
    can_grow: bool = False
    """Whether the engine may start more launchers later, with numbers from `num_launchers` on."""

    @classmethod
    def on_nodes(cls, addresses: Sequence[str], number: int, job: str, **fields: Any) -> Self:
        """Return the placement of launcher `number`. `addresses` are the addresses of all launchers' nodes."""
        return cls(
            launcher=number,
            local_launcher=addresses[:number].count(addresses[number]),
            num_local_launchers=addresses.count(addresses[number]),
            address=addresses[0],
            job=job,
            **{"num_launchers": len(addresses), **fields},
        )

    @classmethod
    def of_environment(cls, variables: Environment) -> Self | None:
        """Return the placement that :meth:`variables` stores; None without one. Raises UsageError."""
        if variables.placement is None:
            return None
        try:
            return msgspec.json.decode(variables.placement, type=register_type(cls))
        except msgspec.MsgspecError as error:
            raise UsageError(f"the environment variable PACELINE_PLACEMENT is unreadable: {error}. Unset it") from None

    def variables(self) -> dict[str, str]:
        return {"PACELINE_PLACEMENT": msgspec.json.encode(self).decode()}

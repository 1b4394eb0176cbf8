"""Transition tables: the states of one kind of object in a machine, as data.

``docs/diagrams.py`` draws the diagrams of the protocol's page from the tables. Tests drive each machine at random and
check that it makes exactly the transitions of its table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OUTSIDE: Final = "[*]"
"""The state of an object before the machine knows the object, and after the machine has dropped it."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of a table: `event` moves an object from state `source` to state `target`.

    If both states are equal, the event changes data or is answered. An event without effect has no row.
    """

    source: str
    event: str
    """The name of the event's class, or of the machine's method."""
    target: str
    instruction: str = ""
    """The name of the resulting instruction; empty without one."""
    when: str = ""
    """The condition, if one event has several rows. The condition is only for readers; no test checks it."""


@dataclass(frozen=True, slots=True)
class StateTable:
    """The states of one `thing`, without OUTSIDE, and the transitions between them."""

    thing: str
    states: tuple[str, ...]
    transitions: tuple[Transition, ...]

    def target(self, source: str, event: str) -> str:
        """Return the next state. The event must have exactly one row in this state."""
        (row,) = [row for row in self.transitions if (row.source, row.event) == (source, event)]
        return row.target

"""Transition tables: what may become of one thing in the hands of a machine, as data.

A machine that decides about one kind of thing (a worker, a shard, a push) has a :class:`StateTable` of it beside it.
``docs/diagrams.py`` draws the diagrams of the protocol's page from the tables. Tests drive each machine at random and
check that it takes every transition of its table and no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OUTSIDE: Final = "[*]"
"""The state of what the machine does not know yet, or does not know any more."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of a table: by `event` a thing in state `source` comes to be in `target`.

    A row whose `source` is its `target` is of an event that changes something within the state, or is answered. An
    event that does nothing to the thing has no row.
    """

    source: str
    event: str
    """The name of the event's class, or of what is called where the machine has calls for events."""
    target: str
    instruction: str = ""
    """The name of the instruction that tells of this thing; empty if there is none."""
    when: str = ""
    """What decides where there are several rows for one event: words for the reader, which no test checks."""


@dataclass(frozen=True, slots=True)
class StateTable:
    """All that may become of one `thing`: its states, besides OUTSIDE, and the ways between them."""

    thing: str
    states: tuple[str, ...]
    transitions: tuple[Transition, ...]

    def target(self, source: str, event: str) -> str:
        """Return what becomes of a thing in this state by an event that has one row there."""
        (row,) = [row for row in self.transitions if (row.source, row.event) == (source, event)]
        return row.target

    def mermaid(self) -> str:
        """Return the diagram as text for Mermaid: ``events / instruction`` at each arrow."""
        arrows: dict[tuple[str, str, str], list[str]] = {}
        for row in self.transitions:
            event = f"{row.event} ({row.when})" if row.when else row.event
            arrows.setdefault((row.source, row.target, row.instruction), []).append(event)
        lines = ["stateDiagram-v2"]
        for (source, target, instruction), events in arrows.items():
            told = f" / {instruction}" if instruction else ""
            lines.append(f"    {source} --> {target}: {', '.join(events)}{told}")
        return "\n".join(lines)

    def validate(self) -> None:
        """Assert the invariants."""
        rows = {(row.source, row.event, row.target, row.instruction) for row in self.transitions}
        assert len(rows) == len(self.transitions), "a row twice"
        named = {state for row in self.transitions for state in (row.source, row.target)}
        assert named - {OUTSIDE} == set(self.states), "a state without a row, or a row of no state"

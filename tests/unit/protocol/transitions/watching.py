"""The observed transitions of a state machine, for the comparison with its table."""

from __future__ import annotations

from paceline.protocol.transitions import OUTSIDE, StateTable

Sight = tuple[object, ...]
"""The observed state of an object, with other data that events may change."""


class Watch:
    """Collects transitions of objects; at the end they must equal the table."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._seen: set[tuple[object, str, object, str]] = set()

    def saw(self, before: Sight, event: object, after: Sight, instruction: object = None) -> None:
        """Record the effect of an event or call on an object, and the instruction that reported the effect."""
        if before != after or instruction is not None:
            instruction_name = "" if instruction is None else type(instruction).__name__
            name = event if isinstance(event, str) else type(getattr(event, "message", event)).__name__
            self._seen.add((before[0], name, after[0], instruction_name))

    @property
    def has_seen_all(self) -> bool:
        """Whether all transitions of the table occurred."""
        return self._rows <= self._seen

    @property
    def _rows(self) -> set[tuple[object, str, object, str]]:
        return {(row.source, row.event, row.target, row.instruction) for row in self._table.transitions}

    def ends(self) -> None:
        check_table(self._table)
        rows = self._rows
        wrong = [f"{row}: seen, but not in the table" for row in sorted(map(repr, self._seen - rows))]
        wrong += [f"{row}: in the table, but never seen" for row in sorted(map(repr, rows - self._seen))]
        assert not wrong, "\n".join([f"The table of {self._table.thing}:", *wrong])


def check_table(table: StateTable) -> None:
    """Assert that rows are distinct, and that every state has a row."""
    rows = {(row.source, row.event, row.target, row.instruction) for row in table.transitions}
    assert len(rows) == len(table.transitions), "a duplicate row"
    named = {state for row in table.transitions for state in (row.source, row.target)}
    assert named - {OUTSIDE} == set(table.states), "a state has no row, or a row has no state"

"""State of one end of a connection for the keys of a table."""

from __future__ import annotations

from paceline.filters.keys.caching import KeyCaching, KeyLists
from paceline.filters.keys.numbers import KeyNumbers, ReceivedNumbers, SentNumbers


class KeyMemory:
    """Key lists and key numbers that filters remember, at the sender or at the receiver."""

    def __init__(self, caching: KeyCaching | None, numbering: KeyNumbers | None, *, sends: bool) -> None:
        self.lists = None if caching is None else KeyLists(caching.megabytes << 20)
        self.sent = SentNumbers(numbering.megabytes) if numbering is not None and sends else None
        self.received = ReceivedNumbers(numbering.megabytes) if numbering is not None and not sends else None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the keys at the receiver's end."""
        lists = 0 if self.lists is None else self.lists.num_bytes
        return lists + (0 if self.received is None else self.received.num_bytes)

    def clear(self) -> None:
        """Remove all keys."""
        for each in (self.lists, self.sent, self.received):
            if each is not None:
                each.clear()

"""What one end of a connection knows of the keys of a table that were sent on it."""

from __future__ import annotations

from paceline.filters.keys.caching import KeyCaching, KeyLists
from paceline.filters.keys.numbers import KeyNumbers, ReceivedNumbers, SentNumbers


class KeyMemory:
    """Lists of keys and numbers of keys, as far as filters remember them; of the sender, or of the receiver."""

    def __init__(self, caching: KeyCaching | None, numbering: KeyNumbers | None, *, sends: bool) -> None:
        self.lists = None if caching is None else KeyLists(caching.megabytes << 20)
        self.sent = SentNumbers(numbering.megabytes) if numbering is not None and sends else None
        self.received = ReceivedNumbers(numbering.megabytes) if numbering is not None and not sends else None

    @property
    def num_bytes(self) -> int:
        """What the keys take, on the receiver's end."""
        lists = 0 if self.lists is None else self.lists.num_bytes
        return lists + (0 if self.received is None else self.received.num_bytes)

    def clear(self) -> None:
        """Forget all."""
        for each in (self.lists, self.sent, self.received):
            if each is not None:
                each.clear()

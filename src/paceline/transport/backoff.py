"""How long to wait between tries to reach somebody who may not be there yet."""

from __future__ import annotations

import math
import random


class Backoff:
    """Pauses that double from the first to the longest one.

    Each is cut by a random part of at most `spread` (0 to 1): those who lose the same peer at the same moment shall not
    all come back at the same one.
    """

    def __init__(self, first_s: float, longest_s: float, *, spread: float = 0.0) -> None:
        self._first_s, self._longest_s, self._spread = first_s, longest_s, spread
        self._pause_s = first_s

    def next_s(self, left_s: float = math.inf) -> float:
        """Return the next pause, of at most the time that is left."""
        pause_s = self._pause_s * random.uniform(1.0 - self._spread, 1.0)
        self._pause_s = min(2.0 * self._pause_s, self._longest_s)
        return max(min(pause_s, left_s), 0.0)

    def reset(self) -> None:
        """Begin with the first pause again."""
        self._pause_s = self._first_s

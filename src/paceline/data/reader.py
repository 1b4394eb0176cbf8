"""What every format's reader offers to the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from paceline.data.bad_lines import BadLine
from paceline.data.batch import Batch

Report = Callable[[int, Sequence[BadLine]], None]
"""Takes a number of bad lines and descriptions of the first of them."""

BLOCK_BYTES = 1 << 20
"""So much text is read and parsed at a time."""


class ShardReader(Protocol):
    """Reads shards of one file; it keeps its place, so rising shard numbers cost nothing twice."""

    num_shards: int | None
    """None as long as it is unknown."""

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """The shard's rows in batches of the reader's own size, labels as the file has them; none behind the end."""

    def close(self) -> None:
        """Close the file."""

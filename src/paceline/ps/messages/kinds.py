"""Kinds and flags of the frames between the processes of a cluster."""

from __future__ import annotations

from typing import Final

# Kinds of frames.
PUSH: Final = 16
PULL: Final = 17
PUSH_PULL: Final = 18
TICK: Final = 19
ACK: Final = 20
VALUES: Final = 21
CALL: Final = 24
RESULT: Final = 25
NOTICE: Final = 26
SYNCED: Final = 27
"""From a worker, behind all that it has sent again after a change of the map: epoch is the map's version, clock the
worker's, sequence its rank, flags 1 if it takes part in the iterations. No answer."""

# Kinds of data frames behind filters (:mod:`paceline.filters`). The first of a table on a connection has a
# :class:`FilterInfo` as its meta.
FILTERED_PUSH: Final = 28
FILTERED_PULL: Final = 29
FILTERED_PUSH_PULL: Final = 30
UNKNOWN_KEYS: Final = 31
"""The server does not know (any more) what a filtered request refers to, or has refused one before for that: it has
taken nothing of it. The client sends that one as it was before the filters, and all behind it, in order.
"""

# Kinds of frames between servers.
FORWARD: Final = 32
"""A push goes down a chain; meta is a :class:`ForwardInfo`, the body keys and gradients. Answered by FORWARDED."""
FORWARDED: Final = 33
STATE: Final = 34
"""A bucket whole, for a server that is being filled; meta is a :class:`StateInfo`. Answered by STATE_TAKEN."""
STATE_TAKEN: Final = 35
"""clock is how many microseconds of a processor that took."""
READY: Final = 37
"""Behind all that a member of a chain has forwarded to its primary: that was all. epoch is the map's version."""
CLOCKS: Final = 36
"""What a server that is being filled has to know of the tables and workers: meta is a :class:`ClocksInfo`."""
CHECK: Final = 40
"""What a bucket is here, behind all that was forwarded; meta is a :class:`CheckInfo`. No answer."""
PING: Final = 38
"""Are you there? Answered by PONG, of any version of the map."""
PONG: Final = 39

# Flags of data frames.
TICKS: Final = 1
"""The push is the last of its iteration: it ticks the worker's clock."""
RANGE: Final = 2
"""Dense: the body begins with (start, stop), two uint64, instead of keys."""
EXACT: Final = 16
"""What is pushed counts something, and is applied as it is: no policy for stale gradients alters it."""
FILTERED: Final = 8
"""Of VALUES: the body is behind filters. On the server, of a request: so is to be its answer."""
DROPPED: Final = 4
"""In an ACK or VALUES: the gradient was too stale and was dropped."""

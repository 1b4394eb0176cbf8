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
"""A worker has resent all its requests after a new view: epoch is the view's version, clock the worker's, sequence its
rank, flags 1 if it takes part in the iterations. No answer."""

# Kinds of filtered data frames (:mod:`paceline.filters`). The first frame of a table on a connection has a
# :class:`FilterInfo` as its meta.
FILTERED_PUSH: Final = 28
FILTERED_PULL: Final = 29
FILTERED_PUSH_PULL: Final = 30
UNKNOWN_KEYS: Final = 31
"""The server lacks the state of a filtered request, or has rejected an earlier request for that reason. It has applied
nothing of the request. The client resends this request without filters, and then all later ones, in order.
"""

# Kinds of frames between servers.
FORWARD: Final = 32
"""A push for the next server of a chain; meta is a :class:`ForwardInfo`, the body keys and gradients. Answered by
FORWARDED."""
FORWARDED: Final = 33
STATE: Final = 34
"""A whole bucket for a server that is being filled; meta is a :class:`StateInfo`. Answered by STATE_TAKEN."""
STATE_TAKEN: Final = 35
"""clock is the processor time of the receiver, in microseconds."""
READY: Final = 37
"""A member of a chain has forwarded everything to its new primary. epoch is the view's version."""
CLOCKS: Final = 36
"""Tables and workers, for a server that is being filled: meta is a :class:`ClocksInfo`."""
CHECK: Final = 40
"""The state of a bucket after all forwarded pushes, to compare; meta is a :class:`CheckInfo`. No answer."""
PING: Final = 38
"""A sign of life is requested. Answered by PONG, whatever the version of the view."""
PONG: Final = 39

# Flags of data frames.
TICKS: Final = 1
"""The push is the last of its iteration: it ticks the worker's clock."""
RANGE: Final = 2
"""Dense: the body begins with (start, stop), two uint64, instead of keys."""
EXACT: Final = 16
"""The pushed values are counts and are applied unchanged: the policy for stale gradients does not apply."""
FILTERED: Final = 8
"""In VALUES: the body is filtered. In the server's record of a request: its answer must be filtered."""
DROPPED: Final = 4
"""In an ACK or VALUES: the gradient was too stale and was dropped."""

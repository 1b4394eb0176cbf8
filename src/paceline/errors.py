"""Define the tree of exceptions.

Every exception that Paceline raises intentionally is a :class:`PacelineError`. The branches separate errors of the
caller (:class:`UsageError` and its subclasses, which are also ``ValueError``), the data, a peer, or the network. Every
message is one or two sentences: the problem with the received value, the cause, and the remedy. Text from other
processes or files passes through :func:`printable`.
"""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str, max_chars: int = 1000) -> str:
    """Return a text of unknown origin in a safe form: one line of at most ``max_chars``, without control
    characters.
    """
    text = text[: max_chars + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


class PacelineError(Exception):
    """Root of all exceptions that Paceline raises intentionally."""


class UsageError(PacelineError, ValueError):
    """The caller passed an invalid value: a wrong dtype, shape, option or combination."""


class TableMismatchError(UsageError):
    """A table was declared again with a different kind, dim, size or update rule."""


class NonFiniteError(UsageError):
    """A push contained NaN or Inf. The whole push was rejected, and the table is unchanged."""


class DataError(PacelineError):
    """A data file is missing, empty, truncated, malformed or in another format than specified."""


class ModelError(PacelineError):
    """A saved model is missing, damaged or of another layout, or could not be written."""


class PeerError(PacelineError):
    """Another process of the cluster failed or answered with an error."""


class NoRoomError(PeerError):
    """A server lacks memory or disk space for a request. The request was rejected, and nothing has changed."""


class ProtocolError(PeerError):
    """A peer sent an invalid frame: wrong magic, version, kind or length."""


class AuthenticationError(PeerError):
    """A peer does not have the cluster's token, or its TLS certificate is not trusted."""


class VersionError(PeerError):
    """A peer runs a version of Paceline with an incompatible protocol."""


class ConnectionLostError(PeerError):
    """The connection to a peer broke, and reconnection failed within the time allowed."""


class ModelLostError(PeerError):
    """So many servers died that rows were lost. :attr:`resume_from` is the directory of snapshots, if any."""

    def __init__(self, message: str, resume_from: str | None = None) -> None:
        super().__init__(message)
        self.resume_from = resume_from


class LostRowsError(PeerError):
    """The examples in the memory of lost workers are missing, so the workers must read all data again."""


class DeadlineError(PeerError):
    """A wait timed out. The message names the awaited process, the purpose and the duration."""


class StaleEpochError(PeerError):
    """A request used an old view of the cluster. The client retries automatically in the new view."""


class CollectiveError(PeerError):
    """A collective operation failed on some rank; the group refuses further work."""


class MismatchError(CollectiveError, ValueError):
    """Ranks called different operations, or the same operation with different shapes, dtypes or roots."""


class RankLostError(CollectiveError):
    """Ranks died, stopped or did not come in time; :attr:`ranks` lists them."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class StageError(PeerError):
    """A stage of a pipeline raised or its process ended; the message names stage, layer, microbatch and reason."""


class GroupClosedError(CollectiveError):
    """The group was closed, or an earlier operation on it failed; create a new one."""


class AddressError(PacelineError):
    """An address cannot be bound or reached: its port is in use, its host is unknown, or its path is too long."""


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2 and 5``; truncate long lists."""
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        shown.append(f"{len(ranks) - 8} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"

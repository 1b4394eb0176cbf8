"""One tree of exceptions.

Everything that Paceline raises on purpose is a :class:`PacelineError`. The branches say whose fault it is: the
caller's (:class:`UsageError` and its kinds, which are also ``ValueError``), the data's, a peer's, or the network's.
Every message is one sentence or two that says what was got, what was expected, what follows and what to do.
What others wrote goes into a message by :func:`printable` only.
"""

from __future__ import annotations


def printable(text: str, max_chars: int) -> str:
    """Return a text of unknown origin as a message may show it: one line of at most ``max_chars``, and nothing in it
    that a terminal obeys.
    """
    text = text[: max_chars + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


class PacelineError(Exception):
    """The root of everything that Paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """The caller passed something that cannot work: wrong dtype, shape, option or combination of them."""


class TableMismatchError(UsageError):
    """A table was declared again with another kind, dim, size or update rule."""


class NonFiniteError(UsageError):
    """A push held NaN or Inf; it was refused whole and the table is untouched."""


class DataError(PacelineError):
    """A data file is missing, empty, cut off, malformed or of another format than said."""


class ModelError(PacelineError):
    """A saved model is missing, damaged, of another layout, or could not be written."""


class PeerError(PacelineError):
    """Another process of the cluster did something wrong or answered with an error."""


class NoRoomError(PeerError):
    """A server has no memory, or no room on its disk, for a request: it was refused whole and nothing has changed."""


class ProtocolError(PeerError):
    """A peer sent bytes that are no legal frame: wrong magic, version, kind or length."""


class AuthenticationError(PeerError):
    """A peer could not prove that it holds the cluster's token, or its TLS certificate is not trusted."""


class VersionError(PeerError):
    """A peer runs a version of Paceline that does not speak this one's protocol."""


class ConnectionLostError(PeerError):
    """The connection to a peer broke, and could not be made again within the time allowed."""


class ModelLostError(PeerError):
    """More servers died than there were replicas of what they held; :attr:`resume_from` has its snapshots, if any."""

    def __init__(self, message: str, resume_from: str | None = None) -> None:
        super().__init__(message)
        self.resume_from = resume_from


class LostRowsError(PeerError):
    """Workers died that held examples which others need: they must be read again."""


class DeadlineError(PeerError):
    """A wait ended without an answer; the message names who was awaited, for what and how long."""


class StaleEpochError(PeerError):
    """A request was made under an old map of the cluster; the client retries by itself with the new one."""


class CollectiveError(PeerError):
    """A collective operation failed on some rank; the group refuses further work."""


class MismatchError(CollectiveError, ValueError):
    """Ranks called different operations, or one with different shapes, dtypes or roots."""


class RankLostError(CollectiveError):
    """A rank died, stopped or did not come in time; :attr:`ranks` says which."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class StageError(PeerError):
    """A stage of a pipeline raised, or its process is gone; the message names stage, layer, microbatch and reason."""


class GroupClosedError(CollectiveError):
    """The group was closed, or an earlier operation on it failed; make a new one."""


class AddressError(PacelineError):
    """An address cannot be bound or reached: a port in use, an unknown host, a path that is too long."""


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__

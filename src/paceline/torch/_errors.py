"""Our errors, as PyTorch programs expect them: each is ours and a ``DistBackendError`` (so a RuntimeError) as well."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistBackendError

from paceline.errors import (
    CollectiveError,
    DeadlineError,
    GroupClosedError,
    MismatchError,
    PacelineError,
    PeerError,
    RankLostError,
)


class BackendError(PeerError, DistBackendError):
    """Any other error that a peer caused."""


class BackendCollectiveError(CollectiveError, DistBackendError):
    """See :class:`CollectiveError`."""


class BackendMismatchError(MismatchError, DistBackendError):
    """See :class:`MismatchError`."""


class BackendRankLostError(RankLostError, DistBackendError):
    """See :class:`RankLostError`."""


class BackendGroupClosedError(GroupClosedError, DistBackendError):
    """See :class:`GroupClosedError`."""


class BackendDeadlineError(DeadlineError, DistBackendError):
    """See :class:`DeadlineError`."""


_KINDS: dict[type[PacelineError], type[DistBackendError]] = {
    CollectiveError: BackendCollectiveError,
    MismatchError: BackendMismatchError,
    GroupClosedError: BackendGroupClosedError,
    DeadlineError: BackendDeadlineError,
}


def in_torch_terms(error: BaseException, timeout: timedelta) -> BaseException:
    """Return the error to raise; what is the caller's own fault stays as it is, a ValueError."""
    if not isinstance(error, PeerError) or isinstance(error, DistBackendError):
        return error
    if isinstance(error, RankLostError):
        # A wait that has ended says how long it was.
        hint = f"; the timeout of this process group is {timeout.total_seconds():g} s" if " s" in str(error) else ""
        return BackendRankLostError(f"{error}{hint}", error.ranks)
    return _KINDS.get(type(error), BackendError)(str(error))

"""Our errors, as PyTorch programs expect them: each is ours and a ``DistBackendError`` (so a RuntimeError) as well."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

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


_WAITED: Final = re.compile(r"\b(with)?in [\d.e+-]+ s\b")
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
        # Who has waited in vain says how long; PyTorch's own tests look for the word timeout then.
        hint = (
            f"; the timeout of this process group is {timeout.total_seconds():g} s"
            if _WAITED.search(str(error))
            else ""
        )
        return BackendRankLostError(f"{error}{hint}", error.ranks)
    return _KINDS.get(type(error), BackendError)(str(error))

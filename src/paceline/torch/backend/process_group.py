"""The process group that ``init_process_group("paceline")`` makes.

Its methods are named and called as PyTorch does it: by ``torch.distributed``, and by C++ for what
DistributedDataParallel and the functional collectives ask.
"""

from __future__ import annotations

from paceline.torch.backend.moving import Moving
from paceline.torch.backend.reducing import Reducing


class PacelineProcessGroup(Reducing, Moving):
    """The ranks of a torch.distributed group, over a :class:`paceline.collectives.Group`.

    Made by ``init_process_group`` and ``new_group``. Tensors on the CPU are taken where they lie: dense and contiguous
    ones are neither copied on their way in nor out. What the peers do wrong is raised as Paceline's error that is a
    ``torch.distributed.DistBackendError`` as well, by ``wait()`` or by the call itself.
    """

"""The backend's name in ``torch.distributed``, without an import by the program: torch calls :func:`register` itself.

It does so at the end of ``import torch``, by the entry point ``torch.backends`` of the installed package, unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. So this imports nothing that torch has not imported by then; what carries out the
calls comes with the first group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.torch import PacelineProcessGroup

BACKEND: Final = "paceline"


def register() -> None:
    """Make the backend known to ``torch.distributed``; for all devices, of which CPU and CUDA are supported."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any = None) -> PacelineProcessGroup:
    from paceline.torch.backend.registration import create

    return create(options)

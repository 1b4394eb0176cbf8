"""Register the backend in ``torch.distributed`` without an import by the program.

``import torch`` calls :func:`register` at its end, through the entry point ``torch.backends`` of the installed package,
unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. Therefore this module imports only modules that torch has imported; the
implementation is imported when the first group is created.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.torch import PacelineProcessGroup

BACKEND: Final = "paceline"


def register() -> None:
    """Register the backend for all devices; CPU and CUDA are supported."""
    import torch.distributed as dist

    if os.environ.get("PACELINE_JOB_DIR"):
        from paceline.observe.stuck.processes import watch_rank

        watch_rank()
    if os.environ.get("PACELINE_STRATEGY") and os.environ.get("WORLD_SIZE", "1") != "1":
        sys.meta_path.insert(0, _AccelerateFinder())
    if dist.is_available() and BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any = None) -> PacelineProcessGroup:
    from paceline.torch.backend.registration import create

    return create(options)


def rendezvous_handler() -> Callable[[Any], Any]:
    """Return the function that creates the handler for ``torchrun --rdzv-backend paceline``.

    torchrun calls it through the entry point ``torchrun.handlers`` of the installed package, even for other backends.
    """

    def create_handler(params: Any) -> Any:
        from paceline.torch.rendezvous import create

        return create(params)

    return create_handler


class _AccelerateFinder(MetaPathFinder):
    """Initializes ``torch.distributed`` before accelerate creates its state, in ranks of ``paceline run``.

    Otherwise accelerate, which the Trainer of transformers uses too, accepts only the backends in its own list.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's usual spec, with a loader that wraps the constructor of accelerate's state."""
        if fullname != "accelerate.state":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_load_accelerate, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _load_accelerate(execute: Any, module: Any) -> None:
    import torch

    execute(module)
    initialize = module.PartialState.__init__

    def __init__(self: Any, cpu: bool = False, **options: Any) -> None:  # noqa: N807
        if not torch.distributed.is_initialized():
            timeout = {key: options[key] for key in ("timeout",) if key in options}
            torch.distributed.init_process_group(BACKEND, **timeout)
        if options.get("backend") == BACKEND:
            del options["backend"]
        initialize(self, cpu or not torch.cuda.is_available(), **options)

    module.PartialState.__init__ = __init__

"""What programs of ``torch.distributed.rpc`` say of their transport, as far as it says something here.

There is one transport, Paceline's own: these are names under which such programs find its settings.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import UsageError, printable
from paceline.rpc.futures import Timeout, seconds_of

DEFAULT_TIMEOUT_S, DEFAULT_NUM_THREADS = 60.0, 64
_FROM_ENVIRONMENT, _AT_ADDRESS = "env://", "tcp://"


class BackendType(enum.Enum):
    """What ``init_rpc(backend=)`` takes: one value, which is the default too."""

    TENSORPIPE = "TENSORPIPE"


@dataclass
class TensorPipeRpcBackendOptions:
    """The settings that ``init_rpc(rpc_backend_options=)`` takes, also from an object of torch's own."""

    num_worker_threads: int = DEFAULT_NUM_THREADS
    """As `num_threads` of ``init_rpc``."""
    rpc_timeout: float = DEFAULT_TIMEOUT_S
    """As `timeout` of ``init_rpc``, in seconds; 0 is without end."""
    init_method: str = _FROM_ENVIRONMENT
    """``env://``, or ``tcp://host:port`` as `address` of ``init_rpc``."""
    device_maps: dict[str, Any] = field(default_factory=dict)
    """Must be empty: tensors of the CPU are sent."""
    devices: list[Any] = field(default_factory=list)
    """Must be empty."""

    def set_device_map(self, to: str, device_map: dict[Any, Any]) -> None:
        """Raise UsageError: tensors of the CPU are sent."""
        raise no_devices()

    def set_devices(self, devices: list[Any]) -> None:
        """Raise UsageError: tensors of the CPU are sent."""
        raise no_devices()


def no_devices() -> UsageError:
    """Return the error for maps of devices."""
    return UsageError(
        "rpc sends tensors of the CPU and maps no devices: leave device_maps and devices out, send "
        "tensor.cpu() and call .to(device) where it comes"
    )


def check_backend(backend: Any) -> None:
    """Raise UsageError for a transport that there is not."""
    name = getattr(backend, "name", backend)
    if name not in (None, BackendType.TENSORPIPE.name):
        raise UsageError(f"backend is {printable(repr(backend), 100)}; rpc has one transport, of its own: leave it out")


class RpcSettings(NamedTuple):
    """What ``init_rpc`` is told, by its arguments or by options."""

    address: str | None
    timeout: Timeout
    num_threads: int


def settings_of(options: Any, address: str | None, timeout: Timeout | None, num_threads: int | None) -> RpcSettings:
    """Return what is told by arguments or `options`, or else the defaults.

    Raises UsageError for what cannot be, and for what is told twice.
    """
    if options is not None:
        told = address_of(options)
        for name, value, is_told in (
            ("address", address, told is not None),
            ("timeout", timeout, True),
            ("num_threads", num_threads, True),
        ):
            if value is not None and is_told:
                raise UsageError(f"{name} is told twice, by itself and by rpc_backend_options: leave one of them out")
        address = address if told is None else told
        timeout, num_threads = _field(options, "rpc_timeout"), _field(options, "num_worker_threads")
    timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
    num_threads = DEFAULT_NUM_THREADS if num_threads is None else num_threads
    seconds_of(timeout)
    if type(num_threads) is not int or num_threads < 1:
        raise UsageError(f"num_threads is {printable(repr(num_threads), 100)}, a number of at least 1 was expected")
    return RpcSettings(address, timeout, num_threads)


def _field(options: Any, name: str) -> Any:
    if not hasattr(options, name):
        raise UsageError(
            f"rpc_backend_options is {printable(repr(options), 100)}, which has no {name}; "
            "rpc.TensorPipeRpcBackendOptions(...) was expected"
        )
    return getattr(options, name)


def address_of(options: Any) -> str | None:
    """Return where the workers meet, as options say it; None: as the environment says. Raises UsageError."""
    if getattr(options, "device_maps", None) or getattr(options, "devices", None):
        raise no_devices()
    method = getattr(options, "init_method", _FROM_ENVIRONMENT)
    if method == _FROM_ENVIRONMENT:
        return None
    if isinstance(method, str) and method.startswith(_AT_ADDRESS):
        return method.removeprefix(_AT_ADDRESS).partition("/")[0].partition("?")[0]
    raise UsageError(
        f"init_method is {printable(repr(method), 200)}; {_FROM_ENVIRONMENT!r} (MASTER_ADDR and MASTER_PORT) or "
        f"'{_AT_ADDRESS}host:port' was expected"
    )

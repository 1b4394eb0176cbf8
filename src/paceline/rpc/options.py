"""The options of ``init_rpc`` that exist only for programs written for ``torch.distributed.rpc``."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.environment import Timeout
from paceline.errors import UsageError, printable
from paceline.rpc.futures import seconds_of

DEFAULT_TIMEOUT_S, DEFAULT_NUM_THREADS = 60.0, 64
_FROM_ENVIRONMENT, _AT_ADDRESS = "env://", "tcp://"


class BackendType(enum.Enum):
    """The possible values of ``init_rpc(backend=...)``. There is one value, which is also the default."""

    TENSORPIPE = "TENSORPIPE"


@dataclass
class TensorPipeRpcBackendOptions:
    """Settings for ``init_rpc(rpc_backend_options=...)``, which also accepts torch's class of this name."""

    num_worker_threads: int = DEFAULT_NUM_THREADS
    """The argument `num_threads` of ``init_rpc``."""
    rpc_timeout: float = DEFAULT_TIMEOUT_S
    """The argument `timeout` of ``init_rpc`` in seconds; 0 means no limit."""
    init_method: str = _FROM_ENVIRONMENT
    """The address of rank 0 as ``tcp://host:port``, or ``env://`` for the environment variables."""
    device_maps: dict[str, Any] = field(default_factory=dict)
    """Must be empty, because only CPU tensors are sent."""
    devices: list[Any] = field(default_factory=list)
    """Must be empty, because only CPU tensors are sent, and no devices are mapped."""

    def set_device_map(self, to: str, device_map: dict[Any, Any]) -> None:
        """Raise UsageError, because rpc sends only CPU tensors."""
        raise no_devices()

    def set_devices(self, devices: list[Any]) -> None:
        """Raise UsageError, because rpc sends only CPU tensors."""
        raise no_devices()


def no_devices() -> UsageError:
    return UsageError(
        "rpc sends only CPU tensors and maps no devices: leave out device_maps and devices, send tensor.cpu() and call "
        ".to(device) in the receiver"
    )


def check_backend(backend: Any) -> None:
    name = getattr(backend, "name", backend)
    if name not in (None, BackendType.TENSORPIPE.name):
        raise UsageError(f"backend is {printable(repr(backend), 100)}; rpc has only one transport: leave backend out")


class RpcSettings(NamedTuple):
    """The settings of ``init_rpc``, from its arguments or from `rpc_backend_options`."""

    address: str | None
    timeout: Timeout
    num_threads: int


def settings_of(options: Any, address: str | None, timeout: Timeout | None, num_threads: int | None) -> RpcSettings:
    if options is not None:
        options_address = address_of(options)
        for name, value, is_in_options in (
            ("address", address, options_address is not None),
            ("timeout", timeout, True),
            ("num_threads", num_threads, True),
        ):
            if value is not None and is_in_options:
                raise UsageError(f"{name} is given twice, as an argument and in rpc_backend_options: leave one out")
        address = address if options_address is None else options_address
        timeout, num_threads = _field(options, "rpc_timeout"), _field(options, "num_worker_threads")
    timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
    num_threads = DEFAULT_NUM_THREADS if num_threads is None else num_threads
    seconds_of(timeout)
    if type(num_threads) is not int or num_threads < 1:
        raise UsageError(f"num_threads is {printable(repr(num_threads), 100)}, expected a number of at least 1")
    return RpcSettings(address, timeout, num_threads)


def _field(options: Any, name: str) -> Any:
    if not hasattr(options, name):
        raise UsageError(
            f"rpc_backend_options is {printable(repr(options), 100)}, which has no {name}: "
            "expected rpc.TensorPipeRpcBackendOptions(...)"
        )
    return getattr(options, name)


def address_of(options: Any) -> str | None:
    if getattr(options, "device_maps", None) or getattr(options, "devices", None):
        raise no_devices()
    method = getattr(options, "init_method", _FROM_ENVIRONMENT)
    if method == _FROM_ENVIRONMENT:
        return None
    if isinstance(method, str) and method.startswith(_AT_ADDRESS):
        return method.removeprefix(_AT_ADDRESS).partition("/")[0].partition("?")[0]
    raise UsageError(
        f"init_method is {printable(repr(method), 200)}: expected {_FROM_ENVIRONMENT!r} (MASTER_ADDR and "
        f"MASTER_PORT) or '{_AT_ADDRESS}host:port'"
    )

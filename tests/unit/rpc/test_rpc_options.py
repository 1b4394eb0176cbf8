"""Transport options of programs for torch.distributed.rpc."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline import rpc
from paceline.errors import UsageError
from paceline.rpc.options import BackendType, TensorPipeRpcBackendOptions, address_of, check_backend, settings_of


def test_address_of_the_workers_store() -> None:
    options = TensorPipeRpcBackendOptions(num_worker_threads=8)
    assert address_of(options) is None
    assert options.rpc_timeout == 60
    options.init_method = "tcp://localhost:29501"
    assert address_of(options) == "localhost:29501"
    options.init_method = "tcp://[::1]:29501/x?rank=1"
    assert address_of(options) == "[::1]:29501"
    assert address_of(SimpleNamespace()) is None
    bad: Any
    for bad in ("file:///tmp/x", "", 5):
        options.init_method = bad
        with pytest.raises(UsageError, match=r"init_method is .*expected .*'tcp://host:port'"):
            address_of(options)


def test_device_maps_are_rejected() -> None:
    options = TensorPipeRpcBackendOptions()
    with pytest.raises(UsageError, match=r"device_maps and devices, .*tensor\.cpu\(\)"):
        options.set_device_map("w", {0: 0})
    with pytest.raises(UsageError, match="maps no devices"):
        options.set_devices([0])
    with pytest.raises(UsageError, match="maps no devices"):
        address_of(TensorPipeRpcBackendOptions(device_maps={"w": {0: 1}}))


def test_unknown_transports_are_rejected() -> None:
    for known in (None, BackendType.TENSORPIPE, "TENSORPIPE", SimpleNamespace(name="TENSORPIPE")):
        check_backend(known)
    with pytest.raises(UsageError, match=r"backend is 'gloo'; .*transport"):
        rpc.init_rpc("w", rank=0, world_size=1, backend="gloo")
    wrong: Any = BackendType.TENSORPIPE
    with pytest.raises(UsageError, match=r"rank is .*rank and world_size"):
        rpc.init_rpc("w", wrong, 0)


def test_options_of_torch_are_accepted() -> None:
    torch_rpc = pytest.importorskip("torch.distributed.rpc")
    options = torch_rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=5, init_method="tcp://a:1")
    assert address_of(options) == "a:1"
    check_backend(torch_rpc.BackendType.TENSORPIPE)


def test_settings_come_from_options_or_arguments() -> None:
    assert settings_of(None, None, None, None) == (None, 60, 64)
    assert settings_of(None, "a:1", 5, 8) == ("a:1", 5, 8)
    options = TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=5)
    assert settings_of(options, "a:1", None, None) == ("a:1", 5, 8)
    options.init_method = "tcp://b:2"
    assert settings_of(options, None, None, None) == ("b:2", 5, 8)
    for name, given in (
        ("address", ("a:1", None, None)),
        ("timeout", (None, 5, None)),
        ("num_threads", (None, None, 1)),
    ):
        with pytest.raises(UsageError, match=f"{name} is given twice"):
            settings_of(options, *given)
    with pytest.raises(UsageError, match="has no rpc_timeout"):
        settings_of(SimpleNamespace(), None, None, None)
    with pytest.raises(UsageError, match="num_threads is 0, expected a number of at least 1"):
        settings_of(None, None, None, 0)

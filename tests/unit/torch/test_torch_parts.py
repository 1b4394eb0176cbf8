"""The parts of ``paceline.torch`` that need no other process."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore  # noqa: E402

import paceline.torch  # noqa: E402
from paceline.errors import (  # noqa: E402
    CollectiveError,
    DeadlineError,
    GroupClosedError,
    MismatchError,
    RankLostError,
    UsageError,
)
from paceline.torch import device as _device  # noqa: E402
from paceline.torch.backend import registration as _registration  # noqa: E402
from paceline.torch.backend import tensors as _tensors  # noqa: E402
from paceline.torch.backend.errors import Terms, in_torch_terms  # noqa: E402
from paceline.torch.backend.registration import TorchStore  # noqa: E402
from paceline.torch.backend.tensors import op_and_factor  # noqa: E402


def test_public_names() -> None:
    assert paceline.torch.__all__ == sorted(paceline.torch.__all__)
    assert all(hasattr(paceline.torch, name) for name in paceline.torch.__all__)
    paceline.torch.register()  # a second call does nothing
    assert dist.Backend("paceline") == "paceline"


def test_without_torch_the_error_names_the_package_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import paceline.torch"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: paceline.torch needs PyTorch" in ran.stderr
    assert "pip install 'paceline[torch]'" in ran.stderr


def _stores(folder: Path) -> list[Store]:
    served = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10))
    return [HashStore(), FileStore(str(folder / "store"), 1), served, PrefixStore("a", served)]


def test_the_store_is_set_once_and_waits_until_the_deadline(tmp_path: Path) -> None:
    for c_store in _stores(tmp_path):
        store, other = TorchStore(c_store, "one"), TorchStore(c_store, "other")
        store.set("key", b"\x00\xff")
        store.set("key", b"\x00\xff")
        store.set("empty", b"")
        assert store.get("key", time.monotonic()) == b"\x00\xff"
        assert store.get("empty", time.monotonic() + 1) == b""
        with pytest.raises(UsageError, match="already set"):
            store.set("key", b"\x01")
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"'key'.* was not set"):
            other.get("key", time.monotonic() + 0.1)
        assert 0.05 < time.monotonic() - start < 3.0
        assert store.collect(["key", "absent", "empty"], time.monotonic() + 0.05) == [b"\x00\xff", None, b""]
        assert store.collect(["empty", "key"], 0.0) == [b"", b"\x00\xff"]
        store.delete("key")
        with pytest.raises(DeadlineError):
            TorchStore(c_store, "one").get("key", time.monotonic() + 0.01)


def test_a_rank_that_ends_after_the_server_of_the_store_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """c10d would print a warning and a stack for each request to a server that has ended."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10))
    store = TorchStore(TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=10)), "one")
    store.set("key", b"value")
    del server
    store.close()
    assert capfd.readouterr().err == ""


def test_ranks_on_one_machine_listen_on_loopback(tmp_path: Path) -> None:
    for store in _stores(tmp_path):
        assert _registration.find_place(store, None) == "127.0.0.1"
    assert _registration.find_place(FileStore(str(tmp_path / "store"), 1), "localhost") == "localhost"


_TERMS = Terms(timedelta(seconds=2))


def test_errors_are_errors_of_paceline_and_of_torch() -> None:
    for error in (
        RankLostError("rank 1 did not come within 2 s", (1,)),
        MismatchError("differ"),
        GroupClosedError("closed"),
        DeadlineError("late"),
        CollectiveError("failed"),
    ):
        found = in_torch_terms(error, _TERMS)
        assert isinstance(found, type(error))
        assert {dist.DistBackendError, RuntimeError} <= set(type(found).__mro__)
        assert str(error) in str(found)
        assert in_torch_terms(found, _TERMS) is found
    lost = in_torch_terms(RankLostError("not within 2 s", (1,)), _TERMS)
    assert isinstance(lost, RankLostError)
    assert lost.ranks == (1,)
    assert "timeout of this process group is 2 s" in str(lost)
    assert "timeout" not in str(in_torch_terms(RankLostError("rank 1 left before sum", (1,)), _TERMS))
    usage = UsageError("wrong")
    assert in_torch_terms(usage, _TERMS) is usage


def test_errors_of_a_subgroup_name_global_ranks() -> None:
    part = Terms(timedelta(seconds=2), (0, 2, 5))
    lost = in_torch_terms(RankLostError("rank 1 died", (1,)), part)
    assert str(lost) == "rank 1 died; ranks are numbers in this process group: 1 is rank 2 of the program"
    differ = in_torch_terms(MismatchError("rank 0 called a; rank 1 called b"), part)
    assert ": 0 is rank 0, 1 is rank 2, 2 is rank 5 of the program" in str(differ)
    assert str(in_torch_terms(RankLostError("rank 1 died", (1,)), Terms(timedelta(seconds=2), (0, 1)))) == "rank 1 died"
    assert str(in_torch_terms(GroupClosedError("closed"), part)) == "closed"


def test_reduce_operations() -> None:
    names = {op: op_and_factor(getattr(dist.ReduceOp, op)) for op in ("SUM", "AVG", "BXOR")}
    assert names == {"SUM": ("sum", None), "AVG": ("mean", None), "BXOR": ("bitwise_xor", None)}
    assert op_and_factor(dist.ReduceOp(dist.ReduceOp.MAX)) == ("max", None)
    assert op_and_factor(dist.ReduceOp.PREMUL_SUM(2.0)) == ("sum", 2.0)


def test_adjacent_parts_of_one_tensor_are_not_copied() -> None:
    whole = torch.arange(12.0)
    joined = _tensors.sources(list(whole.view(3, 4).unbind()))
    assert joined.data_ptr() == whole.data_ptr()
    assert joined.tolist() == whole.tolist()
    out, after = _tensors.targets(list(whole[2:10].chunk(2)))
    assert after is None
    assert (out.data_ptr(), out.numel()) == (whole[2:].data_ptr(), 8)


def test_scattered_and_strided_tensors_are_filled_afterwards() -> None:
    targets = [torch.zeros(3), torch.zeros(2, 4)[:, ::2], torch.zeros(0)]
    out, after = _tensors.targets(targets)
    out.copy_(torch.arange(7.0))
    assert after is not None
    after()
    assert [target.tolist() for target in targets] == [[0.0, 1.0, 2.0], [[3.0, 4.0], [5.0, 6.0]], []]
    assert _tensors.sources(targets).tolist() == list(range(7))
    assert _tensors.sizes(targets) == [3, 4, 0]
    vector, after = _tensors.target(target := torch.zeros(2, 3).t())
    vector.copy_(torch.arange(6.0))
    assert after is not None
    after()
    assert target.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_irreducible_dtypes_can_be_moved() -> None:
    for dtype, moved_as in ((torch.complex64, torch.float32), (torch.float8_e5m2, torch.uint8)):
        tensor = torch.zeros(3, dtype=dtype)
        moved = _tensors.movable(tensor)
        assert (moved.dtype, moved.data_ptr()) == (moved_as, tensor.data_ptr())


class _Recorder:
    """A fake NCCL group that records its calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.called.append(name)


def test_tensors_on_other_devices_use_the_group_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    dist.init_process_group("paceline", store=HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        meta_tensor = torch.zeros(2, device="meta")
        with pytest.raises(UsageError, match="on meta: expected one on the CPU"):
            dist.all_reduce(meta_tensor)
        monkeypatch.setattr(_device.DeviceGroups, "of_device", lambda self, device: recorder)
        group.allreduce([meta_tensor])
        group.allreduce_coalesced([meta_tensor])
        group.broadcast([meta_tensor])
        group.allgather([[meta_tensor]], [meta_tensor])
        group.all_gather_single(meta_tensor, meta_tensor)
        group.gather([], [meta_tensor])
        group.reduce_scatter_single_coalesced([meta_tensor], [meta_tensor])
        group.alltoall([meta_tensor], [meta_tensor])
        group.send([meta_tensor], 0, 0)
        assert recorder.called == [
            "allreduce", "allreduce_coalesced", "broadcast", "allgather", "all_gather_single", "gather",
            "reduce_scatter_single_coalesced", "alltoall", "send",
        ]  # fmt: skip
        cpu_tensor = torch.ones(2)
        dist.all_reduce(cpu_tensor)
        assert cpu_tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_a_group_of_one_rank() -> None:
    dist.init_process_group("paceline", store=HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.arange(3.0)
        outputs = [torch.zeros(3)]
        dist.all_gather(outputs, tensor)
        assert outputs[0].tolist() == [0.0, 1.0, 2.0]
        output = torch.zeros(3)
        dist.reduce_scatter(output, [tensor], dist.ReduceOp.AVG)
        dist.all_to_all_single(output, tensor)
        dist.barrier()
        assert output.tolist() == [0.0, 1.0, 2.0]
        group: Any = dist.group.WORLD
        assert group.getBackendName() == "paceline"
        assert group.group_name == group.getGroupName()
        assert group._get_backend(torch.device("cpu")).supports_tensor_alloc(torch.device("cpu")) is False
        assert "all_reduce" in group.group.explain(1 << 20)
    finally:
        dist.destroy_process_group()

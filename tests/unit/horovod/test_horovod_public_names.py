"""The public names of ``paceline.horovod``, and the table of Horovod's API in the guide."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from types import ModuleType

import pytest
from tests.pages import ROOT

hvd = pytest.importorskip("paceline.horovod")
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (same|better) \|", re.MULTILINE)


def table() -> dict[str, str]:
    """Return the status of each name in the guide."""
    page = (ROOT / "docs/guides/horovod.md").read_text(encoding="utf-8")
    pairs = [(name, status) for names, status in ROW.findall(page) for name in re.findall(r"`(\w+)`", names)]
    assert len(dict(pairs)) == len(pairs), "a name is in two rows"
    return dict(pairs)


def test_all_is_sorted_and_has_exactly_the_public_names() -> None:
    assert hvd.__all__ == sorted(hvd.__all__)
    content = {name for name, value in vars(hvd).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert set(hvd.__all__) == content | {"elastic"}


def test_the_guide_lists_every_name() -> None:
    assert table().keys() == set(hvd.__all__)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "allreduce",
            "tensor average name compression op prescale_factor postscale_factor process_set",
        ),
        ("allreduce_async_", "tensor average name op prescale_factor postscale_factor process_set"),
        ("sparse_allreduce_async", "tensor name op process_set"),
        ("allgather", "tensor name process_set"),
        ("broadcast_", "tensor root_rank name process_set"),
        ("alltoall", "tensor splits name process_set"),
        ("reducescatter", "tensor name compression op process_set prescale_factor postscale_factor"),
        ("broadcast_object", "obj root_rank name process_set"),
        ("broadcast_optimizer_state", "optimizer root_rank model"),
        ("init", "comm process_sets"),
        ("join", "device"),
        ("elastic.run", "func"),
        ("elastic.TorchState", "model optimizer"),
        ("elastic.ObjectState", "bcast_object get_rank"),
        ("elastic.ElasticSampler", "dataset shuffle seed"),
        ("elastic.ElasticSampler.record_batch", "self batch_idx batch_size"),
        ("HostsUpdatedInterrupt", "skip_sync"),
        ("SyncBatchNorm", "num_features eps momentum affine track_running_stats"),
        (
            "DistributedOptimizer",
            "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups "
            "groups sparse_as_dense process_set",
        ),
    ],
)
def test_positional_arguments_are_those_of_horovod(name: str, parameters: str) -> None:
    found = list(inspect.signature(attrgetter(name)(hvd)).parameters)
    assert found[: len(parameters.split())] == parameters.split()


def test_one_rank() -> None:
    with pytest.raises(ValueError, match=re.escape("use hvd.init()")):
        hvd.size()
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()
    with pytest.raises(ValueError, match="different ranks"):
        hvd.ProcessSet([1, 1])
    with pytest.raises(ValueError, match="comm="):
        hvd.init(comm=object())
    with pytest.raises(ValueError, match="process_sets="):
        hvd.init(process_sets="static")
    assert hvd.ProcessSet([3]).rank() is hvd.global_process_set.size() is None

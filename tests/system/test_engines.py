"""The public conformance suite on the engines, with a real ``sshd`` and a real Slurm if they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.launch.engines.engine import RunEngine
from paceline.launch.engines.kubernetes import Kubernetes
from paceline.launch.engines.manifests import PodOptions
from paceline.launch.engines.options import EngineFlags, SlurmFlags
from paceline.launch.engines.slurm import Slurm
from paceline.launch.engines.ssh import Ssh
from paceline.testing import ENGINE_CHECKS, check_engine

from . import slurm_cluster, ssh_hosts
from .kubernetes_cluster import KubernetesCluster

MakeEngine = Callable[[], RunEngine]


def start_slurm(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    if not slurm_cluster.is_possible():
        pytest.skip(f"needs root and the programs {', '.join(slurm_cluster.PROGRAMS)}")
    cluster = slurm_cluster.SlurmCluster(folder, kill_wait_s=2)
    patch.setenv("SLURM_CONF", cluster.variables["SLURM_CONF"])
    yield lambda: Slurm(EngineFlags(slurm=SlurmFlags(sbatch=["nodes=2"])), "check")
    cluster.close()


def start_ssh(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    if not ssh_hosts.is_possible():
        pytest.skip(f"needs the programs {', '.join(ssh_hosts.PROGRAMS)}")
    hosts = ssh_hosts.SshHosts(folder, {})
    patch.setenv("PATH", f"{hosts.bin}:{os.environ['PATH']}")
    yield lambda: Ssh(EngineFlags(hosts="a,b"))
    hosts.close()


def start_kubernetes(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    cluster = KubernetesCluster(folder)
    patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.config))
    yield lambda: Kubernetes(EngineFlags(pods=PodOptions(image="image", name="check")))
    cluster.close()


@pytest.fixture(scope="module", params=[start_slurm, start_ssh, start_kubernetes], ids=["slurm", "ssh", "kubernetes"])
def make_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield from request.param(folder, patch)


@pytest.mark.parametrize("check", ENGINE_CHECKS)
def test_engine_conforms(make_engine: MakeEngine, tmp_path: Path, check: str) -> None:
    check_engine(make_engine, tmp_path, only=check)

"""The public conformance suite on the engines, with a real ``sshd``, Slurm and Ray if they are installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.fake_ray import fake_ray

from paceline.launch.engines.engine import RunEngine
from paceline.launch.engines.kubernetes import Kubernetes
from paceline.launch.engines.manifests import PodOptions
from paceline.launch.engines.options import EngineFlags, SlurmFlags
from paceline.launch.engines.slurm import Slurm
from paceline.launch.engines.ssh import Ssh
from paceline.testing import ENGINE_CHECKS, check_engine

from . import ray_cluster, slurm_cluster, ssh_hosts
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


def make_ray() -> RunEngine:
    engine: RunEngine = importlib.import_module("paceline.launch.engines.ray").Ray(EngineFlags())
    return engine


def start_fake_ray(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    with fake_ray([2, 2]):
        yield make_ray


def start_ray(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    with ray_cluster.started(num_nodes=2):
        yield make_ray


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(start_slurm, id="slurm"),
        pytest.param(start_kubernetes, id="kubernetes"),
        pytest.param(start_fake_ray, id="fake-ray"),
        pytest.param(start_ray, id="ray", marks=ray_cluster.MARKS),
    ],
)
def make_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    yield from start_in_folders(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def make_ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    yield from start_in_folders(start_ssh, tmp_path_factory)


def start_in_folders(start: Any, folders: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folders.mktemp("work"))
        yield from start(folders.mktemp("engine"), patch)


@pytest.mark.parametrize("check", ENGINE_CHECKS)
def test_engine_conforms(make_engine: MakeEngine, tmp_path: Path, check: str) -> None:
    check_engine(make_engine, tmp_path, only=check)


_OFTEN = ("check_output", "check_closing")
"""The checks that always run with a real ``sshd``. ``unit/launch/test_ssh.py`` runs the others with a fake ``ssh``."""


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=[pytest.mark.thorough] * (check not in _OFTEN)) for check in ENGINE_CHECKS]
)
def test_ssh_conforms(make_ssh: MakeEngine, tmp_path: Path, check: str) -> None:
    check_engine(make_ssh, tmp_path, only=check)

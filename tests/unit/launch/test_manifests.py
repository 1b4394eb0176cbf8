"""Manifests for Kubernetes are valid, and their commands are those of `paceline`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.launch.engines.engine import LOST_NODE_STATUS
from paceline.launch.engines.manifests import (
    PodOptions,
    manifests_of_cluster,
    manifests_of_run,
    manifests_of_training,
)

PODS = PodOptions(
    image="me/train:1", name="demo", namespace="ml", cpus="4", memory="8Gi", gpus=1, volume=["data:/data", "out:/out"],
    tls_secret="tls", restarts=2,
)  # fmt: skip
SMALL = PodOptions(image="me/train:1")
CUSTOM = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "JobSet": models.JobsetV1alpha2JobSet,
}


def check(manifests: list[dict[str, Any]]) -> None:
    """Validate against the schemas of Kubernetes 1.30, or of the custom resource; unknown fields are errors."""
    for manifest in manifests:
        custom = CUSTOM.get(manifest["kind"])
        if custom is None:
            kubernetes_validate.validate(manifest, "1.30", strict=True)
        else:
            found = custom.from_dict(manifest)
            assert found is not None
            assert found.to_dict() == manifest


def by_kind(manifests: list[dict[str, Any]]) -> Mapping[str, dict[str, Any]]:
    return {manifest["kind"]: manifest for manifest in manifests}


@pytest.mark.parametrize("pods", [PODS, SMALL], ids=["all options", "no options"])
@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("nnodes", [1, 4])
def test_manifests_of_a_script_are_valid(pods: PodOptions, kind: str, nnodes: int) -> None:
    if kind == "trainjob":
        pods = dataclasses.replace(pods, volume=None, tls_secret=None, restarts=0)
    check(
        manifests_of_run(
            dataclasses.replace(pods, kind=kind), "token", nnodes, ["paceline", "run", "--nnodes", "4", "train.py"]
        )
    )


@pytest.mark.parametrize(
    ("kind", "restarts", "limit", "restarts_of_set"),
    [("job", None, 40, None), ("job", 2, 8, None), ("jobset", 2, 40, 2)],
)
def test_an_elastic_run_continues_without_pods_except_pod_0(
    kind: str, restarts: int | None, limit: int, restarts_of_set: int | None
) -> None:
    pods = dataclasses.replace(SMALL, kind=kind, restarts=restarts)
    manifests = manifests_of_run(pods, "t", 4, ["paceline", "run", "train.py"], is_elastic=True)
    check(manifests)
    job = manifests[-1]["spec"]
    if kind == "jobset":
        assert job["failurePolicy"]["maxRestarts"] == restarts_of_set
        job = job["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == limit
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    ignored, failed = job["podFailurePolicy"]["rules"]
    assert (ignored["action"], failed["action"]) == ("Ignore", "FailJob")
    assert failed["onExitCodes"]["values"] == sorted([LOST_NODE_STATUS, 137, 143])  # Kubernetes requires the order
    assert "podFailurePolicy" not in manifests_of_run(pods, "t", 4, ["train.py"])[-1]["spec"]


def test_one_elastic_pod_that_others_may_join_has_an_address() -> None:
    kinds = [manifest["kind"] for manifest in manifests_of_run(SMALL, "t", 1, ["train.py"], is_elastic=True)]
    assert kinds == ["Secret", "Service", "Job"]


@pytest.mark.parametrize("pods", [PODS, SMALL], ids=["all options", "no options"])
def test_manifests_of_a_cluster_are_valid(pods: PodOptions) -> None:
    manifests = manifests_of_cluster(pods, "token", 3, 6, ["--servers", "3", "--workers", "6"])
    check(manifests)
    check(manifests_of_training(pods, ["/data/day1.tsv"]))
    replicas = {item["metadata"]["name"]: item["spec"].get("replicas") for item in manifests if "spec" in item}
    name = pods.name
    assert replicas == {f"{name}-scheduler": 1, f"{name}-server": 3, f"{name}-worker": 6}


def test_an_unknown_field_is_found() -> None:
    """Check that the validation of these tests can fail."""
    (job,) = manifests_of_run(SMALL, "token", 1, ["train.py"])
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        check([job])


@pytest.mark.parametrize(("kind", "host"), [("job", "demo-0.demo"), ("jobset", "demo-node-0-0.demo")])
def test_pods_have_the_address_of_pod_0(kind: str, host: str) -> None:
    manifests = by_kind(
        manifests_of_run(dataclasses.replace(PODS, kind=kind), "t", 4, ["paceline", "run", "--nnodes", "4", "train.py"])
    )
    job = manifests["Job"] if kind == "job" else manifests["JobSet"]["spec"]["replicatedJobs"][0]["template"]
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"] == ["paceline", "run", "--nnodes", "4", "train.py"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (variables["PET_NNODES"], variables["PET_MASTER_ADDR"]) == ("4", host)
    if kind == "job":
        assert pod["subdomain"] == manifests["Service"]["metadata"]["name"] == "demo"
        assert manifests["Service"]["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]


def test_an_existing_secret_is_used() -> None:
    manifests = manifests_of_run(dataclasses.replace(PODS, secret="mine"), "t", 2, ["train.py"])
    assert "Secret" not in by_kind(manifests)
    container = by_kind(manifests)["Job"]["spec"]["template"]["spec"]["containers"][0]
    (origin,) = (variable["valueFrom"] for variable in container["env"] if variable["name"] == "PACELINE_TOKEN")
    assert origin["secretKeyRef"] == {"name": "mine", "key": "token"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "pod"}, "--kind pod: expected one of job, jobset, trainjob"),
        ({"name": "Demo"}, "--name 'Demo': "),
        ({"name": "a" * 41}, "--name 'aaa"),
        ({"secret": "a_b"}, "--secret 'a_b': "),
        ({"cpus": "four"}, "--cpus 'four': expected a quantity"),
        ({"memory": "8 GB"}, "--memory '8 GB': expected a quantity"),
        ({"volume": ["data"]}, "--volume 'data': "),
        ({"volume": ["data:relative"]}, "--volume 'data:relative': "),
        ({"volume": ["Data:/data"]}, "--volume 'Data:/data': "),
        ({"volume": ["data:/a\udcff"]}, r"--volume 'data:/a\udcff': "),
        ({"volume": ["data:/a\0"]}, r"--volume 'data:/a\x00': "),
        ({"volume": ["a" * 254 + ":/data"]}, "--volume 'aaa"),
        ({"name": "demo\n"}, r"--name 'demo\n': "),
        ({"volume": ["data:/a:b"]}, "--volume 'data:/a:b': "),
        ({"namespace": "a" * 64}, "--namespace 'aaa"),
        ({"namespace": "a.b"}, "--namespace 'a.b': "),
        ({"tls_secret": "a..b"}, "--tls-secret 'a..b': "),
        ({"name": "1demo"}, "--name '1demo': "),
        ({"kind": "trainjob", "volume": ["data:/data"]}, "--kind trainjob: "),
        ({"kind": "trainjob", "restarts": 1}, "--kind trainjob: --restarts"),
        ({"namespace": "Foo Bar"}, "--namespace 'Foo Bar': "),
        ({"volume": ["a:/data", "b:/data"]}, "--volume: each volume needs its own path"),
    ],
)
def test_invalid_options(wrong: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        PodOptions(image="me/train:1", **wrong)


def test_longest_and_unusual_names_of_kubernetes_are_accepted() -> None:
    pods = dataclasses.replace(
        PODS, namespace="2026-" + "a" * 58, secret="my.token", tls_secret="a" * 253, volume=["my.data:/data"]
    )
    check(manifests_of_run(pods, "t", 2, ["train.py"]))


def test_arguments_reach_the_pod_unchanged() -> None:
    """Kubernetes expands variables in commands. A doubled $ prevents this."""
    (job,) = manifests_of_run(SMALL, "t", 1, ["train.py", "$(PACELINE_TOKEN)", "$$(X)"])
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-2:] == ["$$(PACELINE_TOKEN)", "$$$$(X)"]
    with pytest.raises(UsageError, match="not UTF-8"):
        manifests_of_run(SMALL, "t", 1, ["train.py", "\udcff"])


def test_variables_of_kubeflow() -> None:
    variables = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8"}
    found = environment({**variables, "PET_MASTER_ADDR": "demo-node-0-0.demo", "PET_MASTER_PORT": "29500"})
    assert (found.nnodes, found.node_rank, found.nproc_per_node) == (4, 2, 8)
    assert (found.master_addr, found.master_port) == ("demo-node-0-0.demo", 29500)
    assert environment({"PET_NPROC_PER_NODE": "auto"}).nproc_per_node is None

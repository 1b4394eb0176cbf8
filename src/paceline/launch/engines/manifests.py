"""Manifests for Kubernetes, as plain dictionaries.

- ``job``: a Job with the completion mode Indexed, and a headless Service, through which the pods find pod 0
- ``jobset``: a JobSet (``jobset.x-k8s.io/v1alpha2``), which restarts all pods together
- ``trainjob``: a TrainJob of Kubeflow Trainer (``trainer.kubeflow.org/v1alpha1``), whose pods have ``PET_`` variables

A permanent cluster has a Deployment and a Service for the scheduler, a StatefulSet of servers and a Deployment of
workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from paceline.command_options import option
from paceline.errors import UsageError
from paceline.launch.flags import RENDEZVOUS_PORT, SCHEDULER_PORT

from .engine import LOST_NODE_STATUS, check_utf8

Manifest: TypeAlias = dict[str, Any]

KINDS: Final = ("job", "jobset", "trainjob")
CONTAINER: Final = "node"
"""Name of the container in the pods of a run and in Kubeflow's runtime."""
STATUSES_OF_SIGNALS: Final = (137, 143)
"""Exit statuses of containers that ended with SIGKILL or SIGTERM."""
_NUM_REPLACEMENTS: Final = 10
"""The largest average number of replacements of a pod in an elastic run, without pods that Kubernetes has removed."""
_TLS_FOLDER: Final = "/etc/paceline/tls"
_TLS_FILES: Final = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}  # cert-manager's names
_GRACE_S: Final = 600
"""Time for a server to move its rows to other servers after SIGTERM."""
_START_S: Final = 600
"""The longest wait of servers and workers for the scheduler, whose node may still download the image."""

_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_NAME = re.compile(rf"(?=[a-z]){_LABEL}")
_NAMESPACE = re.compile(_LABEL)
_MOST_LETTERS: Final = 253
_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PLAIN: Final = re.compile(r"(--)?[A-Za-z][\w./-]*")
_WORDS_OF_YAML: Final = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """The options for pods. Raises UsageError for invalid values."""

    image: str | None = option("Container image with Paceline, your script and its packages.")
    name: str = option("Name of the objects; default paceline.", default="paceline")
    namespace: str | None = option("Namespace; default: kubectl's namespace.")
    kind: str = option("Kind of object for run: job (Indexed Job), jobset or trainjob (Kubeflow).", default="job")
    cpus: str | None = option("Cores of each pod, such as 4 or 500m.")
    memory: str | None = option("Memory of each pod, such as 8Gi.")
    gpus: int | None = option("NVIDIA GPUs of each pod or, with --on ray, of each node.", min=1)
    volume: list[str] | None = option(
        "PersistentVolumeClaim for every pod, as CLAIM:/path; may be given several times."
    )
    secret: str | None = option("Secret with the token (key token); default: a new Secret with a random token.")
    tls_secret: str | None = option("Secret with tls.crt, tls.key and ca.crt (as from cert-manager); turns TLS on.")
    restarts: int | None = option(
        "How often a failed pod (jobset: all pods) is started again; default 0. A Job with --min-ranks: how often a "
        "lost pod is replaced; default 10.",
        min=0,
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--kind {self.kind}: expected one of {', '.join(KINDS)}")
        _check_name("name", self.name, _NAME, 40, "letters, digits and hyphens, with a letter first and no hyphen last")
        _check_name("namespace", self.namespace, _NAMESPACE, 63, "letters, digits and hyphens, no hyphen first or last")
        for flag, name in (("secret", self.secret), ("tls-secret", self.tls_secret)):
            _check_name(flag, name, _SUBDOMAIN, _MOST_LETTERS, "letters, digits, hyphens and dots, such as my.token")
        for flag, quantity in (("--cpus", self.cpus), ("--memory", self.memory)):
            if quantity is not None and not _QUANTITY.fullmatch(quantity):
                raise UsageError(f"{flag} {quantity!r}: expected a quantity of Kubernetes, such as 4, 500m or 8Gi")
        if self.image is not None and (not self.image or not self.image.isprintable() or " " in self.image):
            raise UsageError(f"--image {self.image!r}: expected the name of an image, such as me/train:1")
        for volume, (claim, path) in zip(self.volume or (), self.volumes, strict=True):
            is_path = path.startswith("/") and path.isprintable() and ":" not in path
            if not _SUBDOMAIN.fullmatch(claim) or len(claim) > _MOST_LETTERS or not is_path:
                raise UsageError(f"--volume {volume!r}: expected the name of a claim and a path, such as data:/data")
        paths = [path for _, path in self.volumes]
        if len({*paths, _TLS_FOLDER}) <= len(paths):
            raise UsageError(f"--volume: each volume needs its own path, and {_TLS_FOLDER} is reserved")
        settings = {"volume": self.volume, "tls-secret": self.tls_secret, "restarts": self.restarts}
        for flag, value in settings.items() if self.kind == "trainjob" else ():
            if value:
                raise UsageError(f"--kind trainjob: --{flag} is a setting of Kubeflow's runtime. Leave it out")

    @property
    def volumes(self) -> list[tuple[str, str]]:
        """The volumes' claims, each with the path of the volume in the pods."""
        parts = (volume.partition(":") for volume in self.volume or ())
        return [(claim, path) for claim, _, path in parts]

    @property
    def scheduler(self) -> str:
        """The scheduler's address within the cluster."""
        return f"{self.name}-scheduler:{SCHEDULER_PORT}"


def _check_name(flag: str, name: str | None, pattern: re.Pattern[str], most: int, letters: str) -> None:
    if name is not None and not (len(name) <= most and pattern.fullmatch(name)):
        raise UsageError(f"--{flag} {name!r}: expected a name of Kubernetes: at most {most} lower-case {letters}")


def manifests_of_run(
    pods: PodOptions, token: str, nnodes: int, command: Sequence[str], *, is_elastic: bool = False
) -> list[Manifest]:
    """Return the manifests for a command in `nnodes` pods. The object of the last manifest owns the pods.

    Environment variables give each ``paceline run`` its node's number. The `token` is not used if the options name a
    Secret, or for a single pod. The pods of an elastic run are replaced, and their number may change.
    """
    one_pod = nnodes == 1 and not is_elastic
    secret = [] if one_pod or pods.secret else [_secret(pods, token)]
    variables = [] if one_pod or pods.kind == "trainjob" else _variables_of_node(pods, nnodes)
    pod = _pod(pods, _escape(command), has_token=not one_pod, variables=variables)
    if pods.kind == "trainjob":
        return [*secret, _train_job(pods, nnodes, pod["containers"][0])]
    indexed: dict[str, Any] = {"completionMode": "Indexed", "completions": nnodes, "parallelism": nnodes}
    if is_elastic:
        indexed |= _elastic_policies()
    restarts = _NUM_REPLACEMENTS if is_elastic else 0
    if pods.kind == "jobset":
        job = {**indexed, "backoffLimit": restarts * nnodes, "template": _template(pods, "node", pod)}
        jobs = [{"name": "node", "replicas": 1, "template": {"spec": job}}]
        network = {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True}
        specification = {
            "network": network,
            "failurePolicy": {"maxRestarts": pods.restarts or 0},
            "replicatedJobs": jobs,
        }
        return [*secret, _object(pods, "jobset.x-k8s.io/v1alpha2", "JobSet", pods.name, specification)]
    # If one node fails, the other nodes fail too, and Kubernetes counts every failed pod.
    limit = nnodes * (restarts if pods.restarts is None else pods.restarts)
    job = {**indexed, "backoffLimit": limit, "template": _template(pods, "node", {**pod, "subdomain": pods.name})}
    service = [] if one_pod else [_headless(pods, pods.name, "node")]
    return [*secret, *service, _object(pods, "batch/v1", "Job", pods.name, job)]


def manifests_of_cluster(
    pods: PodOptions, token: str, num_servers: int, num_workers: int, command: Sequence[str]
) -> list[Manifest]:
    """Return the manifests for a permanent cluster. `command` has the arguments of ``paceline scheduler``."""
    join = ["--scheduler", pods.scheduler, "--wait", str(_START_S)]
    # With --replaces, a restarted scheduler waits for the members of the previous scheduler and continues its cluster.
    scheduler = _pod(
        pods, ["paceline", "scheduler", "--host", "0.0.0.0", "--replaces", *_escape(command)], role="scheduler"
    )
    scheduler["containers"][0]["ports"] = [{"containerPort": SCHEDULER_PORT}]
    server = _pod(pods, ["paceline", "server", "--host", "0.0.0.0", *join], role="server")
    server["terminationGracePeriodSeconds"] = _GRACE_S
    worker = _pod(pods, ["paceline", "worker", *join], role="worker")
    service = {
        "selector": _labels(pods, "scheduler"),
        "ports": [{"port": SCHEDULER_PORT}],
        "publishNotReadyAddresses": True,
    }
    servers = {"serviceName": f"{pods.name}-server", "podManagementPolicy": "Parallel"}
    return [
        *([] if pods.secret else [_secret(pods, token)]),
        _object(pods, "v1", "Service", f"{pods.name}-scheduler", service),
        _replicated(pods, "Deployment", "scheduler", 1, scheduler, {"strategy": {"type": "Recreate"}}),
        _headless(pods, f"{pods.name}-server", "server"),
        _replicated(pods, "StatefulSet", "server", num_servers, server, servers),
        _replicated(pods, "Deployment", "worker", num_workers, worker, {}),
    ]


def manifests_of_training(pods: PodOptions, command: Sequence[str]) -> list[Manifest]:
    """Return a Job for ``paceline train`` on the cluster of this name; `command` has the arguments of ``train``."""
    pod = _pod(pods, ["paceline", "train", "--scheduler", pods.scheduler, *_escape(command)], role="train")
    job = {"backoffLimit": pods.restarts or 0, "template": _template(pods, "train", pod)}
    return [_object(pods, "batch/v1", "Job", f"{pods.name}-train", job)]


def format_manifests(manifests: Sequence[Manifest]) -> str:
    """Return the manifests as YAML. Raises UsageError if PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        raise UsageError("manifests need PyYAML, which is not installed: pip install 'paceline[kubernetes]'") from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def represent(dumper: Dumper, text: str) -> Any:
        """Quote every string that some version of YAML reads as a number, a Boolean or null."""
        is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS_OF_YAML
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if is_plain else '"')

    Dumper.add_representer(str, represent)
    return str(yaml.dump_all(manifests, None, Dumper, sort_keys=False, width=1000, allow_unicode=True))


def _elastic_policies() -> dict[str, Any]:
    """Return the policies of a Job that continues without lost pods and replaces them. Needs Kubernetes 1.31.

    The result of the Job is that of pod 0. Pods that Kubernetes removes from a node are not counted as failed.
    """
    codes = {"containerName": CONTAINER, "operator": "NotIn", "values": [LOST_NODE_STATUS, *STATUSES_OF_SIGNALS]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]
    return {"podFailurePolicy": {"rules": rules}, "successPolicy": {"rules": [{"succeededIndexes": "0"}]}}


def _variables_of_node(pods: PodOptions, nnodes: int) -> list[Manifest]:
    """Return the environment variables with a node's number and addresses. Their names are those of Kubeflow."""
    host = f"{pods.name}-node-0-0.{pods.name}" if pods.kind == "jobset" else f"{pods.name}-0.{pods.name}"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "PET_NNODES", "value": str(nnodes)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "PET_MASTER_ADDR", "value": host},
        {"name": "PET_MASTER_PORT", "value": str(RENDEZVOUS_PORT)},
    ]


def _escape(arguments: Sequence[str]) -> list[str]:
    """Escape ``$``, so that Kubernetes expands no variables. Raises UsageError for arguments that are not UTF-8."""
    check_utf8(arguments)
    return [argument.replace("$", "$$") for argument in arguments]


def _labels(pods: PodOptions, role: str) -> dict[str, str]:
    labels = {"name": "paceline", "instance": pods.name, "component": role}
    return {f"app.kubernetes.io/{name}": value for name, value in labels.items()}


def _object(
    pods: PodOptions, version: str, kind: str, name: str, content: Mapping[str, Any], field: str = "spec"
) -> Manifest:
    metadata = {"name": name} if pods.namespace is None else {"name": name, "namespace": pods.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, field: content}


def _secret(pods: PodOptions, token: str) -> Manifest:
    return _object(pods, "v1", "Secret", f"{pods.name}-token", {"token": token}, "stringData")


def _template(pods: PodOptions, role: str, pod: Mapping[str, Any]) -> Manifest:
    return {"metadata": {"labels": _labels(pods, role)}, "spec": pod}


def _headless(pods: PodOptions, name: str, role: str) -> Manifest:
    specification = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(pods, role)}
    return _object(pods, "v1", "Service", name, specification)


def _replicated(
    pods: PodOptions, kind: str, role: str, number: int, pod: Manifest, settings: Mapping[str, Any]
) -> Manifest:
    specification = {
        "replicas": number,
        "selector": {"matchLabels": _labels(pods, role)},
        **settings,
        "template": _template(pods, role, {**pod, "restartPolicy": "Always"}),
    }
    return _object(pods, "apps/v1", kind, f"{pods.name}-{role}", specification)


def _pod(
    pods: PodOptions,
    command: Sequence[str],
    *,
    role: str = CONTAINER,
    has_token: bool = True,
    variables: Sequence[Manifest] = (),
) -> Manifest:
    if pods.image is None:
        raise UsageError("--image is missing. Pass an image with Paceline and your script, such as --image me/train:1")
    container: dict[str, Any] = {"name": role, "image": pods.image, "command": [*command]}
    variables = [*variables]
    if has_token:
        key = {"name": pods.secret or f"{pods.name}-token", "key": "token"}
        variables.append({"name": "PACELINE_TOKEN", "valueFrom": {"secretKeyRef": key}})
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    for number, (claim, path) in enumerate(pods.volumes):
        mounts.append({"name": f"volume{number}", "mountPath": path})
        volumes.append({"name": f"volume{number}", "persistentVolumeClaim": {"claimName": claim}})
    if pods.tls_secret is not None:
        variables += [
            {"name": f"PACELINE_TLS_{name}", "value": f"{_TLS_FOLDER}/{file}"} for name, file in _TLS_FILES.items()
        ]
        mounts.append({"name": "tls", "mountPath": _TLS_FOLDER, "readOnly": True})
        volumes.append({"name": "tls", "secret": {"secretName": pods.tls_secret}})
    quantities = {"cpu": pods.cpus, "memory": pods.memory, "nvidia.com/gpu": pods.gpus and str(pods.gpus)}
    resources = {name: quantity for name, quantity in quantities.items() if quantity}
    container |= {"env": variables} if variables else {}
    container |= {"resources": {"requests": resources, "limits": dict(resources)}} if resources else {}
    container |= {"volumeMounts": mounts} if mounts else {}
    return {"restartPolicy": "Never", "containers": [container], **({"volumes": volumes} if volumes else {})}


def _train_job(pods: PodOptions, nnodes: int, container: Mapping[str, Any]) -> Manifest:
    trainer = {"image": container["image"], "numNodes": nnodes, "command": container["command"]}
    trainer |= {"env": container["env"]} if "env" in container else {}
    trainer |= {"resourcesPerNode": container["resources"]} if "resources" in container else {}
    specification = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return _object(pods, "trainer.kubeflow.org/v1alpha1", "TrainJob", pods.name, specification)

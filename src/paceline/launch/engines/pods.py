"""Read the states of a role's pods on Kubernetes, and find the reasons why pods wait or have ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import printable

from .engine import LOST_NODE_STATUS, RunEnd
from .kubernetes_api import ApiError, ClusterApi
from .manifests import CONTAINER, STATUSES_OF_SIGNALS, Manifest

_SHOWN_CHARS: Final = 400
_NEVER_STARTS: Final = {"InvalidImageName", "ErrImageNeverPull"}
_STARTS: Final = {"", "ContainerCreating", "PodInitializing"}
"""Reasons for which a container waits although nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The state of a pod."""

    name: str
    uid: str
    created: str
    node: str
    """Number of the pod's node in the run; empty if unknown."""
    has_started: bool
    is_over: bool
    has_failed: bool
    status: int
    """Exit status of the pod's container; None before its end."""
    finished: str
    """Time at which the container ended."""
    waits_for: str
    """The reason why the pod has not started; empty if Kubernetes has not reported a reason."""
    never_starts: bool
    failure: str
    """Kubernetes' reason for the pod's failure, in addition to the exit status."""


def read_pod(manifest: Mapping[str, Any]) -> Pod:
    """Return the state of a pod from its object."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    containers = status.get("containerStatuses") or ()
    state: Manifest = next(
        (container.get("state", {}) for container in containers if container["name"] == CONTAINER), {}
    )
    ended, waiting = state.get("terminated"), state.get("waiting", {})
    phase, reason = status.get("phase"), waiting.get("reason", "")
    failure = [] if ended is None or ended.get("reason") in ("Error", "Completed") else [ended.get("reason", "")]
    failure += [status.get("reason", ""), status.get("message", ""), (ended or {}).get("message", "")]
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        created=metadata["creationTimestamp"],
        node=metadata.get("annotations", {}).get("batch.kubernetes.io/job-completion-index", ""),
        has_started=ended is not None or "running" in state,
        is_over=phase in ("Succeeded", "Failed"),
        has_failed=phase == "Failed",
        status=1 if ended is None else int(ended["exitCode"]),
        finished="" if ended is None else ended.get("finishedAt") or "",
        waits_for=_find_scheduling_problem(status) if reason in _STARTS else _join(reason, waiting.get("message", "")),
        never_starts=reason in _NEVER_STARTS,
        failure=_join(*failure),
    )


def _failure_order(pod: Pod) -> tuple[bool, str, bool]:
    """Return a key that sorts the pod that caused the failure first.

    In an elastic run, other launchers may end before the launcher of node 0, which caused the failure. Kubernetes kills
    the other pods, perhaps in the same second, so prefer a status that is not a signal.
    """
    return pod.status == LOST_NODE_STATUS, pod.finished or "~", pod.status in STATUSES_OF_SIGNALS


def _find_scheduling_problem(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _join(condition.get("message", ""))
    return ""


class PodGroup:
    """The pods of a role and the object that owns them, as last reported by the API server."""

    def __init__(self, api: ClusterApi, manifest: Manifest, num_nodes: int) -> None:
        """`manifest` is the created object. The number of its pods may change, if it is a Job."""
        self._api, self._object, self._num_nodes = api, manifest, num_nodes
        self._uid = manifest["metadata"]["uid"]
        self.name = f"{manifest['kind']} {manifest['metadata']['name']}"
        self.pods: list[Pod] = []
        self.has_started = False
        self._listed = ""

    def refresh(self) -> None:
        """Request the states. Raises ApiError, with status 404 if the object was deleted."""
        path = f"{self._api.path_of(self._object)}/{self._object['metadata']['name']}"
        found = self._api.call("GET", path)
        if found["metadata"]["uid"] != self._uid:
            raise ApiError("it was replaced", 404)
        self._object = found
        self._num_nodes = found.get("spec", {}).get("completions", self._num_nodes)
        # The object has a new version whenever the number of its active pods changes.
        version = found["metadata"]["resourceVersion"]
        if not self.has_started or version != self._listed:
            self.pods = self._list_pods()
            self._listed = version
        self.has_started |= self._num_started >= self._num_nodes

    @property
    def _newest(self) -> list[Pod]:
        """The newest pod of each node."""
        return [*{pod.node or pod.name: pod for pod in sorted(self.pods, key=lambda pod: pod.created)}.values()]

    @property
    def _num_started(self) -> int:
        return sum(pod.has_started for pod in self._newest)

    def _list_pods(self) -> list[Pod]:
        """Return the pods of this object, without those of a deleted object with the same name."""
        kind, metadata = self._object["kind"], self._object["metadata"]
        label = "job-name" if kind == "Job" else "jobset.sigs.k8s.io/jobset-name"
        path = f"/api/v1/namespaces/{self._api.namespace}/pods"
        found = self._api.call("GET", path, {"labelSelector": f"{label}={metadata['name']}"})
        pods = [read_pod(pod) for pod in found["items"]]
        return sorted(
            (pod for pod in pods if pod.created >= metadata["creationTimestamp"]), key=lambda pod: (pod.node, pod.name)
        )

    def find_end(self) -> RunEnd | None:
        """If the role has ended, return its result, with the status of the first pod that failed."""
        for condition in self._object.get("status", {}).get("conditions") or ():
            if condition["status"] == "True" and condition["type"] in ("Complete", "Completed"):
                return RunEnd(0, None)
            if condition["status"] == "True" and condition["type"] == "Failed":
                failed = [pod for pod in self._newest if pod.has_failed]
                if not failed:
                    reason = _join(condition.get("reason", ""), condition.get("message", ""))
                    return RunEnd(1, f"{self.name} failed: {reason}")
                first = min(failed, key=_failure_order)
                because = f" ({first.failure})" if first.failure else ""
                return RunEnd(
                    first.status or 1, f"{self.name} failed: pod {first.name} ended with status {first.status}{because}"
                )
        return None

    def describe_start(self) -> tuple[str, bool]:
        """Return a text about the started and waiting pods, and whether the waiting pods can never start."""
        text = f"{self.name}: {self._num_started} of {self._num_nodes} pods have started"
        waiting = [pod for pod in self.pods if not pod.has_started and not pod.is_over]
        known = next((pod for pod in waiting if pod.waits_for), None)
        if known is not None:
            return f"{text}; pod {known.name} waits: {known.waits_for}", known.never_starts
        if waiting:
            reason = self._find_warning(waiting[0].uid)
            return text + (f"; pod {waiting[0].name} waits: {reason}" if reason else ""), False
        reason = "" if self.has_started else self._find_suspension() or self._find_warning(self._uid)
        return text + (f"; {reason}" if reason else ""), False

    def _find_suspension(self) -> str:
        if not self._object.get("spec", {}).get("suspend"):
            return ""
        return "it is suspended, for example until a queue admits it"

    def _find_warning(self, uid: str) -> str:
        """Return the last warning about an object, such as an exceeded quota; empty if there is none."""
        path = f"/api/v1/namespaces/{self._api.namespace}/events"
        try:
            found = self._api.call("GET", path, {"fieldSelector": f"involvedObject.uid={uid},type=Warning"})
        except ApiError:
            return ""  # the user may lack the permission to read events
        events = sorted(found["items"], key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return _join(events[-1].get("reason", ""), events[-1].get("message", "")) if events else ""


def _join(*texts: str) -> str:
    return printable(": ".join(text.strip() for text in texts if text), _SHOWN_CHARS)

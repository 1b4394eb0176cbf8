"""Kubernetes: create the objects of a run, follow their pods, and delete them."""

from __future__ import annotations

import queue
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from typing_extensions import override

from paceline.errors import UsageError
from paceline.transport.security.authentication import make_token

from .engine import RunEnd, RunEngine, RunRole, report
from .kubernetes_api import ApiError, ClusterApi
from .manifests import Manifest, format_manifests, manifests_of_run
from .options import EngineFlags
from .pod_logs import MOST_LINES, PodLog
from .pods import PodGroup

_LABEL: Final = "paceline-run"
"""Label of all objects of a run. Its value is the run's identifier, so that no run deletes objects of another run."""
_PATIENCE_S: Final = 30.0
_WAIT_S: Final = 0.5
_POLL_S: Final = 2.0
_DRAIN_S: Final = 30.0
_DELETE_S: Final = 90.0
"""Time limit for the end of the pods. Kubernetes kills a pod 30 seconds after the request to end, by default."""


class Kubernetes(RunEngine):
    """One Job, JobSet or TrainJob for each role, with its Secret and Service."""

    def __init__(self, flags: EngineFlags) -> None:
        self._pods, self._queue_timeout_s = flags.pods, flags.queue_timeout
        self._run, self._token = secrets.token_hex(8), make_token()
        self._requested: list[Manifest] = []
        self._groups: list[PodGroup] = []
        self._logs: dict[str, PodLog] = {}
        """The logs of the pods, by a pod's unique identifier."""
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reported: set[str] = set()
        self._created_s = self._polled_s = 0.0
        self._is_unread = False

    @override
    def describe(self, roles: Sequence[RunRole]) -> str:
        return format_manifests([manifest for role in roles for manifest in self._manifests_of(role, roles[-1])])

    @override
    def start(self, roles: Sequence[RunRole]) -> None:
        api = self._api = ClusterApi.connect(self._pods.namespace)
        try:
            for role in roles:
                created = [self._create(manifest) for manifest in self._manifests_of(role, roles[-1])]
                self._groups.append(PodGroup(api, created[-1], role.num_nodes))
        except ApiError as error:
            if error.is_transient:
                raise
            raise UsageError(f"--on kubernetes: {error}") from None
        self._created_s = time.monotonic()
        for group in self._groups:
            report(f"{group.name} is created in namespace {api.namespace}; Ctrl-C deletes it")

    def _manifests_of(self, role: RunRole, last: RunRole) -> list[Manifest]:
        """Return the manifests of a role. The object of the last manifest owns the role's pods."""
        pods = self._pods if role is last else replace(self._pods, name=f"{self._pods.name}-{role.name}")
        return manifests_of_run(pods, self._token, role.num_nodes, role.command, is_elastic=role.is_elastic)

    def _create(self, manifest: Manifest) -> Manifest:
        """Create an object. Raises ApiError, or UsageError if an object of another run has its name."""
        api, kind, name = self._api, manifest["kind"], manifest["metadata"]["name"]
        manifest["metadata"]["labels"] = {_LABEL: self._run}
        self._requested.append(manifest)
        try:
            return api.call("POST", api.path_of(manifest), body=manifest, patience_s=_PATIENCE_S)
        except UsageError:
            self._requested.pop()  # the request was not sent
            raise
        except ApiError as error:
            if error.status == 404:
                raise UsageError(
                    f"--on kubernetes: no namespace {api.namespace} or no kind {kind} in the cluster. Create or "
                    "install it, or pass another --namespace or --kind"
                ) from None
            if error.status != 409:
                if not error.was_sent:
                    self._requested.pop()
                raise
        # An earlier request may have succeeded without a reply.
        found = api.call("GET", self._path_of(manifest), patience_s=_PATIENCE_S)
        if not self._is_own(found):
            raise UsageError(
                f"--name {self._pods.name}: {kind} {name} exists in namespace {api.namespace}, from another run. Pass "
                f"another --name, or delete it: {self._deletion_of([manifest])}"
            )
        return found

    @override
    def poll(self) -> RunEnd | None:
        self._print_lines(_WAIT_S)
        if not self._groups or time.monotonic() < self._polled_s + _POLL_S:
            return None
        self._polled_s = time.monotonic()
        for group in self._groups:
            try:
                group.refresh()
            except ApiError as error:
                if error.is_transient:
                    self._report_once(f"{error}. The run continues")
                    return None
                if error.status == 404:
                    return RunEnd(1, f"{group.name} was deleted, so its exit status is unknown")
                return RunEnd(1, str(error))
        self._follow_logs()
        return self._find_end() or self._check_start()

    def _find_end(self) -> RunEnd | None:
        """If the last role has ended or another role has failed, print the remaining output and return the result."""
        ends = [group.find_end() for group in self._groups]
        end = ends[-1] or next((end for end in ends if end is not None and end.status), None)
        if end is not None:
            ended = [self._logs[pod.uid] for group in self._groups for pod in group.pods if self._is_ended(pod.uid)]
            deadline_s = time.monotonic() + _DRAIN_S
            while not all(log.is_read for log in ended) and time.monotonic() < deadline_s:
                if self._print_lines(_WAIT_S / 10):
                    deadline_s = time.monotonic() + _DRAIN_S
            self._print_lines(0.0)
            self._report_unread_logs()
        return end

    def _is_ended(self, uid: str) -> bool:
        return uid in self._logs and self._logs[uid].is_over

    def _check_start(self) -> RunEnd | None:
        """Report how many pods have started; return the end of a run that cannot start."""
        waiting = [group for group in self._groups if not group.has_started]
        is_late = self._queue_timeout_s is not None and time.monotonic() >= self._created_s + self._queue_timeout_s
        for group in waiting or self._groups:
            text, never_starts = group.describe_start()
            if group in waiting and never_starts:
                return RunEnd(1, f"{text}. The run cannot start and is deleted")
            if group in waiting and is_late:
                return RunEnd(1, f"{text} within {self._queue_timeout_s:g} s. The run is deleted")
            self._report_once(text)
        return None

    def _follow_logs(self) -> None:
        for pod in (pod for group in self._groups for pod in group.pods):
            if pod.has_started and pod.uid not in self._logs:
                self._logs[pod.uid] = PodLog(self._api, pod.name, self._lines)
                self._logs[pod.uid].start()
            if pod.is_over and pod.uid in self._logs:
                self._logs[pod.uid].is_over = True
        self._report_unread_logs()

    def _report_unread_logs(self) -> None:
        problem = next((log.problem for log in self._logs.values() if log.problem is not None), None)
        if problem is not None:
            self._report_once(f"{problem}. The output of this pod is not shown")

    def _print_lines(self, seconds: float) -> bool:
        """Wait for lines of the logs, and print those that are present; return whether there were lines."""
        deadline_s = time.monotonic() + seconds
        lines: list[bytes] = []
        while len(lines) < MOST_LINES and (not lines or not self._lines.empty()):
            left_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                lines.append(self._lines.get(timeout=left_s))
            except queue.Empty:
                break
        if lines and not self._is_unread:
            try:
                sys.stdout.buffer.write(b"".join(lines))
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                self._is_unread = True  # the objects still have to be deleted
                raise
        return bool(lines)

    @override
    def close(self) -> None:
        # If only the first request was sent, the API server has probably never answered.
        has_answered = bool(self._groups) or len(self._requested) > 1
        deadline_s = time.monotonic() + (_PATIENCE_S if has_answered else 0.0)
        requested, self._requested, self._groups = self._requested, [], []
        deleted: list[Manifest] = []
        rejected: dict[str, list[Manifest]] = {}
        try:
            while requested:
                try:
                    if self._delete(requested[-1], max(deadline_s - time.monotonic(), 0.0)):
                        deleted.append(requested[-1])
                except ApiError as error:
                    rejected.setdefault(str(error), []).append(requested[-1])
                requested.pop()
            self._wait_deleted(deleted)
        finally:
            for reason, manifests in rejected.items():
                report(f"{_name(manifests)} may still exist: {reason}. Run `{self._deletion_of(manifests)}`")
            if requested:  # a second Ctrl-C has interrupted the deletion
                report(f"{_name(requested)} may still exist. Run `{self._deletion_of(requested)}`")
            for log in self._logs.values():
                log.stop()
            for log in self._logs.values():
                log.close()
            self._logs = {}
            self._print_lines(0.0)

    def _delete(self, manifest: Manifest, patience_s: float) -> bool:
        """Delete an object unless it belongs to another run. Return whether the object still exists for some time."""
        path = self._path_of(manifest)
        try:
            found = self._api.call("GET", path, patience_s=patience_s)
            if not self._is_own(found):
                return False
            options = {"propagationPolicy": "Foreground", "preconditions": {"uid": found["metadata"]["uid"]}}
            self._api.call("DELETE", path, body=options, patience_s=patience_s)
        except ApiError as error:
            if error.status in (404, 409):  # 404: already deleted; 409: another run has created it again
                return False
            raise
        return True

    def _wait_deleted(self, manifests: list[Manifest]) -> None:
        deadline_s = time.monotonic() + _DELETE_S
        while manifests and time.monotonic() < deadline_s:
            try:
                if not self._is_own(self._api.call("GET", self._path_of(manifests[0]))):
                    manifests.pop(0)
                    continue
            except ApiError as error:
                if not error.is_transient:
                    manifests.pop(0)
                    continue
            self._print_lines(_WAIT_S)
        if manifests:
            report(f"{_name(manifests)} may still exist after {_DELETE_S:g} s. Run `{self._deletion_of(manifests)}`")

    def _path_of(self, manifest: Manifest) -> str:
        return f"{self._api.path_of(manifest)}/{manifest['metadata']['name']}"

    def _is_own(self, found: Manifest) -> bool:
        return bool(found["metadata"].get("labels", {}).get(_LABEL) == self._run)

    def _deletion_of(self, manifests: Sequence[Manifest]) -> str:
        names = " ".join(f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in manifests)
        return f"kubectl delete {names} --namespace {self._api.namespace}"

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            report(text)


def _name(manifests: Sequence[Manifest]) -> str:
    return ", ".join(f"{manifest['kind']} {manifest['metadata']['name']}" for manifest in manifests)

"""A small API server of Kubernetes whose Jobs run as processes of this machine, for tests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.free_ports import two_free_ports
from tests.warm.processes import WarmProcess

from .running import MARK

Manifest = dict[str, Any]

_PATH = re.compile(r"/apis?/(?P<version>.+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>\w+)(/(?P<name>[^/]+))?(/log)?")
_GRACE_S = 1.0
_ENDS = {"jobs": "Complete", "jobsets": "Completed", "trainjobs": "Complete"}


class _Pod:
    """A pod and the process of its container."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.status = manifest, manifest["status"]
        self.process: subprocess.Popen[bytes] | WarmProcess | None = None
        self.lines: list[bytes] = []
        self.changed = threading.Condition()
        self.is_closed = False

    def set_state(self, phase: str, **state: Manifest) -> None:
        self.status |= {"phase": phase, "containerStatuses": [{"name": "node", "state": state}]}

    def start(self, command: list[str], variables: dict[str, str], folder: Path, *, is_warm: bool) -> None:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            if is_warm:
                self.process = WarmProcess(["-m", *command], env=variables, cwd=folder, **streams)
            else:
                self.process = subprocess.Popen(command, env=variables, cwd=folder, start_new_session=True, **streams)
        except OSError as error:
            self._end(128, "StartError", str(error))
        else:
            self.set_state("Running", running={})

    def follow(self) -> None:
        """Store the log until the container ends."""
        if self.process is not None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                with self.changed:
                    self.lines.append(f"{_now(9)} ".encode() + line)
                    self.changed.notify_all()
            self.process.stdout.close()
            code = self.process.wait()
            status = 128 - code if code < 0 else code
            self._end(status, "Error" if status else "Completed", "")

    def _end(self, status: int, reason: str, message: str) -> None:
        ended = {"exitCode": status, "reason": reason, "message": message, "finishedAt": _now(0)}
        with self.changed:
            self.set_state("Failed" if status else "Succeeded", terminated=ended)
            self.is_closed = True
            self.changed.notify_all()

    def stop(self) -> None:
        for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 60.0)):
            with contextlib.suppress(AttributeError, ProcessLookupError, subprocess.TimeoutExpired):
                assert self.process is None or self.process.pid
                os.killpg(self.process.pid, number)  # type: ignore[union-attr]
                self.process.wait(grace_s)  # type: ignore[union-attr]

    def read_log(self, since: str) -> Iterator[bytes]:
        """Yield the lines that are newer than the second `since`, until the container ends."""
        for number in itertools.count():
            with self.changed:
                while len(self.lines) <= number and not self.is_closed:
                    self.changed.wait(10.0)
                if len(self.lines) <= number:
                    return
            if self.lines[number][:19].decode() >= since[:19]:
                yield self.lines[number]


class KubernetesCluster:
    """The cluster. A test sets its attributes to inject faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, Manifest] = {}
        """The objects by path, also objects that are being deleted."""
        self.pods: dict[str, _Pod] = {}
        self.waiting: Manifest = {}
        """The state of containers that never start."""
        self.unscheduled = ""
        self.warnings: list[str] = []
        self.failures: list[tuple[str, str, int]] = []
        """Faulty replies to the next requests with a method and a part of the path: a status, or 0 for a lost reply."""
        self.reply: bytes | None = None
        """The reply to all requests, with the status 200, as from a server that is no API server."""
        self.dropped_after: list[int] = []
        """The numbers of lines after which connections that read a log end."""
        self.backoff_s = 0.0
        """Time before a failed pod is replaced."""
        self.requests: list[str] = []
        self.warm_variables: dict[str, str] = {}
        """Further variables of containers. If there are any, ``paceline`` is a fork of a process with its modules."""
        self.connections: list[tuple[socket.socket, threading.Thread]] = []
        """All connections of clients, each with the thread that answers."""
        self._counter, self._threads = itertools.count(1), list[threading.Thread]()
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self}))
        self._server.daemon_threads = True
        self._spawn(self._server.serve_forever, 0.05)
        user = {"user": {"token": "a token of the user"}, "name": "ada"}
        context = {"context": {"cluster": "test", "user": "ada", "namespace": "ml"}, "name": "test"}
        cluster = {"cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}, "name": "test"}
        self.config = folder / "kubeconfig"
        self.config.write_text(
            json.dumps({"current-context": "test", "clusters": [cluster], "users": [user], "contexts": [context]})
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for pod in [*self.pods.values()]:
            pod.stop()
        for connection, _ in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (*self._threads, *(thread for _, thread in self.connections)):
            thread.join(30.0)
            assert not thread.is_alive(), thread.name

    def _spawn(self, function: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments, name=function.__name__))
        self._threads[-1].start()

    def take_failure(self, method: str, path: str) -> int | None:
        with self._lock:
            self.requests.append(f"{method} {path}")
            found = next((failure for failure in self.failures if failure[0] == method and failure[1] in path), None)
            if found is None:
                return None
            self.failures.remove(found)
            return found[2]

    def create(self, path: str, manifest: Manifest) -> Manifest:
        number = str(next(self._counter))
        manifest["metadata"] |= {"uid": f"uid{number}", "resourceVersion": number, "creationTimestamp": _now(0)}
        manifest["status"] = {"conditions": []}
        self.objects[path] = manifest
        if path.split("/")[-2] in _ENDS:
            self._spawn(self._run_job, path, manifest)
        return manifest

    def _change(self, manifest: Manifest) -> None:
        manifest["metadata"]["resourceVersion"] = str(next(self._counter))

    def scale(self, path: str, num_pods: int) -> None:
        """Change the number of pods of a Job, as ``kubectl patch`` does."""
        self.objects[path]["spec"] |= {"completions": num_pods, "parallelism": num_pods}

    def evict(self, pod: str) -> None:
        """Remove a pod from its node, as for maintenance."""
        self.pods[pod].status["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
        self._spawn(self.pods[pod].stop)

    def _run_job(self, path: str, job: Manifest) -> None:
        """Run the pods, replace failed pods as the Job's policies require, and set the Job's result."""
        port, created = str(two_free_ports()), list[_Pod]()
        newest: dict[int, _Pod] = {}
        starts_s: dict[int, float] = {}
        num_failures, end = 0, ""
        while not end and "deletionTimestamp" not in job["metadata"] and self._server.socket.fileno() >= 0:
            specification = _job_of(job)
            num_pods = 0 if self.warnings else specification["completions"]
            for index in range(num_pods):
                if index not in newest and time.monotonic() >= starts_s.get(index, 0.0):
                    newest[index] = self._start_pod(job, index, port, str(len(created)))
                    created.append(newest[index])
                    self._change(job)
            for index in [index for index in newest if index >= num_pods]:
                self._spawn(self._remove_pod, newest.pop(index))
                self._change(job)
            succeeded = [index for index, pod in newest.items() if pod.status["phase"] == "Succeeded"]
            if (newest and len(succeeded) == num_pods) or ("successPolicy" in specification and 0 in succeeded):
                end = "Complete"
            for index in [index for index, pod in newest.items() if pod.status["phase"] == "Failed"]:
                action = _find_action(specification, newest.pop(index))
                num_failures += action == "Count"
                if action == "FailJob" or num_failures > specification["backoffLimit"]:
                    end = "Failed"
                starts_s[index] = time.monotonic() + self.backoff_s
            time.sleep(0.02)
        for pod in created:
            if not pod.is_closed:
                self._spawn(pod.stop)
        while any(pod.process is not None and not pod.is_closed for pod in created):
            time.sleep(0.02)
        failed = {"type": "Failed", "reason": "BackoffLimitExceeded"}
        job["status"]["conditions"] = [
            {**(failed if end == "Failed" else {"type": _ENDS[path.split("/")[-2]]}), "status": "True"}
        ]
        self._change(job)
        while "deletionTimestamp" not in job["metadata"]:
            if self._server.socket.fileno() < 0:
                return
            time.sleep(0.02)
        for pod in created:
            self.pods.pop(pod.manifest["metadata"]["name"], None)
        del self.objects[path]

    def _start_pod(self, job: Manifest, index: int, port: str, number: str) -> _Pod:
        """Start the pod of an index. Each pod of the job has another `number`."""
        name, kind, num_pods = job["metadata"]["name"], job["kind"], _job_of(job)["completions"]
        container = _container_of(job)
        own_name = f"{name}-{index}-abc"
        metadata: Manifest = {
            "name": f"{own_name}{number}" if own_name in self.pods else own_name,
            "uid": f"{job['metadata']['uid']}-{number}",
            "labels": {"job-name": name} if kind == "Job" else {"jobset.sigs.k8s.io/jobset-name": name},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "creationTimestamp": _now(0),
        }
        pod = _Pod({"metadata": metadata, "status": {"phase": "Pending"}})
        self.pods[metadata["name"]] = pod
        missing = self._find_missing(container)
        if self.unscheduled:
            pod.status["conditions"] = [{"type": "PodScheduled", "status": "False", "message": self.unscheduled}]
        elif self.waiting or missing:
            pod.set_state("Pending", waiting=self.waiting or missing)
        else:
            variables = self._variables_of(container, kind, num_pods, index, port)
            words = [_expand(word, variables) for word in container["command"]]
            pod.start(words, variables, self.folder, is_warm=bool(self.warm_variables))
            self._spawn(pod.follow)
        return pod

    def _remove_pod(self, pod: _Pod) -> None:
        pod.stop()
        self.pods.pop(pod.manifest["metadata"]["name"], None)

    def _find_missing(self, container: Manifest) -> Manifest:
        for variable in container.get("env", ()):
            key = variable.get("valueFrom", {}).get("secretKeyRef")
            if key and not self._secret(key["name"]):
                return {"reason": "CreateContainerConfigError", "message": f'secret "{key["name"]}" not found'}
        return {}

    def _secret(self, name: str) -> Manifest | None:
        return next((found for path, found in self.objects.items() if path.endswith(f"/secrets/{name}")), None)

    def _variables_of(self, container: Manifest, kind: str, num_pods: int, index: int, port: str) -> dict[str, str]:
        variables = {name: os.environ[name] for name in (MARK, "PYTHONPATH", "TMPDIR") if name in os.environ}
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        variables |= self.warm_variables
        variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self.folder)}
        if kind == "TrainJob":
            variables |= {"PET_NNODES": str(num_pods), "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "node-0"}
        for variable in container.get("env", ()):
            origin = variable.get("valueFrom", {})
            if "secretKeyRef" in origin:
                secret = self._secret(origin["secretKeyRef"]["name"])
                assert secret is not None
                variables[variable["name"]] = secret["stringData"][origin["secretKeyRef"]["key"]]
            else:
                variables[variable["name"]] = str(index) if "fieldRef" in origin else variable["value"]
        if "PET_MASTER_ADDR" in variables:  # stands for the cluster's DNS
            variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        return variables

    def delete(self, path: str) -> None:
        found = self.objects[path]
        found["metadata"]["deletionTimestamp"] = _now(0)
        if path.split("/")[-2] not in _ENDS:
            del self.objects[path]

    def find_items(self, plural: str, query: dict[str, str]) -> list[Manifest]:
        if plural == "events":
            return [{"reason": "FailedCreate", "message": warning} for warning in self.warnings]
        label, _, value = query["labelSelector"].partition("=")
        return [pod.manifest for pod in self.pods.values() if pod.manifest["metadata"]["labels"].get(label) == value]


class _Handler(BaseHTTPRequestHandler):
    cluster: KubernetesCluster
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.cluster.connections.append((self.connection, threading.current_thread()))

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        failure = self.cluster.take_failure(self.command, url.path)
        assert self.headers["authorization"] == "Bearer a token of the user"
        if failure:
            self._fail(failure, "injected")
            return
        if self.cluster.reply is not None:
            self._send(200, self.cluster.reply)
            return
        parts = _PATH.fullmatch(url.path)
        assert parts is not None, url.path
        if parts["namespace"] != "ml":
            self._fail(404, f'namespaces "{parts["namespace"]}" not found')
        elif url.path.endswith("/log"):
            self._send_log(parts["name"], query)
        else:
            status, reply = self._answer(parts, url.path, body, query)
            if failure is None:
                self._send(status, reply)
            else:
                self.close_connection = True  # close the connection: the reply is lost

    def _answer(self, parts: Any, path: str, body: Manifest, query: dict[str, str]) -> tuple[int, Manifest]:
        cluster = self.cluster
        if self.command == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in cluster.objects:
                return 409, {"message": "already exists"}
            return 201, cluster.create(path, body)
        if parts["name"] is None:
            return 200, {"metadata": {}, "items": cluster.find_items(parts["plural"], query)}
        found = cluster.objects.get(path)
        if found is None:
            return 404, {"message": f"{path} not found"}
        if self.command == "DELETE":
            if body["preconditions"]["uid"] != found["metadata"]["uid"]:
                return 409, {"message": "the UID differs"}
            cluster.delete(path)
        return 200, found

    def _fail(self, status: int, message: str) -> None:
        self._send(status, {"kind": "Status", "message": message})

    def _send(self, status: int, reply: Manifest | bytes) -> None:
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_log(self, name: str, query: dict[str, str]) -> None:
        pod, dropped = self.cluster.pods[name], self.cluster.dropped_after
        last = dropped.pop(0) if dropped else None
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for number, line in enumerate(pod.read_log(query.get("sinceTime", ""))):
                if number == last:
                    self.wfile.write(b"%x\r\n%s" % (len(line), line[: len(line) // 2]))
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")


def _container_of(job: Manifest) -> Manifest:
    """Return the container of a job's pods."""
    is_train_job = job["kind"] == "TrainJob"
    container: Manifest = job["spec"]["trainer"] if is_train_job else _job_of(job)["template"]["spec"]["containers"][0]
    return container


def _job_of(job: Manifest) -> Manifest:
    """Return the specification of a Job with the number of pods and the policies."""
    specification: Manifest = job["spec"]
    if job["kind"] == "TrainJob":
        return {"completions": specification["trainer"]["numNodes"], "backoffLimit": 0}
    if job["kind"] == "JobSet":
        specification = specification["replicatedJobs"][0]["template"]["spec"]
    return specification


def _find_action(specification: Manifest, pod: _Pod) -> str:
    """Return the action of the first rule for a failed pod, or ``Count``."""
    status = pod.status["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    conditions = {condition["type"] for condition in pod.status.get("conditions", ())}
    for rule in specification.get("podFailurePolicy", {}).get("rules", ()):
        codes = rule.get("onExitCodes")
        if codes is not None and (status in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
        if conditions & {pattern["type"] for pattern in rule.get("onPodConditions", ())}:
            return str(rule["action"])
    return "Count"


def _expand(word: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\((\w+)\)", value, word)


def _now(digits: int) -> str:
    text = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")
    return f"{text[:19]}.{text[20:]:0<{digits}}Z" if digits else f"{text[:19]}Z"

"""The endpoint of Kubeflow Trainer for the progress of a training, for tests."""

from __future__ import annotations

import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme
from kubeflow_trainer_api import models


class StatusServer:
    """Receives the progress over HTTPS, and checks the requests. `folder` contains the token and the certificate."""

    def __init__(self, folder: Path) -> None:
        self.received: list[dict[str, Any]] = []
        """The received values of ``trainerStatus``."""
        self.times_s: list[float] = []
        self.problems: list[str] = []
        self.status = 200
        """The HTTP status of the answers."""
        self.answers = threading.Event()
        """Whether the server sends answers."""
        self.answers.set()
        self.token = folder / "token"
        self.token.write_text("first token\n")
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.variables = {
            "KUBEFLOW_TRAINER_STATUS_URL": f"https://127.0.0.1:{self._server.server_port}/ml/trainjobs/demo/status",
            "KUBEFLOW_TRAINER_STATUS_TOKEN": str(self.token),
            "KUBEFLOW_TRAINER_STATUS_CA_CERT": str(folder / "ca.crt"),
        }

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        assert self.problems == []

    def wait(self, number: int) -> dict[str, Any]:
        """Wait for the request with this number, from 1; return its ``trainerStatus``."""
        deadline = time.monotonic() + 30.0
        while len(self.received) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.received[number - 1]

    def metrics(self) -> dict[str, str]:
        """Return the last metrics."""
        return {metric["name"]: metric["value"] for metric in self.received[-1]["metrics"]}


class _Handler(BaseHTTPRequestHandler):
    owner: StatusServer

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        if request is None or {*request.to_dict()["trainerStatus"]} != {*body["trainerStatus"]}:
            self.owner.problems.append(f"unknown fields: {body}")
        if self.headers["Content-Type"] != "application/json":
            self.owner.problems.append(f"type {self.headers['Content-Type']}")
        if self.headers["Authorization"] != f"Bearer {self.owner.token.read_text().strip()}":
            self.owner.problems.append(f"authorization {self.headers['Authorization']}")
        self.owner.times_s.append(time.monotonic())
        self.owner.received.append(body["trainerStatus"])
        self.owner.answers.wait(60.0)
        self.send_response(self.owner.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

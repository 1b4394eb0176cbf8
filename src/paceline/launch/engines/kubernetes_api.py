"""The API server of a Kubernetes cluster: requests with the official client's settings, and their errors."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from paceline.errors import PeerError, UsageError, first_line, printable

from .manifests import Manifest

_CONNECT_S: Final = 10.0
_REPLY_S: Final = 30.0
_LOG_S: Final = 300.0
"""Time without a line of a log, after which the request is repeated, because the connection may be lost."""
_PAUSE_S: Final = 1.0
_MOST_CONNECTIONS: Final = 1000
_SHOWN_CHARS: Final = 400
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ApiError(PeerError):
    """The API server did not answer or reported an error."""

    def __init__(self, message: str, status: int, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; 0 without an answer."""
        self.was_sent = was_sent
        """Whether the API server may have received the request."""

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 408, 410, 429) or self.status >= 500


class ClusterApi:
    """Requests to the API server, for one namespace. It is thread-safe."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client, self.namespace = client, namespace

    @classmethod
    def connect(cls, namespace: str | None) -> ClusterApi:
        """Read the user's configuration of Kubernetes or, inside a pod, the pod's configuration.

        `namespace` overrides the configured namespace. Raises UsageError without a configuration.
        """
        try:
            import yaml
            from kubernetes import client, config
        except ImportError:
            raise UsageError(
                "--on kubernetes needs the package kubernetes, which is not installed: "
                "pip install 'paceline[kubernetes]'"
            ) from None
        settings = client.Configuration()
        try:
            config.load_kube_config(client_configuration=settings)
            own = config.list_kube_config_contexts()[1]["context"].get("namespace", "default")
        except Exception as error:  # the client raises errors of any type for a malformed file
            try:
                config.load_incluster_config(client_configuration=settings)
                own = _NAMESPACE_FILE.read_text()
            except (config.ConfigException, OSError):
                is_clear = isinstance(error, (config.ConfigException, yaml.YAMLError, OSError))
                reason = " ".join(str(error).split()) if is_clear else f"the file is malformed ({error!r})"
                raise UsageError(
                    f"--on kubernetes: no cluster is configured: {printable(reason, _SHOWN_CHARS)}. Set KUBECONFIG to "
                    "the file of your cluster"
                ) from None
        settings.connection_pool_maxsize = _MOST_CONNECTIONS
        try:
            return cls(client.ApiClient(settings), namespace or own)
        except Exception as error:  # for example of the proxy or the certificates
            raise UsageError(
                f"--on kubernetes: the cluster's configuration has a wrong value: {first_line(error)}. Correct the "
                "file of KUBECONFIG"
            ) from None

    def path_of(self, manifest: Manifest) -> str:
        """Return the path of the objects of a manifest's kind."""
        version = manifest["apiVersion"]
        root = "apis" if "/" in version else "api"
        return f"/{root}/{version}/namespaces/{quote(self.namespace, safe='')}/{manifest['kind'].lower()}s"

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        *,
        patience_s: float = 0.0,
    ) -> dict[str, Any]:
        """Send a request and return the object of the reply. Retry for `patience_s` after transient errors."""
        deadline_s, was_sent = time.monotonic() + patience_s, False
        while True:
            try:
                with self._open(method, path, query, body, _REPLY_S) as response:
                    return self._decode(response.data)
            except ApiError as error:
                error.was_sent = was_sent = was_sent or error.was_sent
                if not error.is_transient or time.monotonic() + _PAUSE_S >= deadline_s:
                    raise
            time.sleep(_PAUSE_S)

    def _decode(self, data: bytes) -> dict[str, Any]:
        """Return the object or the list in a reply. Raises ApiError for other replies, for example of a proxy."""
        try:
            found: dict[str, Any] = json.loads(data)
            if "items" in found or "uid" in found["metadata"] or found["kind"] == "Status":
                return found
        except (ValueError, TypeError, KeyError):
            pass
        host = self._client.configuration.host
        raise ApiError(f"{host} does not answer like an API server of Kubernetes. Check the address", 0)

    @contextlib.contextmanager
    def open_log(self, pod: str, query: Mapping[str, str]) -> Iterator[Any]:
        """Yield a urllib3 response with the lines of a pod's log. The call and its reads raise ApiError."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        with self._open("GET", path, query, None, _LOG_S) as response:
            yield response

    @contextlib.contextmanager
    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        reply_s: float,
    ) -> Iterator[Any]:
        import urllib3

        settings = self._client.configuration
        try:
            response = self._client.rest_client.pool_manager.request(
                method,
                f"{settings.host}{path}{f'?{urlencode(query)}' if query else ''}",
                body=None if body is None else json.dumps(body),
                headers=self._make_headers(),
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=reply_s),
                retries=False,
                preload_content=False,
            )
            try:
                if response.status >= 400:
                    raise ApiError(_explain(response.status, response.data, settings.host), response.status)
                yield response
            finally:
                response.close()
        except ValueError as error:  # for example of the URL or a header
            raise UsageError(
                f"the request to {settings.host} has a wrong value: {first_line(error)}. Correct the file of KUBECONFIG"
            ) from None
        except urllib3.exceptions.HTTPError as error:
            is_broken = isinstance(error, urllib3.exceptions.ProtocolError)
            reason = "the connection broke" if is_broken else printable(str(error).rpartition(": ")[2], _SHOWN_CHARS)
            was_sent = not isinstance(error, urllib3.exceptions.NewConnectionError | urllib3.exceptions.SSLError)
            message = f"the API server at {settings.host} does not answer: {reason}"
            raise ApiError(message, 0, was_sent=was_sent) from None

    def _make_headers(self) -> dict[str, str]:
        """Return the headers, with the user's current token."""
        settings = self._client.configuration.auth_settings().values()
        tokens = {setting["key"]: setting["value"] for setting in settings}
        kinds = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        return {**self._client.default_headers, **kinds, **tokens}


def _explain(status: int, body: bytes, host: str) -> str:
    """Return the sentence for a reply with an error."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    reason = f"({status}): {printable(text.strip(), _SHOWN_CHARS).rstrip('.')}"
    if status == 401:
        return f"the cluster at {host} rejects your credentials {reason}. Log in again"
    if status == 403:
        return f"the cluster at {host} does not permit the request {reason}"
    if status == 429:
        return f"the API server at {host} is overloaded {reason}. Try again later"
    if status >= 500:
        return f"the API server at {host} failed {reason}. Try again later"
    return f"the API server at {host} rejects the request {reason}"

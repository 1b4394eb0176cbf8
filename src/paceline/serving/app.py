"""The HTTP application: it predicts rows in JSON with the newest model, and reports metrics of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.data import FORMATS
from paceline.errors import ModelError, PacelineError, UsageError
from paceline.inference import LoadedModel, load
from paceline.models.stored import find_version
from paceline.observe.metrics import MetricValues, exposition
from paceline.transport import register_type

MAX_BODY_BYTES = 16 << 20
_AT_ONCE_BYTES = 32 << 10  # larger requests are predicted in a thread, so that other requests do not wait
_JSON = "application/json"
_NUMBERED = msgspec.json.Decoder(register_type(list[dict[int, float]]))
_NAMED = msgspec.json.Decoder(register_type(list[dict[str, Any]]))
_logger = logging.getLogger("paceline.serving")


class ModelSource:
    """The newest model in a directory of a saved model or of snapshots. A training may replace the model."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Load the model. Raises ModelError if the directory has no model."""
        self._directory = Path(directory)
        self.version = find_version(self._directory)
        self.model: LoadedModel = load(directory)
        self.reloads = 0
        self.failures = 0
        """Number of newer models that could not be loaded."""
        self._failed: str | None = None
        self._last_error: str | None = None

    def refresh(self) -> None:
        """Load a newer model, if any.

        The old model remains in use while the new model is loaded, and if loading fails.
        """
        try:
            version = find_version(self._directory)
            if version in (self.version, self._failed):
                self._last_error = None
                return
            self._failed = version  # None again after a successful load
            model = load(self._directory)
        except Exception as error:  # the model is damaged, a training is replacing it, or memory is short
            if str(error) != self._last_error:  # do not repeat the same error, such as a missing directory
                self.failures += 1
                self._last_error = str(error)
                _logger.warning("cannot load a newer model, so the old one is still served: %s", error)
            return
        self.model, self.version, self._failed, self._last_error = model, version, None, None
        self.reloads += 1
        _logger.info("serving a newer model: %r", model)


class PredictionService:
    """Answers requests with a source's newest model. Checks for a newer model every `poll_s` seconds."""

    def __init__(self, source: ModelSource, poll_s: float) -> None:
        self._source = source
        self._poll_s = poll_s
        self._metrics = MetricValues()

    @contextlib.asynccontextmanager
    async def follow(self, app: Starlette) -> AsyncIterator[None]:
        """Check for newer models while the application runs."""
        task = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            task.cancel()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await asyncio.to_thread(self._source.refresh)

    async def predict(self, request: Request) -> Response:
        """Return ``{"predictions": [...]}`` with one prediction per row, or ``{"error": ...}`` with status 400."""
        start = time.perf_counter()
        rows = 0
        try:
            body = await _read_body(request)
            if len(body) <= _AT_ONCE_BYTES:
                content, rows = self._answer(body)
            else:
                content, rows = await asyncio.to_thread(self._answer, body)
            response = Response(content, media_type=_JSON)
        except _TooLargeError as error:
            response = _refuse(413, error)
        except ModelError as error:
            response = _refuse(500, error)
        except PacelineError as error:
            response = _refuse(400, error)
        except asyncio.CancelledError:  # the time for finishing requests is over
            response = _refuse(503, UsageError("the server is shutting down. Retry with another server"))
        self._metrics.add("paceline_requests_total", 1, str(response.status_code))
        self._metrics.add("paceline_rows_total", rows)
        self._metrics.observe("paceline_request_seconds", time.perf_counter() - start)
        return response

    def _answer(self, body: bytes) -> tuple[bytes, int]:
        model = self._source.model
        has_numbers = FORMATS[model.format].has_numbered_features
        try:
            rows: list[Any] = (_NUMBERED if has_numbers else _NAMED).decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            expected = '{"17": 0.5}' if has_numbers else '{"column": "value"}'
            raise UsageError(f"the body is not a JSON list of rows such as [{expected}]: {error}") from None
        predictions = model.predict(rows).tolist() if rows else []
        return msgspec.json.encode({"predictions": predictions}), len(rows)

    async def report_health(self, request: Request) -> Response:
        model = self._source.model
        content = {
            "status": "ok",
            "kind": model.kind,
            "format": model.format,
            "features": model.num_features,
            "version": self._source.version,
        }
        return Response(msgspec.json.encode(content), media_type=_JSON)

    async def report_metrics(self, request: Request) -> Response:
        source, metrics = self._source, self._metrics
        metrics.set("paceline_model_reloads_total", source.reloads)
        metrics.set("paceline_model_reload_failures_total", source.failures)
        metrics.set("paceline_model_features", source.model.num_features)
        text, content_type = exposition(metrics.samples, request.headers.get("Accept", ""))
        return Response(text, media_type=content_type)


def make_app(source: ModelSource, poll_s: float = 1.0) -> Starlette:
    service = PredictionService(source, poll_s)
    routes = [
        Route("/predict", service.predict, methods=["POST"]),
        Route("/health", service.report_health),
        Route("/metrics", service.report_metrics),
    ]
    return Starlette(routes=routes, lifespan=service.follow)


class _TooLargeError(UsageError):
    """A request body above the limit."""


async def _read_body(request: Request) -> bytes:
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise _TooLargeError(f"the body has more than {MAX_BODY_BYTES >> 20} MiB. Send fewer rows at a time")
            pieces.append(piece)
    except ClientDisconnect:
        raise UsageError("the connection was closed before the whole body had arrived") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _refuse(status: int, error: PacelineError) -> Response:
    return Response(msgspec.json.encode({"error": str(error)}), status, media_type=_JSON)

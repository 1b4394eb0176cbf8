"""Define the HTTP application: rows to predictions, as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.errors import ModelError, PacelineError, UsageError
from paceline.serving.metrics import RequestMetrics
from paceline.serving.source import ModelSource
from paceline.transport import register_type

MAX_BODY_BYTES = 16 << 20
_AT_ONCE_BYTES = 32 << 10  # larger requests are predicted in a thread, so that other requests do not wait
_JSON = "application/json"
_NUMBERED = msgspec.json.Decoder(register_type(list[dict[int, float]]))
_NAMED = msgspec.json.Decoder(register_type(list[dict[str, Any]]))


class PredictionService:
    """Answer requests with a source's newest model; check for a newer one every `poll_s` seconds."""

    def __init__(self, source: ModelSource, poll_s: float) -> None:
        self._source = source
        self._poll_s = poll_s
        self._metrics = RequestMetrics()

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
        """Return ``{"predictions": [...]}``, one per row, or ``{"error": ...}`` with status 400 for invalid rows."""
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
        except asyncio.CancelledError:  # the server's grace period is over
            response = _refuse(503, UsageError("the server is shutting down: retry with another one"))
        self._metrics.add(response.status_code, rows, time.perf_counter() - start)
        return response

    def _answer(self, body: bytes) -> tuple[bytes, int]:
        model = self._source.model
        try:
            rows: list[Any] = (_NUMBERED if model.format == "libsvm" else _NAMED).decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            expected = '{"17": 0.5}' if model.format == "libsvm" else '{"column": "value"}'
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
        source = self._source
        features = source.model.num_features
        text = self._metrics.as_text(reloads=source.reloads, failures=source.failures, features=features)
        return Response(text, media_type="text/plain; version=0.0.4")


def make_app(source: ModelSource, poll_s: float = 1.0) -> Starlette:
    """Return the application: POST /predict, GET /health, GET /metrics."""
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
                raise _TooLargeError(f"the body has more than {MAX_BODY_BYTES >> 20} MiB: send fewer rows at a time")
            pieces.append(piece)
    except ClientDisconnect:
        raise UsageError("the connection was closed before the whole body had arrived") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _refuse(status: int, error: PacelineError) -> Response:
    return Response(msgspec.json.encode({"error": str(error)}), status, media_type=_JSON)
